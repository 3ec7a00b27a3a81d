"""KV between engines in different processes: through Ray's object store, and handles that expire by anybody's clock.

The owner's engine thread puts the runs of its cache straight into the store, which is the one copy on its side; the
importer's process maps the object and its engine copies from there into its own cache. The pipeline only ever sees the
reference, inside a payload that it does not look into. What is small travels in the payload itself.

Clocks of hosts differ, so on the way between processes a handle says how much longer it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import RayError

from pearl.engine.embedded.kv import Block, Blocks, KvPayload, runs
from pearl.records.turn import Chunk, TurnRequest
from pearl.units import KIB

Item = TypeVar("Item", Chunk, TurnRequest)

FETCH_TIMEOUT_S = 10.0
"""For KV to come from where it is; what takes longer is computed again."""


INLINE_BYTES = 64 * KIB
"""Up to here blocks travel inside their handle: putting into the store and getting costs several times a call between
processes, whatever the size, and Ray passes values up to 100 KB along with a call."""


class ObjectStoreTransport:
    """Exports into the object store; an object lives as long as anybody holds its reference."""

    def __init__(self, inline_bytes: int = INLINE_BYTES) -> None:
        self._inline_bytes = inline_bytes

    def put(self, exported: Block) -> Any:
        """Copy an export into the store, run by run, and give the reference; few bytes are given themselves."""
        shape, dtype = exported.shape, exported.dtype.str
        if exported.nbytes <= self._inline_bytes:
            return _Stored(shape=shape, dtype=dtype, buffers=exported.tobytes())
        # Ray copies bare buffers as they are; an array each would first be described by Python, twenty microseconds apiece.
        return ray.put(_Stored(shape=shape, dtype=dtype, buffers=[PickleBuffer(run.data) for run in runs(exported)]))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """An export on its way."""

    shape: tuple[int, ...]
    dtype: str
    buffers: Any
    """All of it as bytes, or a list of its runs: read-only memory of the store once fetched."""

    def blocks(self) -> Blocks:
        """Views; ValueError or TypeError when the parts do not fit together."""
        if min(self.shape) < 0:
            raise ValueError(f"blocks: got shape {self.shape}, want no negative number")
        if isinstance(self.buffers, bytes):
            return np.frombuffer(self.buffers, self.dtype).reshape(self.shape)
        return [np.frombuffer(buffer, self.dtype).reshape(self.shape[-2:]) for buffer in self.buffers]


async def fetched(request: TurnRequest) -> TurnRequest:
    """The request with its KV mapped into this process; without data where that is gone or does not come."""
    handle = request.kv
    if handle is None or not isinstance(handle.payload, KvPayload):
        return request
    # The engine refuses a handle without data, and the turn is computed from its tokens.
    data: Blocks | None = None
    with contextlib.suppress(RayError, TimeoutError, TypeError, ValueError, OSError, RuntimeError):
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            stored = handle.payload.data
            stored = stored if isinstance(stored, _Stored) else await stored
            data = stored.blocks() if isinstance(stored, _Stored) else None
    return replace(request, kv=replace(handle, payload=replace(handle.payload, data=data)))


def shifted(item: Item, by_s: float) -> Item:
    """The same with its handle, if any, expiring so much later: minus a clock's time to send, plus one's to receive."""
    return item if item.kv is None else replace(item, kv=replace(item.kv, expires_s=item.kv.expires_s + by_s))
