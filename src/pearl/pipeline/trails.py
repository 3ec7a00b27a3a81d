"""Where the KV of each trajectory is: an estimate, good for choosing and harmless when wrong.

An engine may have evicted what is noted here; then it computes what it lacks, and nothing else happens. Laws: what is
noted of a worker is dropped with the worker, set to nothing when new weights void it, and dropped with the trajectory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pearl.records.ids import HandleId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import EndReason, KvHandle


@dataclass(slots=True)
class Trail:
    """Of one trajectory."""

    held: dict[WorkerId, int] = field(default_factory=dict)
    """Tokens from its beginning whose KV a worker holds; 0: it had some, and must be told when the trajectory ends."""
    readback: KvHandle | None = None
    """To KV that a decode worker has beyond what the prefill worker holds."""

    def note(self, worker: WorkerId, context_tokens: int, generated: int, end: EndReason) -> None:
        """A request ended; the last token drawn has been through no forward pass."""
        if end is EndReason.FAILED:
            self.held[worker] = 0
        elif generated:
            self.held[worker] = context_tokens + generated - 1


class Trails:
    """Of all trajectories under way."""

    def __init__(self) -> None:
        self._trails: dict[TrajectoryId, Trail] = {}
        # First kept, first to expire; ids only, because whoever has a handle keeps its KV alive.
        self._kept: deque[tuple[float, TrajectoryId, HandleId]] = deque()

    def __len__(self) -> int:
        return len(self._trails)

    def of(self, trajectory: TrajectoryId) -> Trail:
        """What is known of a trajectory."""
        trail = self._trails.get(trajectory)
        if trail is None:
            trail = self._trails[trajectory] = Trail()
        return trail

    def pop(self, trajectory: TrajectoryId) -> Trail | None:
        """Forget a trajectory."""
        return self._trails.pop(trajectory, None)

    def keep(self, trajectory: TrajectoryId, trail: Trail, handle: KvHandle) -> None:
        """Keep a handle for the next prefill of a trajectory, whose trail this is."""
        trail.readback = handle
        self._kept.append((handle.expires_s, trajectory, handle.id))

    def expired(self, now_s: float) -> list[tuple[TrajectoryId, KvHandle]]:
        """Handles that were kept and are over: as long as anybody keeps one, its KV takes memory."""
        over: list[tuple[TrajectoryId, KvHandle]] = []
        while self._kept and self._kept[0][0] <= now_s:
            _, trajectory, handle = self._kept.popleft()
            trail = self._trails.get(trajectory)
            if trail is not None and trail.readback is not None and trail.readback.id == handle:
                over.append((trajectory, trail.readback))
                trail.readback = None
        return over

    def drop_worker(self, worker: WorkerId) -> None:
        """A worker is gone with everything that it held."""
        for trail in self._trails.values():
            trail.held.pop(worker, None)
            if trail.readback is not None and trail.readback.owner == worker:
                trail.readback = None

    def void(self, worker: WorkerId, version: WeightVersion) -> list[tuple[TrajectoryId, KvHandle]]:
        """A worker dropped its KV for new weights; returns handles to older KV, which nobody will take any more."""
        old: list[tuple[TrajectoryId, KvHandle]] = []
        for trajectory, trail in self._trails.items():
            if worker in trail.held:
                trail.held[worker] = 0
            if trail.readback is not None and trail.readback.version < version:
                old.append((trajectory, trail.readback))
                trail.readback = None
        return old
