"""KV on its way from one engine to another: what is exported, and what makes an import impossible.

A payload holds one block of numbers `[tokens, head_dim]` for each layer and KV head, keys first: the runs that are
contiguous in the cache, so that a transport copies them once, straight from the cache to where they travel. How they travel
is the transport's: `CopyTransport` keeps a copy in this process; another one puts them where other processes can read them,
and whoever receives the request there fetches them before the engine sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.model import Model
from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import KvHandle, Mode, TurnRequest

Block = npt.NDArray[Any]
"""Keys or values of one layer and KV head, shape `[tokens, head_dim]`, in the engine's precision (bfloat16 as its bits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPayload:
    """The payload of this engine's handles."""

    model_hash: str
    epoch: int
    """Of the owner at export."""
    layout: str
    """Layers, KV heads, head size and precision."""
    context_hash: str
    """Of the token ids whose KV this is, the left-out ones included."""
    data: Any
    """What the transport made of the blocks; a list of blocks once fetched, None when it was taken back."""


class KvTransport(Protocol):
    """Takes exported blocks to where an importer can fetch them."""

    def put(self, blocks: Sequence[Block]) -> Any:
        """Take blocks, which are views of the cache and change afterwards, and give what travels in their place."""


class Parcel:
    """Blocks in this process; empty when taken back."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks: list[Block] | None = [block.copy() for block in blocks]


class CopyTransport:
    """For engines in one process."""

    def put(self, blocks: Sequence[Block]) -> Parcel:
        """Copy blocks."""
        return Parcel(blocks)


def context_hash(token_ids: TokenIds) -> str:
    """Hash of a context: KV of other tokens must never be taken for its own."""
    return hashlib.blake2b(np.ascontiguousarray(token_ids.array).tobytes(), digest_size=16).hexdigest()


def layout_of(model: Model) -> str:
    """What two engines must agree on to exchange KV."""
    a = model.architecture
    return f"{a.layers}x{a.kv_heads}x{a.head_dim} {model.place.dtype}"


class KvExports:
    """Handles that an engine has given out: each has an owner, an epoch, and an end."""

    def __init__(self, *, worker: WorkerId, ttl_s: float, transport: KvTransport) -> None:
        self._worker, self._ttl_s, self._transport = worker, ttl_s, transport
        self._given: dict[HandleId, tuple[float, TrajectoryId, Any]] = {}  # soonest end first
        self._exported = 0

    def __len__(self) -> int:
        return len(self._given)

    def export(
        self,
        cache: KvCache,
        model: Model,
        slot: int,
        request: TurnRequest,
        token_ids: TokenIds,
        *,
        epoch: int,
        version: WeightVersion,
        now_s: float,
    ) -> KvHandle:
        """Export the KV of `token_ids`, which a slot holds, from `request.export_from` on."""
        self.expire(now_s)
        start = min(request.export_from, len(token_ids))
        blocks = _blocks(cache, slot, slice(start, len(token_ids)))
        data = self._transport.put(blocks)
        self._exported += 1
        handle = KvHandle(
            id=HandleId(f"{self._worker}-{epoch}-{self._exported}"),
            owner=self._worker,
            epoch=epoch,
            tokens=len(token_ids),
            start=start,
            size_bytes=sum(block.nbytes for block in blocks),
            version=version,
            expires_s=now_s + self._ttl_s,
            payload=KvPayload(
                model_hash=model.hash,
                epoch=epoch,
                layout=layout_of(model),
                context_hash=context_hash(token_ids),
                data=data,
            ),
        )
        self._given[handle.id] = (handle.expires_s, request.trajectory, data)
        return handle

    def release(self, handle: KvHandle) -> None:
        """Take a handle back; unknown ones are ignored."""
        self._drop(handle.id)

    def release_all(self) -> None:
        """Take every handle back."""
        for handle in tuple(self._given):
            self._drop(handle)

    def expire(self, now_s: float) -> None:
        """Take back what has expired."""
        while self._given:
            handle, (expires_s, _, _) = next(iter(self._given.items()))
            if expires_s > now_s:
                return
            self._drop(handle)

    def _drop(self, handle: HandleId) -> None:
        _, _, data = self._given.pop(handle, (0.0, None, None))
        if isinstance(data, Parcel):
            data.blocks = None


def import_kv(cache: KvCache, slot: int, handle: KvHandle, cached: int, tokens: int) -> int:
    """Copy what a slot, which holds `cached` tokens, lacks up to `tokens`; returns how many it holds then.

    The handle was checked with `kv_refusal`. KV that begins behind what the slot holds is no use, and KV may have been taken
    back since: nothing is copied then.
    """
    tokens = min(tokens, handle.tokens)
    if cached < handle.start or cached >= tokens:
        return cached
    data = handle.payload.data if isinstance(handle.payload, KvPayload) else None
    blocks = data.blocks if isinstance(data, Parcel) else data
    if blocks is None:
        return cached
    _write(cache, slot, blocks, slice(cached - handle.start, tokens - handle.start), cached)
    return tokens


def kv_refusal(request: TurnRequest, model: Model, now_s: float) -> str | None:
    """Why the KV of a request cannot be imported: what was got and what is allowed; None when it can."""
    handle = request.kv
    if handle is None:
        return "mode: got decode without kv, want a KV handle" if request.mode is Mode.DECODE else None
    name, payload = f"kv: handle {handle.id}", handle.payload
    if not isinstance(payload, KvPayload):
        return f"{name}: got a payload of {type(payload).__name__}, want one of the embedded engine"
    if payload.model_hash != model.hash:
        return f"{name}: got KV of model {payload.model_hash}, want {model.hash}; send the whole context"
    if payload.layout != layout_of(model):
        return f"{name}: got layout {payload.layout}, want {layout_of(model)}; send the whole context"
    if payload.epoch != handle.epoch:
        return f"{name}: got epoch {handle.epoch}, want {payload.epoch}; send the whole context"
    if now_s > handle.expires_s:
        return f"{name}: expired {now_s - handle.expires_s:.3g} s ago; send the whole context"
    if not isinstance(request.context, TokenIds) or not 0 <= handle.start <= handle.tokens <= len(request.context):
        return f"{name}: got KV of tokens {handle.start} .. {handle.tokens}, want a beginning of the context"
    if payload.context_hash != context_hash(request.context[: handle.tokens]):
        return f"{name}: got KV of other tokens than the context's; send the whole context"
    return _data_fault(name, payload.data, handle, model)


def _data_fault(name: str, data: Any, handle: KvHandle, model: Model) -> str | None:
    blocks = data.blocks if isinstance(data, Parcel) else data
    if blocks is None:
        return f"{name}: was released, or its owner is gone; send the whole context"
    if not isinstance(blocks, list):
        return f"{name}: got {type(blocks).__name__} in the place of its blocks, want them fetched"
    a = model.architecture
    want = (handle.tokens - handle.start, a.head_dim)
    kind = np.dtype(np.int16 if model.place.dtype is torch.bfloat16 else np.float32)
    fits = len(blocks) == 2 * a.layers * a.kv_heads and all(b.shape == want and b.dtype == kind for b in blocks)
    return None if fits else f"{name}: its blocks are not {kind} of shape {want}; send the whole context"


def _blocks(cache: KvCache, slot: int, part: slice) -> list[Block]:
    """A part of a slot's keys and values by layer and head, on the host; there, views."""
    return [block for side in (cache.keys, cache.values) for block in _runs(side[:, slot, :, part].cpu())]


def _runs(side: Tensor) -> list[Block]:
    """By layer and head: views."""
    return [block for layer in _bits(side).numpy() for block in layer]


def _write(cache: KvCache, slot: int, blocks: Sequence[Block], part: slice, at: int) -> None:
    count, half = part.stop - part.start, len(blocks) // 2
    cache.wrote(slot, at + count)
    for side, mine in ((cache.keys, blocks[:half]), (cache.values, blocks[half:])):
        target = side[:, slot, :, at : at + count]
        new = [block[part] for block in mine]
        if target.device.type == "cpu":
            for run, block in zip(_runs(target), new, strict=True):
                run[:] = block
        else:
            stacked = torch.from_numpy(np.stack(new))
            target.copy_(stacked.view(target.dtype).view(target.shape))


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as numbers that numpy knows."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
