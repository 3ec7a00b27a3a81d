"""The journal of a simulated run on disk: as `JournalWriter` writes it, but by whoever writes an entry, and nothing is dropped.

On virtual time there is no moment at which a thread would catch up: entries are encoded at once and written in blocks. The same
entries give the same bytes. A full disk is told by `flush` and `close`, as there.
"""

from __future__ import annotations

import os
from pathlib import Path

from pearl.errors import PearlError, RunFailed
from pearl.records.journal import JournalEntry
from pearl.report.journal import stream_file
from pearl.report.lines import encode, header_line

BLOCK_LINES = 512
"""Written together: some 100 KiB."""


class PlainJournal:
    """A `JournalSink` over the empty journal folder of a new run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lines: dict[str, list[bytes]] = {}
        self._descriptors: dict[str, int] = {}
        self._error: PearlError | None = None
        self._closed = False

    def write(self, entry: JournalEntry) -> None:
        """Take an entry; after the first error, and after `close`, it is let go."""
        if self._error is not None or self._closed:
            return
        try:
            line = encode(entry)
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"journal: a {type(entry).__name__} cannot be written: {error}", error)
            return
        lines = self._lines.setdefault(entry.stream, [])
        lines.append(line)
        if len(lines) >= BLOCK_LINES:
            self._append(entry.stream, lines)

    async def flush(self) -> None:
        """Write what there is.

        Raises:
            RunFailed: something could not be written, now or before.
        """
        self._write_out()

    def close(self) -> None:
        """Write what there is, and end; harmless when repeated.

        Raises:
            RunFailed: something could not be written, now or before.
        """
        if not self._closed:
            try:
                self._write_out()
            finally:
                self._closed = True
                for descriptor in self._descriptors.values():
                    os.close(descriptor)
                self._descriptors.clear()

    def _write_out(self) -> None:
        for stream, lines in self._lines.items():
            self._append(stream, lines)
        if self._error is not None:
            raise self._error

    def _append(self, stream: str, lines: list[bytes]) -> None:
        if self._error is not None or not lines:
            return
        path, data = stream_file(self._folder, stream), b"".join(lines)
        lines.clear()
        try:
            if stream not in self._descriptors:
                self._descriptors[stream] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                data = header_line(stream) + data
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptors[stream], view) :]
        except OSError as error:
            self._fail(f"{path}: the journal cannot be written: {error.strerror}; make room and simulate again", error)

    def _fail(self, text: str, cause: Exception) -> None:
        if self._error is None:
            self._error = RunFailed(text)
            self._error.__cause__ = cause
