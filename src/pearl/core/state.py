"""The GPU-worker-role state: which worker sits on which GPUs, in which role, whether it serves, and how long GPUs stay.

Events fold in one after the other, each giving a new version with a hash; an event that would break an invariant is
refused and the state stays as it was. Invariants, checked in `_violation` alone:

- *slots*: a worker keeps its slot and its GPUs for life; a slot that comes back has the GPUs that it had.
- *one server*: a GPU never serves two active workers, so never training and rollout at once.
- *placed*: a worker's GPUs exist and sit on one node, which has as many.
- *zones*: a worker sits on training GPUs alone (then it trains, or is an overlap worker) or on none of them.

Leases hold external GPUs that are here, each GPU under one lease at most; a GPU under notice is external and here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pearl.core.events import (
    Activity,
    ActivityChanged,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    Lease,
    LeaseBegan,
    LeaseEnded,
    NoticeGiven,
    RefusalReason,
    Role,
    RoleChanged,
    StateEvent,
    StateRefusal,
    Worker,
    WorkerAdded,
    WorkerRemoved,
)
from pearl.core.state_hash import StateHash
from pearl.records.ids import GpuId, LeaseId, WorkerId

__all__ = [
    "Activity",
    "ActivityChanged",
    "FleetState",
    "Gpu",
    "GpuOwner",
    "GpusJoined",
    "GpusLeft",
    "Lease",
    "LeaseBegan",
    "LeaseEnded",
    "NoticeGiven",
    "RefusalReason",
    "Role",
    "RoleChanged",
    "StateEvent",
    "StateRefusal",
    "Worker",
    "WorkerAdded",
    "WorkerRemoved",
    "fold",
]

_TRANSITIONS: Mapping[Activity, frozenset[Activity]] = {
    Activity.TRANSITIONING: frozenset({Activity.ACTIVE, Activity.INACTIVE}),
    Activity.ACTIVE: frozenset({Activity.TRANSITIONING}),
    Activity.INACTIVE: frozenset({Activity.TRANSITIONING}),
}
"""Serving begins and ends only by way of draining or initialising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """One version of the mapping; frozen, cheap to share."""

    version: int = 0
    gpus: Mapping[GpuId, Gpu] = field(default_factory=lambda: MappingProxyType({}))
    workers: Mapping[WorkerId, Worker] = field(default_factory=lambda: MappingProxyType({}))
    slots: Mapping[WorkerId, tuple[GpuId, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """GPUs of every slot that ever was."""
    leases: Mapping[LeaseId, Lease] = field(default_factory=lambda: MappingProxyType({}))
    """Those that are not over. External GPUs that joined without one are under none."""
    notices: Mapping[GpuId, float] = field(default_factory=lambda: MappingProxyType({}))
    """GPUs under notice -> when each must be given back, seconds on the clock of the events."""

    @property
    def hash(self) -> str:
        """16 hex digits over the content in slot order; equal states have equal hashes in every process."""
        return StateHash().of(self)

    def active(self) -> tuple[Worker, ...]:
        """Workers that serve, in slot order."""
        return tuple(self.workers[w] for w in sorted(self.workers) if self.workers[w].activity is Activity.ACTIVE)

    def is_overlap(self, worker: WorkerId) -> bool:
        """Whether a slot has a worker of rollout that sits on training GPUs."""
        found = self.workers.get(worker)
        return found is not None and found.role is not Role.TRAINING and self._on_training(found)

    def leaving(self, by_s: float = math.inf) -> tuple[GpuId, ...]:
        """GPUs under notice that must be given back by then (that moment included), in order of their ids."""
        return tuple(gpu_id for gpu_id in sorted(self.notices) if self.notices[gpu_id] <= by_s)

    def lease_of(self, gpu: GpuId) -> Lease | None:
        """The lease that a GPU is under."""
        return next((lease for lease in self.leases.values() if gpu in lease.gpus), None)

    def leaves_s(self, gpu: GpuId) -> float | None:
        """When a GPU goes at the latest, as far as is known: its notice or the end of its lease, whichever is earlier."""
        lease = self.lease_of(gpu)
        known = (self.notices.get(gpu), None if lease is None else lease.end_s)
        return min((time_s for time_s in known if time_s is not None), default=None)

    def ends_s(self) -> dict[GpuId, float]:
        """GPUs of which it is known when they go at the latest -> that time, as `leaves_s` has it."""
        ends = {gpu: lease.end_s for lease in self.leases.values() if lease.end_s is not None for gpu in lease.gpus}
        return {gpu: min(ends.get(gpu, math.inf), self.notices.get(gpu, math.inf)) for gpu in {**ends, **self.notices}}

    def _on_training(self, worker: Worker) -> bool:
        return all(self.gpus[gpu_id].owner is GpuOwner.TRAINING for gpu_id in worker.gpus)


def fold(state: FleetState, event: StateEvent) -> FleetState | StateRefusal:
    """Apply one event: the next version, or why not."""
    changed = _apply(state, event)
    if isinstance(changed, StateRefusal):
        return changed
    # Nothing but what changed can be wrong: whatever leaves, leaves with all that sits on it.
    if isinstance(event, WorkerAdded | ActivityChanged | RoleChanged):
        violation = _violation(changed, changed.workers[event.worker])
        if violation is not None:
            return violation
    return replace(changed, version=state.version + 1)


def _apply(state: FleetState, event: StateEvent) -> FleetState | StateRefusal:
    match event:
        case GpusJoined(gpus=gpus):
            return _join(state, gpus)
        case GpusLeft(gpus=gpu_ids):
            return _leave(state, gpu_ids)
        case LeaseBegan():
            return _begin(state, event)
        case NoticeGiven():
            return _notice(state, event)
        case LeaseEnded(lease=lease_id):
            lease = state.leases.get(lease_id)
            if lease is None:
                return StateRefusal(reason=RefusalReason.UNKNOWN_LEASE, detail=f"lease {lease_id} is not held")
            return _leave(state, lease.gpus)
        case WorkerAdded():
            return _add(state, event)
        case _:
            return _change(state, event)


def _join(state: FleetState, gpus: tuple[Gpu, ...]) -> FleetState | StateRefusal:
    if not gpus:
        return StateRefusal(reason=RefusalReason.NO_GPU, detail="got no GPUs that join, want at least 1")
    joined = dict(state.gpus)
    for gpu in gpus:
        if gpu.id in joined:
            return StateRefusal(reason=RefusalReason.DUPLICATE_GPU, detail=f"GPU {gpu.id} is already here")
        joined[gpu.id] = gpu
    return replace(state, gpus=MappingProxyType(joined))


def _leave(state: FleetState, gpu_ids: tuple[GpuId, ...]) -> FleetState | StateRefusal:
    if not gpu_ids:
        return StateRefusal(reason=RefusalReason.NO_GPU, detail="got no GPUs that leave, want at least 1")
    for gpu_id in gpu_ids:
        if gpu_id not in state.gpus:
            return _unknown_gpu(gpu_id)
    gone = frozenset(gpu_ids)
    workers = {w.id: w for w in state.workers.values() if not gone.intersection(w.gpus)}
    gpus = {gpu.id: gpu for gpu in state.gpus.values() if gpu.id not in gone}
    notices = {gpu_id: due_s for gpu_id, due_s in state.notices.items() if gpu_id not in gone}
    leases = [replace(lease, gpus=tuple(g for g in lease.gpus if g not in gone)) for lease in state.leases.values()]
    left = replace(state, gpus=MappingProxyType(gpus), workers=MappingProxyType(workers))
    return _with_leases(left, [lease for lease in leases if lease.gpus], notices)


def _begin(state: FleetState, event: LeaseBegan) -> FleetState | StateRefusal:
    times = (event.at_s,) if event.end_s is None else (event.at_s, event.end_s)
    if bad := _bad_time(f"lease {event.lease}", times):
        return bad
    if event.end_s is not None and event.end_s <= event.at_s:
        return StateRefusal(
            reason=RefusalReason.LEASE_OVER,
            detail=f"lease {event.lease}: got an end at {event.end_s} s, want one after {event.at_s} s",
        )
    if event.lease in state.leases:
        return StateRefusal(reason=RefusalReason.DUPLICATE_LEASE, detail=f"lease {event.lease} is already held")
    joined = _join(state, event.gpus)
    if isinstance(joined, StateRefusal):
        return joined
    lease = Lease(id=event.lease, gpus=tuple(gpu.id for gpu in event.gpus), since_s=event.at_s, end_s=event.end_s)
    return _not_external(joined, lease.gpus) or _with_leases(joined, [*state.leases.values(), lease], state.notices)


def _notice(state: FleetState, event: NoticeGiven) -> FleetState | StateRefusal:
    if bad := _bad_time("notice", (event.at_s, event.deadline_s)):
        return bad
    if not event.gpus:
        return StateRefusal(reason=RefusalReason.NO_GPU, detail="got a notice for no GPUs, want at least 1")
    for gpu_id in event.gpus:
        if gpu_id not in state.gpus:
            return _unknown_gpu(gpu_id)
    if stays := _not_external(state, event.gpus):
        return stays
    return _with_leases(state, state.leases.values(), {**state.notices, **dict.fromkeys(event.gpus, event.deadline_s)})


def _with_leases(state: FleetState, leases: Iterable[Lease], notices: Mapping[GpuId, float]) -> FleetState:
    """With these leases and notices; each lease's own deadline follows from its GPUs'."""
    held = {
        lease.id: replace(
            lease, notice_deadline_s=min((notices[gpu] for gpu in lease.gpus if gpu in notices), default=None)
        )
        for lease in leases
    }
    return replace(state, leases=MappingProxyType(held), notices=MappingProxyType(dict(notices)))


def _add(state: FleetState, event: WorkerAdded) -> FleetState | StateRefusal:
    if event.worker in state.workers:
        return StateRefusal(reason=RefusalReason.DUPLICATE_WORKER, detail=f"slot {event.worker} already has a worker")
    had = state.slots.get(event.worker, event.gpus)
    if had != event.gpus:
        return StateRefusal(
            reason=RefusalReason.SLOT_REBOUND,
            detail=f"slot {event.worker}: got GPUs {list(event.gpus)}, want {list(had)} for life",
        )
    if len(set(event.gpus)) < len(event.gpus):
        return StateRefusal(
            reason=RefusalReason.DUPLICATE_GPU,
            detail=f"slot {event.worker}: got GPUs {list(event.gpus)}, want each of them once",
        )
    worker = Worker(id=event.worker, gpus=event.gpus, role=event.role, activity=Activity.TRANSITIONING)
    return replace(_with_worker(state, worker), slots=MappingProxyType({**state.slots, event.worker: event.gpus}))


def _change(state: FleetState, event: WorkerRemoved | ActivityChanged | RoleChanged) -> FleetState | StateRefusal:
    worker = state.workers.get(event.worker)
    if worker is None:
        return StateRefusal(reason=RefusalReason.UNKNOWN_WORKER, detail=f"slot {event.worker} has no worker")
    match event:
        case WorkerRemoved():
            rest = {w.id: w for w in state.workers.values() if w.id != event.worker}
            return replace(state, workers=MappingProxyType(rest))
        case ActivityChanged(activity=activity):
            if activity not in _TRANSITIONS[worker.activity]:
                return StateRefusal(
                    reason=RefusalReason.BAD_TRANSITION,
                    detail=f"worker {worker.id}: {worker.activity.value} -> {activity.value} is not a transition",
                )
            return _with_worker(state, replace(worker, activity=activity))
        case _:
            if worker.activity is Activity.ACTIVE:
                return StateRefusal(
                    reason=RefusalReason.BAD_TRANSITION,
                    detail=f"worker {worker.id} serves; drain it before its role changes",
                )
            return _with_worker(state, replace(worker, role=event.role))


def _with_worker(state: FleetState, worker: Worker) -> FleetState:
    return replace(state, workers=MappingProxyType({**state.workers, worker.id: worker}))


def _violation(state: FleetState, worker: Worker) -> StateRefusal | None:
    """What a worker breaks in a state where the others break nothing."""
    if (bad := _misplaced(state, worker)) is not None or worker.activity is not Activity.ACTIVE:
        return bad
    gpus = frozenset(worker.gpus)
    for other in state.workers.values():
        if other.activity is Activity.ACTIVE and other.id != worker.id and not gpus.isdisjoint(other.gpus):
            first, second = sorted((other.id, worker.id))
            shared = next(gpu for gpu in worker.gpus if gpu in other.gpus)
            return StateRefusal(
                reason=RefusalReason.GPU_BUSY, detail=f"GPU {shared} would serve workers {first} and {second}"
            )
    return None


def _misplaced(state: FleetState, worker: Worker) -> StateRefusal | None:
    """Whether a worker sits where it cannot, whatever the others do."""
    if not worker.gpus:
        return StateRefusal(reason=RefusalReason.NO_GPU, detail=f"worker {worker.id} has no GPU")
    for gpu_id in worker.gpus:
        if gpu_id not in state.gpus:
            return _unknown_gpu(gpu_id)
    nodes = {state.gpus[gpu_id].node for gpu_id in worker.gpus}
    if len(nodes) > 1:
        most = max(sum(gpu.node == node for gpu in state.gpus.values()) for node in nodes)
        if len(worker.gpus) > most:
            return StateRefusal(
                reason=RefusalReason.TP_TOO_LARGE,
                detail=f"worker {worker.id}: its GPUs sit on several nodes; got tp {len(worker.gpus)}, "
                f"want <= {most}, the GPUs of the largest of them",
            )
        return StateRefusal(
            reason=RefusalReason.SPLIT_NODE, detail=f"worker {worker.id}: its GPUs sit on several nodes"
        )
    owners = {state.gpus[gpu_id].owner for gpu_id in worker.gpus}
    if owners != {GpuOwner.TRAINING} and worker.role is Role.TRAINING:
        return StateRefusal(
            reason=RefusalReason.NOT_TRAINING,
            detail=f"worker {worker.id} would train on GPUs that are not the trainer's",
        )
    if GpuOwner.TRAINING in owners and len(owners) > 1:
        return StateRefusal(
            reason=RefusalReason.MIXED_OWNERS,
            detail=f"worker {worker.id}: some of its GPUs are the trainer's, want all or none",
        )
    return None


def _unknown_gpu(gpu_id: GpuId) -> StateRefusal:
    return StateRefusal(reason=RefusalReason.UNKNOWN_GPU, detail=f"GPU {gpu_id} is not part of the job")


def _not_external(state: FleetState, gpu_ids: Iterable[GpuId]) -> StateRefusal | None:
    for gpu_id in gpu_ids:
        owner = state.gpus[gpu_id].owner
        if owner is not GpuOwner.EXTERNAL:
            return StateRefusal(
                reason=RefusalReason.NOT_EXTERNAL, detail=f"GPU {gpu_id} is {owner.value}, want an external one"
            )
    return None


def _bad_time(what: str, times_s: Iterable[float]) -> StateRefusal | None:
    for time_s in times_s:
        if not (math.isfinite(time_s) and time_s >= 0):
            return StateRefusal(
                reason=RefusalReason.BAD_TIME, detail=f"{what}: got time {time_s} s, want a finite one >= 0"
            )
    return None
