"""KV bookkeeping of a fake engine: how long a prefix is cached per trajectory, and exported handles."""

from __future__ import annotations

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import KvHandle


class FakeKv:
    """Prefix lengths and handles; a trajectory's contexts are taken to grow by appending only."""

    def __init__(self, *, worker: WorkerId, capacity_tokens: int, bytes_per_token: int, ttl_s: float) -> None:
        self._worker = worker
        self._capacity_tokens = capacity_tokens
        self._bytes_per_token = bytes_per_token
        self._ttl_s = ttl_s
        self._prefixes: dict[TrajectoryId, int] = {}
        self._handles: dict[HandleId, KvHandle] = {}
        self._exported = 0
        self.epoch = 0
        self.used_tokens = 0
        self.lost = False
        """The process is gone: every handle is refused."""

    def cached_tokens(self, trajectory: TrajectoryId) -> int:
        """Length of the trajectory's cached prefix."""
        return self._prefixes.get(trajectory, 0)

    def keep(self, trajectory: TrajectoryId, tokens: int) -> None:
        """Cache a prefix; the least recently kept ones make room."""
        self.forget(trajectory)
        self._prefixes[trajectory] = tokens
        self.used_tokens += tokens
        while self.used_tokens > self._capacity_tokens:
            self.forget(next(iter(self._prefixes)))

    def forget(self, trajectory: TrajectoryId) -> None:
        """Drop a trajectory's prefix; unknown ones are ignored."""
        self.used_tokens -= self._prefixes.pop(trajectory, 0)

    def forget_all(self) -> None:
        """Drop every prefix; handles stay."""
        self._prefixes.clear()
        self.used_tokens = 0

    def invalidate(self) -> None:
        """Begin a new epoch: prefixes and handles of before are gone."""
        self.forget_all()
        self._handles.clear()
        self.epoch += 1

    def export(self, tokens: int, version: WeightVersion, now_s: float) -> KvHandle:
        """A handle to the KV of `tokens` tokens; its payload is this object, so an importer can ask the owner."""
        for handle in list(self._handles.values()):
            if handle.expires_s > now_s:
                break
            del self._handles[handle.id]
        self._exported += 1
        handle = KvHandle(
            id=HandleId(f"{self._worker}-{self.epoch}-{self._exported}"),
            owner=self._worker,
            epoch=self.epoch,
            tokens=tokens,
            size_bytes=tokens * self._bytes_per_token,
            version=version,
            expires_s=now_s + self._ttl_s,
            payload=self,
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
