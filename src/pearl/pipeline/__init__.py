"""The hot path: asyncio code that talks to ports only.

Time comes from the running loop, randomness from seeds. `asyncio.wait`, `as_completed`, `TaskGroup`, bare sets of tasks,
threads and real I/O are not used here, so that order never depends on object addresses and the same code runs on virtual
time.
"""
