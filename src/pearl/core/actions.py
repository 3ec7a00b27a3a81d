"""What a change of the fleet consists of: actions, what each does to the state, and how each is undone.

Laws:

- *ordered*: a step names the steps that must have succeeded before it; the listed order is one that respects them all.
- *all or nothing*: a group is undone in reverse order when a step of it fails; a step without an undoing (`None`) is a
  point of no return, after which the group only goes forward.

Nothing here acts: executors do, and report the events of `events_of` when an action has succeeded.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    GpuOwner,
    GpusLeft,
    Role,
    RoleChanged,
    StateEvent,
    StateRefusal,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.records.ids import GpuId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """A serving worker gets nothing more; its requests are interrupted and continue elsewhere."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End the process of a worker that does not serve."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """A drained worker frees its device memory and keeps its process."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveBack:
    """GPUs that rollout no longer uses go back to the trainer, or to the source of external ones."""

    gpus: tuple[GpuId, ...]
    """Ascending."""
    to: GpuOwner
    """TRAINING or EXTERNAL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SetRole:
    """A worker that does not serve takes another role."""

    worker: WorkerId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A new process in a slot; it does not serve yet."""

    worker: WorkerId
    gpus: tuple[GpuId, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Wake:
    """A sleeping worker takes device memory again, in this role; it has no weights yet."""

    worker: WorkerId
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights:
    """A started or woken worker takes the newest version."""

    worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Admit:
    """Workers that are ready begin to serve, all at once."""

    workers: tuple[WorkerId, ...]
    """Ascending."""


Action = Drain | Stop | Sleep | GiveBack | SetRole | Start | Wake | LoadWeights | Admit


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """An action in its place."""

    index: int
    """Place in the whole plan, from 0."""
    action: Action
    after: tuple[int, ...]
    """Indices of the steps that must have succeeded; ascending, all smaller than its own."""
    undo: tuple[Action, ...] | None
    """What takes it back, in order; empty where nothing needs to be; None where nothing can: an ended process has lost
    its state, and GPUs that were given back are another's."""


class GroupKind(enum.Enum):
    """What a group of steps is for."""

    RETURN = "return"
    """Overlap workers make way for training."""
    VACATE = "vacate"
    """Workers leave GPUs that the fleet may no longer use; external ones go back."""
    EXPAND = "expand"
    """Workers are woken, or started, or both where neither are of use alone; given weights; and admitted at once."""
    ROLES = "roles"
    """Workers change their roles."""
    CLEAR = "clear"
    """Workers make way for new ones on their GPUs."""
    SURPLUS = "surplus"
    """Workers that the target has no use for end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionGroup:
    """Steps that are done together or not at all."""

    kind: GroupKind
    steps: tuple[Step, ...]
    """>= 1."""
    gap: bool
    """Whether, for a part of it, no worker serves in a role that had one before and has one in the target, or none can
    finish a turn."""

    def undo(self, done: int) -> tuple[Action, ...] | None:
        """What takes back its first `done` steps, last one first; None where one of them cannot be."""
        actions: list[Action] = []
        for step in reversed(self.steps[:done]):
            if step.undo is None:
                return None
            actions += step.undo
        return tuple(actions)


def events_of(action: Action) -> tuple[StateEvent, ...]:
    """What happens to the state when an action has succeeded; nothing where only memory or weights move."""
    match action:
        case Drain(worker=worker):
            return (ActivityChanged(worker=worker, activity=Activity.TRANSITIONING),)
        case Stop(worker=worker):
            return (WorkerRemoved(worker=worker),)
        case Sleep(worker=worker):
            return (ActivityChanged(worker=worker, activity=Activity.INACTIVE),)
        case GiveBack(gpus=gpus, to=owner):
            return (GpusLeft(gpus=gpus),) if owner is GpuOwner.EXTERNAL else ()
        case SetRole(worker=worker, role=role):
            return (RoleChanged(worker=worker, role=role),)
        case Start(worker=worker, gpus=gpus, role=role):
            return (WorkerAdded(worker=worker, gpus=gpus, role=role),)
        case Wake(worker=worker, role=role):
            return (
                ActivityChanged(worker=worker, activity=Activity.TRANSITIONING),
                RoleChanged(worker=worker, role=role),
            )
        case LoadWeights():
            return ()
        case _:
            return tuple(ActivityChanged(worker=worker, activity=Activity.ACTIVE) for worker in action.workers)


def undo_of(state: FleetState, action: Action) -> tuple[Action, ...] | None:
    """What takes an action back, by the state before the plan; None where nothing can."""
    match action:
        case Drain(worker=worker):
            return (Admit(workers=(worker,)),)
        case Stop() | GiveBack():
            return None
        case Sleep(worker=worker):
            return (Wake(worker=worker, role=state.workers[worker].role), LoadWeights(worker=worker))
        case SetRole(worker=worker):
            return (SetRole(worker=worker, role=state.workers[worker].role),)
        case Start(worker=worker):
            return (Stop(worker=worker),)
        case Wake(worker=worker):
            return (SetRole(worker=worker, role=state.workers[worker].role), Sleep(worker=worker))
        case LoadWeights():
            return ()
        case _:
            return tuple(Drain(worker=worker) for worker in reversed(action.workers))


def perform(state: FleetState, actions: Iterable[Action]) -> FleetState | StateRefusal:
    """The state after actions that all succeed, one after the other; or what the state refused first."""
    for action in actions:
        for event in events_of(action):
            result = fold(state, event)
            if isinstance(result, StateRefusal):
                return result
            state = result
    return state
