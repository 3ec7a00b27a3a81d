"""Fleets for tests of plans, from text.

`fleet("a4 b2t c1x", "0 P a0 a1", "1 D- a2", "2 C~ a3", "5 slot b0 b1")`: node a with four reserved GPUs a0..a3, node b
with two of the trainer's, node c with an external one; slot 0 serves prefill, 1 sleeps, 2 is in transition; slot 5 had a
worker once. `T` trains.
"""

from __future__ import annotations

from types import MappingProxyType

from pearl.core.actions import (
    Action,
    ActionGroup,
    Admit,
    Drain,
    GiveBack,
    LoadWeights,
    SetRole,
    Sleep,
    Start,
    Stop,
    Wake,
)
from pearl.core.plan import PlanRequest
from pearl.core.shape import Shape, parse_shape
from pearl.core.state import Activity, FleetState, Gpu, GpuOwner, Role, Worker
from pearl.records.ids import GpuId, NodeId, WorkerId

OWNERS = {"": GpuOwner.RESERVED, "t": GpuOwner.TRAINING, "x": GpuOwner.EXTERNAL}
ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COLOCATED, "T": Role.TRAINING}
ACTIVITIES = {"": Activity.ACTIVE, "-": Activity.INACTIVE, "~": Activity.TRANSITIONING}


def ids(text: str) -> tuple[GpuId, ...]:
    """GPUs by name."""
    return tuple(GpuId(name) for name in text.split())


def fleet(nodes: str, *workers: str) -> FleetState:
    """A state; its version is 0."""
    gpus: dict[GpuId, Gpu] = {}
    for node in nodes.split():
        for i in range(int(node[1])):
            name = GpuId(f"{node[0]}{i}")
            gpus[name] = Gpu(id=name, node=NodeId(node[0]), owner=OWNERS[node[2:]])
    slots: dict[WorkerId, tuple[GpuId, ...]] = {}
    there: dict[WorkerId, Worker] = {}
    for text in workers:
        slot, what, *on = text.split()
        worker = WorkerId(int(slot))
        slots[worker] = tuple(map(GpuId, on))
        if what != "slot":
            there[worker] = Worker(id=worker, gpus=slots[worker], role=ROLES[what[0]], activity=ACTIVITIES[what[1:]])
    return FleetState(gpus=MappingProxyType(gpus), workers=MappingProxyType(there), slots=MappingProxyType(slots))


def zones(state: FleetState, without: str = "") -> tuple[frozenset[GpuId], frozenset[GpuId]]:
    """GPUs of the dedicated and of the overlap zone, less some."""
    left = [gpu for gpu in state.gpus.values() if gpu.id not in without.split()]
    training = frozenset(gpu.id for gpu in left if gpu.owner is GpuOwner.TRAINING)
    return frozenset(gpu.id for gpu in left) - training, training


def request(state: FleetState, shape: str, *, borrowed: int = 0, without: str = "") -> PlanRequest:
    """A target on all GPUs but some; "" is a full stop."""
    usable, lendable = zones(state, without)
    return PlanRequest(
        shape=parse_shape(shape) if shape else Shape(()), borrowed=borrowed, usable=usable, lendable=lendable
    )


def serving(state: FleetState) -> dict[int, str]:
    """Slot -> letter and tp of all that serve, trainers left out."""
    letters = {role: letter for letter, role in ROLES.items()}
    return {w.id: f"{letters[w.role]}{len(w.gpus)}" for w in state.active() if w.role is not Role.TRAINING}


def story(groups: tuple[ActionGroup, ...]) -> list[str]:
    """Each group as a line: `roles gap: 0 drain 1; 1 set 1 D <0; 2 admit 1 <1`."""
    lines: list[str] = []
    for group in groups:
        steps = [
            f"{step.index} {told(step.action)}" + "".join(f" <{index}" for index in step.after) for step in group.steps
        ]
        lines.append(f"{group.kind.value}{' gap' if group.gap else ''}: {'; '.join(steps)}")
    return lines


def told(action: Action) -> str:
    """An action as text."""
    letters = {role: letter for letter, role in ROLES.items()}
    match action:
        case Drain(worker=worker):
            return f"drain {worker}"
        case Stop(worker=worker):
            return f"stop {worker}"
        case Sleep(worker=worker):
            return f"sleep {worker}"
        case GiveBack(gpus=gpus, to=owner):
            return f"back to {owner.value} {' '.join(gpus)}"
        case SetRole(worker=worker, role=role):
            return f"set {worker} {letters[role]}"
        case Start(worker=worker, gpus=gpus, role=role):
            return f"start {worker} {letters[role]} {' '.join(gpus)}"
        case Wake(worker=worker, role=role):
            return f"wake {worker} {letters[role]}"
        case LoadWeights(worker=worker):
            return f"load {worker}"
        case Admit(workers=workers):
            return f"admit {' '.join(map(str, workers))}"
