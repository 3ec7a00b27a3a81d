"""The GPU-worker-role state: which worker sits on which GPUs, in which role, and whether it serves.

Events fold in one after the other, each giving a new version with a hash; an event that would break an invariant is
refused and the state stays as it was. Invariants, checked in `_violation` alone:

- *slots*: a worker keeps its slot and its GPUs for life; a slot that comes back has the GPUs that it had.
- *one server*: a GPU never serves two active workers, so never training and rollout at once.
- *placed*: a worker's GPUs exist and sit on one node.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pearl.records.ids import GpuId, NodeId, WorkerId


class GpuOwner(enum.Enum):
    """Whose a GPU is; dedicated = reserved + external, overlap = training."""

    RESERVED = "reserved"
    EXTERNAL = "external"
    TRAINING = "training"


class Role(enum.Enum):
    """What a worker does."""

    PREFILL = "prefill"
    DECODE = "decode"
    COLOCATED = "colocated"
    TRAINING = "training"


class Activity(enum.Enum):
    """Whether a worker serves."""

    ACTIVE = "active"
    INACTIVE = "inactive"
    """The process is kept but does not serve."""
    TRANSITIONING = "transitioning"
    """Draining or initialising."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU (or, on a machine without any, one engine's share of the CPU)."""

    id: GpuId
    node: NodeId
    owner: GpuOwner


@dataclass(frozen=True, slots=True, kw_only=True)
class Worker:
    """One engine, or one trainer rank group, in its slot."""

    id: WorkerId
    gpus: tuple[GpuId, ...]
    role: Role
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusJoined:
    """GPUs came to the job."""

    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpusLeft:
    """GPUs are gone, and every worker on them."""

    gpus: tuple[GpuId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAdded:
    """A worker is being started in its slot."""

    worker: WorkerId
    gpus: tuple[GpuId, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRemoved:
    """A worker is gone: stopped, or lost."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivityChanged:
    """A worker serves, drains or rests from now on."""

    worker: WorkerId
    activity: Activity


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChanged:
    """A worker that does not serve takes another role."""

    worker: WorkerId
    role: Role


StateEvent = GpusJoined | GpusLeft | WorkerAdded | WorkerRemoved | ActivityChanged | RoleChanged

_TRANSITIONS: Mapping[Activity, frozenset[Activity]] = {
    Activity.TRANSITIONING: frozenset({Activity.ACTIVE, Activity.INACTIVE}),
    Activity.ACTIVE: frozenset({Activity.TRANSITIONING}),
    Activity.INACTIVE: frozenset({Activity.TRANSITIONING}),
}
"""Serving begins and ends only by way of draining or initialising."""


class RefusalReason(enum.Enum):
    """Why an event was not folded in."""

    UNKNOWN_GPU = "unknown_gpu"
    UNKNOWN_WORKER = "unknown_worker"
    DUPLICATE_GPU = "duplicate_gpu"
    DUPLICATE_WORKER = "duplicate_worker"
    SLOT_REBOUND = "slot_rebound"
    SPLIT_NODE = "split_node"
    NO_GPU = "no_gpu"
    GPU_BUSY = "gpu_busy"
    BAD_TRANSITION = "bad_transition"


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefusal:
    """An event that would break an invariant."""

    reason: RefusalReason
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetState:
    """One version of the mapping; frozen, cheap to share."""

    version: int = 0
    gpus: Mapping[GpuId, Gpu] = field(default_factory=lambda: MappingProxyType({}))
    workers: Mapping[WorkerId, Worker] = field(default_factory=lambda: MappingProxyType({}))
    slots: Mapping[WorkerId, tuple[GpuId, ...]] = field(default_factory=lambda: MappingProxyType({}))
    """GPUs of every slot that ever was."""

    @property
    def hash(self) -> str:
        """16 hex digits over the content in slot order; equal states have equal hashes in every process."""
        digest = hashlib.blake2b(digest_size=8)
        for gpu_id in sorted(self.gpus):
            gpu = self.gpus[gpu_id]
            digest.update(f"{gpu.id}|{gpu.node}|{gpu.owner.value}\n".encode())
        for slot in sorted(self.slots):
            digest.update(f"{slot}|{','.join(self.slots[slot])}\n".encode())
        for worker_id in sorted(self.workers):
            worker = self.workers[worker_id]
            digest.update(f"{worker.id}|{worker.role.value}|{worker.activity.value}\n".encode())
        return digest.hexdigest()

    def active(self) -> tuple[Worker, ...]:
        """Workers that serve, in slot order."""
        return tuple(self.workers[w] for w in sorted(self.workers) if self.workers[w].activity is Activity.ACTIVE)


def fold(state: FleetState, event: StateEvent) -> FleetState | StateRefusal:
    """Apply one event: the next version, or why not."""
    changed = _apply(state, event)
    if isinstance(changed, StateRefusal):
        return changed
    return _violation(changed) or replace(changed, version=state.version + 1)


def _apply(state: FleetState, event: StateEvent) -> FleetState | StateRefusal:
    match event:
        case GpusJoined(gpus=gpus):
            return _join(state, gpus)
        case GpusLeft(gpus=gpu_ids):
            return _leave(state, gpu_ids)
        case WorkerAdded():
            return _add(state, event)
        case _:
            return _change(state, event)


def _join(state: FleetState, gpus: tuple[Gpu, ...]) -> FleetState | StateRefusal:
    joined = dict(state.gpus)
    for gpu in gpus:
        if gpu.id in joined:
            return StateRefusal(reason=RefusalReason.DUPLICATE_GPU, detail=f"GPU {gpu.id} is already here")
        joined[gpu.id] = gpu
    return replace(state, gpus=MappingProxyType(joined))


def _leave(state: FleetState, gpu_ids: tuple[GpuId, ...]) -> FleetState | StateRefusal:
    for gpu_id in gpu_ids:
        if gpu_id not in state.gpus:
            return _unknown_gpu(gpu_id)
    gone = frozenset(gpu_ids)
    workers = {w.id: w for w in state.workers.values() if not gone.intersection(w.gpus)}
    gpus = {gpu.id: gpu for gpu in state.gpus.values() if gpu.id not in gone}
    return replace(state, gpus=MappingProxyType(gpus), workers=MappingProxyType(workers))


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


def _violation(state: FleetState) -> StateRefusal | None:
    serving: dict[GpuId, WorkerId] = {}
    for worker_id in sorted(state.workers):
        worker = state.workers[worker_id]
        if not worker.gpus:
            return StateRefusal(reason=RefusalReason.NO_GPU, detail=f"worker {worker_id} has no GPU")
        for gpu_id in worker.gpus:
            if gpu_id not in state.gpus:
                return _unknown_gpu(gpu_id)
            if worker.activity is Activity.ACTIVE and serving.setdefault(gpu_id, worker_id) != worker_id:
                return StateRefusal(
                    reason=RefusalReason.GPU_BUSY,
                    detail=f"GPU {gpu_id} would serve workers {serving[gpu_id]} and {worker_id}",
                )
        if len({state.gpus[gpu_id].node for gpu_id in worker.gpus}) > 1:
            return StateRefusal(
                reason=RefusalReason.SPLIT_NODE, detail=f"worker {worker_id}: its GPUs sit on several nodes"
            )
    return None


def _unknown_gpu(gpu_id: GpuId) -> StateRefusal:
    return StateRefusal(reason=RefusalReason.UNKNOWN_GPU, detail=f"GPU {gpu_id} is not part of the job")
