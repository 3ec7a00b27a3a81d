"""Benchmarks: `python -m benchmarks.NAME [--quick]`; the last line of stdout is one JSON object, see `_report`."""
