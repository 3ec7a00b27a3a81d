"""KV between engines in different processes: through Ray's object store, and handles that expire by anybody's clock.

The owner's engine thread puts the blocks of its cache straight into the store, which is the one copy on its side; the
importer's process maps the object and its engine copies from there into its own cache. The pipeline only ever sees the
reference, inside a payload that it does not look into.

Clocks of hosts differ, so on the way between processes a handle says how much longer it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from pearl.engine.embedded.kv import Block, KvPayload
from pearl.records.turn import Chunk, TurnRequest

Item = TypeVar("Item", Chunk, TurnRequest)

FETCH_TIMEOUT_S = 10.0
"""For KV to come from where it is; what takes longer is computed again."""


class ObjectStoreTransport:
    """Exports into the object store; an object lives as long as anybody holds its reference."""

    def put(self, blocks: Sequence[Block]) -> Any:
        """Copy blocks into the store and give the reference."""
        # Ray copies bare buffers as they are; an array each would first be described by Python, twenty microseconds apiece.
        buffers = [PickleBuffer(np.ascontiguousarray(block).data) for block in blocks]
        return ray.put(_Stored(shape=blocks[0].shape, dtype=blocks[0].dtype.str, buffers=buffers))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """Blocks of one shape in the object store."""

    shape: tuple[int, ...]
    dtype: str
    buffers: list[Any]
    """Read-only memory of the store once fetched."""

    def blocks(self) -> list[Block]:
        return [np.ndarray(self.shape, self.dtype, buffer) for buffer in self.buffers]


async def fetched(request: TurnRequest) -> TurnRequest:
    """The request with its KV mapped into this process; without data where that is gone or does not come."""
    handle = request.kv
    if handle is None or not isinstance(handle.payload, KvPayload):
        return request
    # The engine refuses a handle without data, and the turn is computed from its tokens.
    data: list[Block] | None = None
    with contextlib.suppress(RayError, TimeoutError, TypeError):
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            stored = await handle.payload.data
            data = stored.blocks() if isinstance(stored, _Stored) else None
    return replace(request, kv=replace(handle, payload=replace(handle.payload, data=data)))


def shifted(item: Item, by_s: float) -> Item:
    """The same with its handle, if any, expiring so much later: minus a clock's time to send, plus one's to receive."""
    return item if item.kv is None else replace(item, kv=replace(item.kv, expires_s=item.kv.expires_s + by_s))
