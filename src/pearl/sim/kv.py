"""Exports of KV by a simulated engine: each has an owner, an epoch and an end, and is good for one read.

What an export keeps is pinned in the owner's `PrefixCache`; a read, a release, the end of its time and the end of the
epoch free it. The importer asks the owner itself, as the connector of a real engine does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import KvHandle, Mode, TurnRequest
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.script import Script, ScriptedTokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SimKvPayload:
    """The payload of a simulated engine's handles."""

    exports: KvExports
    """The owner's."""
    model_hash: str
    trajectory: TrajectoryId
    script: Script
    """Of the trajectory whose KV it is."""


class KvExports:
    """Handles that one engine has given out."""

    def __init__(
        self,
        cache: PrefixCache,
        *,
        worker: WorkerId,
        model_hash: str,
        bytes_per_token: int,
        ttl_s: float,
        epoch: int = 0,
    ) -> None:
        self._cache = cache
        self._worker = worker
        self._model_hash = model_hash
        self._bytes_per_token = bytes_per_token
        self._ttl_s = ttl_s
        self._exported = 0
        self.epoch = epoch
        self.lost = False
        """The process is gone: every handle is refused."""
        self.give_back: Callable[[TrajectoryId, HandleId], object] = cache.unpin
        """Ends an export: one that was read, or is not wanted any more; whoever knows the time may replace it."""

    def export(
        self, request: TurnRequest, script: Script, tokens: int, version: WeightVersion, now_s: float
    ) -> KvHandle:
        """A handle to the KV of the first `tokens` of a trajectory, less what the receiver holds already."""
        self._exported += 1
        start = request.export_from
        handle = KvHandle(
            id=HandleId(f"{self._worker}-{self.epoch}-{self._exported}"),
            owner=self._worker,
            epoch=self.epoch,
            tokens=tokens,
            start=start,
            size_bytes=(tokens - start) * self._bytes_per_token,
            version=version,
            expires_s=now_s + self._ttl_s,
            payload=SimKvPayload(
                exports=self, model_hash=self._model_hash, trajectory=request.trajectory, script=script
            ),
        )
        self._cache.pin(request.trajectory, handle.id, tokens, handle.expires_s)
        return handle

    def invalidate(self) -> None:
        """Begin a new epoch: all KV is gone."""
        self._cache.clear()
        self.epoch += 1

    def refusal(self, handle: KvHandle, trajectory: TrajectoryId, now_s: float) -> str | None:
        """Why a handle cannot be read, None when it can."""
        name = f"KV handle {handle.id}"
        if self.lost:
            return f"{name}: its owner, worker {handle.owner}, is gone; send the whole context"
        if handle.epoch != self.epoch:
            return f"{name}: got epoch {handle.epoch}, want {self.epoch}; send the whole context"
        if now_s > handle.expires_s:
            return f"{name}: expired at {handle.expires_s:g} s, now {now_s:g} s; send the whole context"
        if not self._cache.is_pinned(trajectory, handle.id):
            return f"{name}: was released, or read before; send the whole context"
        return None


def kv_refusal(request: TurnRequest, model_hash: str, now_s: float) -> str | None:
    """Why the KV of a request cannot be imported, None when it can or when there is none to import."""
    handle = request.kv
    if handle is None:
        return "got no KV handle, want one with mode decode" if request.mode is Mode.DECODE else None
    payload, name, tokens = handle.payload, f"KV handle {handle.id}", len(request.context)
    if not isinstance(payload, SimKvPayload):
        return f"{name}: got a payload of {type(payload).__name__}, want one of a simulated engine"
    if payload.model_hash != model_hash:
        return f"{name}: got KV of model {payload.model_hash}, want {model_hash}; send the whole context"
    if not 0 <= handle.start <= handle.tokens <= tokens:
        return f"{name}: got KV of tokens {handle.start} .. {handle.tokens}, want a beginning of the {tokens} of the context"
    context = request.context
    if not isinstance(context, ScriptedTokens) or (
        payload.script is not context.script and payload.script != context.script
    ):
        return f"{name}: got KV of another script than the context's; send the whole context"
    return payload.exports.refusal(handle, payload.trajectory, now_s)
