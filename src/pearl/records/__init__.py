"""Frozen records that cross component boundaries.

No torch, no I/O, no behaviour beyond derived facts. Import from the modules: `pearl.records.turn`, ...
"""
