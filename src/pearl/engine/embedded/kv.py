"""KV on its way from one engine to another: what is exported, and what makes an import impossible.

What is exported is a view of the cache, `[layers, 2, kv_heads, tokens, head_dim]`, so that a transport copies it once, straight
from the cache to where it travels. How it travels is the transport's: `CopyTransport` keeps a copy in this process; another
one puts it where other processes can read it, and whoever receives the request there fetches it before the engine sees it.
What arrives is one array again, or its runs, which are contiguous in the cache: a `[tokens, head_dim]` for each layer, side and
KV head.
"""

from __future__ import annotations

import hashlib
import math
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
"""Keys and values, or a run of them, in the engine's precision (bfloat16 as its bits)."""
Blocks = Block | list[Block]
"""All of them at once, or run by run."""


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
    """What the transport made of the export; `Blocks` once fetched, None when it was taken back."""


class KvTransport(Protocol):
    """Takes exports to where an importer can fetch them."""

    def put(self, exported: Block) -> Any:
        """Take a view of the cache, which changes afterwards, and give what travels in its place."""


class Parcel:
    """An export in this process; empty when taken back."""

    def __init__(self, exported: Block) -> None:
        self.blocks: Block | None = exported.copy()


class CopyTransport:
    """For engines in one process."""

    def put(self, exported: Block) -> Parcel:
        """Copy it."""
        return Parcel(exported)


def runs(exported: Block) -> list[Block]:
    """By layer, side and head: views."""
    return [run for layer in exported for side in layer for run in side]


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
        exported = _bits(cache.blocks[:, :, slot, :, start : len(token_ids)].cpu()).numpy()
        data = self._transport.put(exported)
        self._exported += 1
        handle = KvHandle(
            id=HandleId(f"{self._worker}-{epoch}-{self._exported}"),
            owner=self._worker,
            epoch=epoch,
            tokens=len(token_ids),
            start=start,
            size_bytes=exported.nbytes,
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
    a = model.architecture
    run = (handle.tokens - handle.start, a.head_dim)
    whole = (a.layers, 2, a.kv_heads, *run)
    kind = np.dtype(np.int16 if model.place.dtype is torch.bfloat16 else np.float32)
    if isinstance(blocks, np.ndarray):
        fits = blocks.shape == whole and blocks.dtype == kind
    elif isinstance(blocks, list):
        fits = len(blocks) == math.prod(whole[:3]) and all(b.shape == run and b.dtype == kind for b in blocks)
    else:
        return f"{name}: got {type(blocks).__name__} in the place of its blocks, want them fetched"
    return None if fits else f"{name}: its blocks are not {kind} of shape {whole}; send the whole context"


def _write(cache: KvCache, slot: int, blocks: Blocks, part: slice, at: int) -> None:
    end = at + part.stop - part.start
    cache.wrote(slot, end)
    target = cache.blocks[:, :, slot, :, at:end]
    if target.device.type != "cpu":
        new = np.stack(blocks) if isinstance(blocks, list) else blocks
        stacked = torch.from_numpy(np.ascontiguousarray(new[..., part, :]))
        target.copy_(stacked.view(target.dtype).view(target.shape))
    elif isinstance(blocks, np.ndarray):
        _bits(target).numpy()[:] = blocks[..., part, :]
    else:
        for run, block in zip(runs(_bits(target).numpy()), blocks, strict=True):
            run[:] = block[part]


def _bits(tensor: Tensor) -> Tensor:
    """The tensor as numbers that numpy knows."""
    return tensor.view(torch.int16) if tensor.dtype is torch.bfloat16 else tensor
