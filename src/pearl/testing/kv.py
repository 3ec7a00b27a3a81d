"""KV bookkeeping of a fake engine: how long a prefix is cached per trajectory, and exported handles."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Tokens
from pearl.records.turn import KvHandle, Mode, TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FakeKvPayload:
    """The payload of a fake engine's handles: an importer asks the owner itself."""

    owner: FakeKv
    model_hash: str
    context: Tokens
    """Whose KV it is, the left-out beginning included."""


_NOTHING = (0, WeightVersion(0))


class FakeKv:
    """Prefix lengths and handles; a trajectory's contexts are taken to grow by appending only."""

    def __init__(
        self, *, worker: WorkerId, model_hash: str, capacity_tokens: int, bytes_per_token: int, ttl_s: float
    ) -> None:
        self._worker = worker
        self._model_hash = model_hash
        self._capacity_tokens = capacity_tokens
        self._bytes_per_token = bytes_per_token
        self._ttl_s = ttl_s
        self._prefixes: dict[TrajectoryId, tuple[int, WeightVersion]] = {}
        self._handles: dict[HandleId, KvHandle] = {}
        self._exported = 0
        self.epoch = 0
        self.used_tokens = 0
        self.lost = False
        """The process is gone: every handle is refused."""

    def cached_tokens(self, trajectory: TrajectoryId) -> int:
        """Length of the trajectory's cached prefix."""
        return self._prefixes.get(trajectory, _NOTHING)[0]

    def cached(self, trajectory: TrajectoryId) -> tuple[int, WeightVersion]:
        """Length of the trajectory's cached prefix, and the oldest weights that computed some of it."""
        return self._prefixes.get(trajectory, _NOTHING)

    @property
    def trajectories(self) -> list[TrajectoryId]:
        """Those with a cached prefix."""
        return list(self._prefixes)

    def handles(self, now_s: float) -> list[KvHandle]:
        """Given out, not released and not expired."""
        return [handle for handle in self._handles.values() if handle.expires_s > now_s]

    def keep(self, trajectory: TrajectoryId, tokens: int, version: WeightVersion) -> None:
        """Cache a prefix; the least recently kept ones make room."""
        self.forget(trajectory)
        self._prefixes[trajectory] = (tokens, version)
        self.used_tokens += tokens
        while self.used_tokens > self._capacity_tokens:
            self.forget(next(iter(self._prefixes)))

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop a trajectory's prefix; unknown ones are ignored."""
        self.used_tokens -= self._prefixes.pop(trajectory, _NOTHING)[0]

    def forget_all(self) -> None:
        """Drop every prefix; handles stay."""
        self._prefixes.clear()
        self.used_tokens = 0

    def invalidate(self) -> None:
        """Begin a new epoch: prefixes and handles of before are gone."""
        self.forget_all()
        self._handles.clear()
        self.epoch += 1

    def export(self, context: Tokens, version: WeightVersion, now_s: float, start: int = 0) -> KvHandle:
        """A handle to the KV of a context, of which the receiver holds the first `start` tokens."""
        for handle in list(self._handles.values()):
            if handle.expires_s > now_s:
                break
            del self._handles[handle.id]
        self._exported += 1
        handle = KvHandle(
            id=HandleId(f"{self._worker}-{self.epoch}-{self._exported}"),
            owner=self._worker,
            epoch=self.epoch,
            tokens=len(context),
            start=start,
            size_bytes=(len(context) - start) * self._bytes_per_token,
            version=version,
            expires_s=now_s + self._ttl_s,
            payload=FakeKvPayload(owner=self, model_hash=self._model_hash, context=context),
        )
        self._handles[handle.id] = handle
        return handle

    def release(self, handle: KvHandle) -> None:
        """Drop a handle; unknown ones are ignored."""
        self._handles.pop(handle.id, None)

    def refusal(self, handle: KvHandle, now_s: float) -> str | None:
        """Why the owner would not serve a handle, None when it would."""
        if self.lost:
            return f"KV handle {handle.id}: its owner, worker {handle.owner}, is gone; send the whole context"
        if handle.epoch != self.epoch:
            return f"KV handle {handle.id}: got epoch {handle.epoch}, want {self.epoch}; send the whole context"
        if now_s > handle.expires_s:
            return f"KV handle {handle.id}: expired at {handle.expires_s:g} s, now {now_s:g} s; send the whole context"
        if handle.id not in self._handles:
            return f"KV handle {handle.id}: was released; send the whole context"
        return None


def kv_refusal(request: TurnRequest, model_hash: str, now_s: float) -> str | None:
    """Why the KV of a request cannot be imported, None when it can or when there is none to import."""
    handle = request.kv
    if handle is None:
        return "got no KV handle, want one with mode decode" if request.mode is Mode.DECODE else None
    payload, name, tokens = handle.payload, f"KV handle {handle.id}", len(request.context)
    if not isinstance(payload, FakeKvPayload):
        return f"{name}: got a payload of {type(payload).__name__}, want one of a fake engine"
    if payload.model_hash != model_hash:
        return f"{name}: got KV of model {payload.model_hash}, want {model_hash}; send the whole context"
    if not 0 <= handle.start <= handle.tokens <= tokens:
        return f"{name}: got KV of tokens {handle.start} .. {handle.tokens}, want a beginning of the {tokens} of the context"
    if payload.context != request.context[: handle.tokens]:
        return f"{name}: got KV of other tokens than the context's; send the whole context"
    return payload.owner.refusal(handle, now_s)
