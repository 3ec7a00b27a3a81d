"""A stream: in order, in batches, and its end behind everything."""

from __future__ import annotations

import asyncio

import pytest

from pearl.sim.stream import Stream
from pearl.testing.virtual_time import run_virtual


def test_what_was_put_in_is_read_in_batches_and_then_the_end() -> None:
    async def check() -> None:
        stream: Stream[int] = Stream()
        reader = stream.read()
        stream.put(1)
        stream.put(2)
        assert len(stream) == 2
        assert await anext(reader) == (1, 2)
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        stream.put(3)
        assert await waiting == (3,)
        stream.put(4)
        stream.close(ValueError("first"))
        stream.close(ValueError("second"))
        stream.put(5)
        assert await anext(reader) == (4,)
        with pytest.raises(ValueError, match="first"):
            await anext(reader)

    run_virtual(check())


def test_the_end_wakes_the_reader() -> None:
    async def check() -> None:
        stream: Stream[int] = Stream()
        waiting = asyncio.ensure_future(anext(stream.read()))
        await asyncio.sleep(0)
        stream.close(ValueError("over"))
        with pytest.raises(ValueError, match="over"):
            await waiting

    run_virtual(check())
