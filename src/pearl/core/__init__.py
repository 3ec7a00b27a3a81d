"""The decision core: pure functions of frozen records.

No clock, no I/O, no logging, no asyncio, no randomness. Refusals and infeasibility are values with an enum reason.
"""
