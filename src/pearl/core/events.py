"""What a fleet is made of, and what can happen to it.

GPUs come and go, by themselves or under leases; workers sit on them in slots, have a role and serve or do not. `core.state`
folds these events into the one state, or says why not.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId


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
class Lease:
    """External GPUs that came together, for a time."""

    id: LeaseId
    gpus: tuple[GpuId, ...]
    """Those that are still here, at least 1; they may leave one by one."""
    since_s: float
    """When it began, >= 0, on the clock of all events."""
    end_s: float | None = None
    """When it ends at the latest, > since_s; None: not known."""
    notice_deadline_s: float | None = None
    """The earliest time by which any of its GPUs must be given back; None: none is under notice."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseBegan:
    """External GPUs came to the job under a lease."""

    lease: LeaseId
    gpus: tuple[Gpu, ...]
    at_s: float
    """Now, finite and >= 0."""
    end_s: float | None = None
    """When it ends at the latest, > at_s; None: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeGiven:
    """External GPUs must be given back by a deadline; a later notice for the same GPU replaces an earlier one."""

    gpus: tuple[GpuId, ...]
    deadline_s: float
    """Finite and >= 0; one that has passed already means at once."""
    at_s: float
    """Now, finite and >= 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """A lease is over: the rest of its GPUs are gone, and every worker on them."""

    lease: LeaseId


StateEvent = (
    GpusJoined
    | GpusLeft
    | LeaseBegan
    | NoticeGiven
    | LeaseEnded
    | WorkerAdded
    | WorkerRemoved
    | ActivityChanged
    | RoleChanged
)


class RefusalReason(enum.Enum):
    """Why an event was not folded in."""

    UNKNOWN_GPU = "unknown_gpu"
    UNKNOWN_WORKER = "unknown_worker"
    UNKNOWN_LEASE = "unknown_lease"
    DUPLICATE_GPU = "duplicate_gpu"
    DUPLICATE_WORKER = "duplicate_worker"
    DUPLICATE_LEASE = "duplicate_lease"
    SLOT_REBOUND = "slot_rebound"
    SPLIT_NODE = "split_node"
    TP_TOO_LARGE = "tp_too_large"
    """More GPUs than any node of the worker has."""
    NO_GPU = "no_gpu"
    """A worker, a lease or an event that names none."""
    GPU_BUSY = "gpu_busy"
    BAD_TRANSITION = "bad_transition"
    NOT_TRAINING = "not_training"
    """Training on GPUs that are not the trainer's."""
    MIXED_OWNERS = "mixed_owners"
    """Rollout on GPUs of the trainer and on others."""
    NOT_EXTERNAL = "not_external"
    """A lease or a notice for GPUs that stay."""
    BAD_TIME = "bad_time"
    """Not finite, or negative."""
    LEASE_OVER = "lease_over"
    """It ends when it begins, or before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRefusal:
    """An event that would break an invariant."""

    reason: RefusalReason
    detail: str
