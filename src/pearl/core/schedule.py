"""In which order a plan's changes are done, so that as little as possible stops serving meanwhile.

Law of the order:

1. *return*: overlap workers make way for training, before anything else;
2. *vacate*: workers leave GPUs that the fleet may no longer use; external ones go back;
3. *rounds*: in each, as many workers as possible change roles or make way for new ones without taking away what must be
   kept up; workers that come on free GPUs come in the first;
4. *surplus*: what the target has no use for ends, once all others serve.

To be kept up: each role that has a worker before and in the target, and, where the fleet can finish turns before and in
the target, that it can. Where no next change would keep it up, the rest is done in one round, with a gap.

*parties*: of the workers that come in a round, those that wake are admitted at once, in a group of their own, and then those that
start, in another: starting takes ten times as long and fails more often, and borrowed workers need not wait for it, or be undone
with it. But a prefill worker is of no use without a decode worker, nor the other way round. Those that wake and have theirs only
among those that start come after them, or in one group with them where they need each other. A group that needs an earlier one of
its round is admitted after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass

from pearl.core.actions import (
    Action,
    ActionGroup,
    Admit,
    Drain,
    GiveBack,
    GroupKind,
    LoadWeights,
    SetRole,
    Sleep,
    Start,
    Step,
    Stop,
    Wake,
    undo_of,
)
from pearl.core.state import Activity, FleetState, GpuOwner, Role, Worker
from pearl.records.ids import GpuId, WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A worker that comes to serve: new in its slot, or woken."""

    worker: WorkerId
    gpus: tuple[GpuId, ...]
    role: Role
    wakes: bool
    """Its process is there, asleep."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """All that differs between two arrangements; each in order of slots."""

    returned: tuple[Worker, ...]
    """Overlap workers that stop serving."""
    to_training: tuple[GpuId, ...]
    """GPUs of theirs that no other overlap worker will use."""
    vacated: tuple[Worker, ...]
    """Dedicated workers on GPUs that may no longer be used."""
    to_source: tuple[GpuId, ...]
    """External GPUs that may no longer be used, with nobody left on them."""
    removed: tuple[Worker, ...]
    """Other dedicated workers that end."""
    reassigned: Mapping[WorkerId, Role]
    """Workers that go on in another role."""
    arrivals: tuple[Arrival, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What is to be kept up while the fleet changes."""

    roles: frozenset[Role]
    """Each of these has a worker that serves."""
    turns: bool
    """The fleet can finish a turn."""

    def missing(self, serving: Mapping[Role, int]) -> frozenset[Role | None]:
        """What such numbers of serving workers do not keep up; None stands for turns."""
        roles = frozenset(role for role in self.roles if serving.get(role, 0) == 0)
        return roles | {None} if self.turns and not finishes_turns(serving) else roles


def finishes_turns(serving: Mapping[Role, int]) -> bool:
    """Whether workers can serve a whole turn: a colocated one, or prefill and decode."""
    prefill, decode, colocated = (serving.get(role, 0) > 0 for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED))
    return colocated or (prefill and decode)


PARTNERS = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL}
"""Role -> the one without which it finishes no turn."""


def service_of(before: Mapping[Role, int], target: Mapping[Role, int]) -> Service:
    """What a change between two numbers of serving workers has to keep up."""
    return Service(
        roles=frozenset(role for role, count in target.items() if count > 0 and before.get(role, 0) > 0),
        turns=finishes_turns(before) and finishes_turns(target),
    )


def schedule(state: FleetState, changes: Changes, target: Mapping[Role, int]) -> tuple[ActionGroup, ...]:
    """The steps of all changes towards these numbers of serving workers, grouped and in order."""
    before: Counter[Role] = Counter(worker.role for worker in state.active() if worker.role is not Role.TRAINING)
    script = _Script(state, service_of(before, target), before)
    script.depart(GroupKind.RETURN, changes.returned, changes.to_training, GpuOwner.TRAINING)
    script.depart(GroupKind.VACATE, changes.vacated, changes.to_source)
    moves, surplus = _moves(state, changes)
    while moves:
        moves = script.round(moves)
    script.depart(GroupKind.SURPLUS, surplus, ())
    return tuple(script.groups)


# -- moves: what can be done on its own ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Move:
    """Changes that need each other: one worker's new role; or arrivals, and all that make way for them."""

    leaving: tuple[Worker, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    turning: tuple[tuple[Worker, Role], ...] = ()

    def drained(self) -> Counter[Role]:
        """How many serving workers of which role it drains."""
        workers = (*self.leaving, *(worker for worker, _ in self.turning))
        return Counter(worker.role for worker in workers if worker.activity is Activity.ACTIVE)


def _moves(state: FleetState, changes: Changes) -> tuple[list[_Move], tuple[Worker, ...]]:
    """Changes of roles first, then arrivals; and the removed workers that make way for nobody."""
    holders: dict[GpuId, list[Worker]] = {}
    for worker in changes.removed:
        for gpu in worker.gpus:
            holders.setdefault(gpu, []).append(worker)
    part_of: dict[WorkerId, int] = {}
    parts: dict[int, tuple[set[WorkerId], list[Arrival]]] = {}
    for number, arrival in enumerate(changes.arrivals):
        gone, arrivals = {worker.id for gpu in arrival.gpus for worker in holders.get(gpu, ())}, [arrival]
        for joined in sorted({part_of[slot] for slot in gone if slot in part_of}):
            others, before = parts.pop(joined)
            gone |= others
            arrivals += before
        parts[number] = (gone, arrivals)
        part_of.update(dict.fromkeys(gone, number))
    moves = [_Move(turning=((state.workers[slot], role),)) for slot, role in changes.reassigned.items()]
    for gone, arrivals in parts.values():
        leaving = tuple(state.workers[slot] for slot in sorted(gone))
        moves.append(_Move(leaving=leaving, arrivals=tuple(sorted(arrivals, key=lambda arrival: arrival.worker))))
    return moves, tuple(worker for worker in changes.removed if worker.id not in part_of)


def parties(arrivals: Iterable[Arrival], there: Set[Role]) -> Iterator[tuple[Arrival, ...]]:
    """Arrivals that are admitted together: those that wake, those that start, and those that need what starts.

    `there`: roles that have a worker without them. Each party is in the order given; none is empty.
    """
    arrivals = tuple(arrivals)
    wake = {each.role for each in arrivals if each.wakes}
    start = {each.role for each in arrivals if not each.wakes}
    late = {role for role in wake if PARTNERS.get(role) in start - wake - there}
    bound = {role for role in start if PARTNERS.get(role) in late - start - there}
    places = [2 * (each.role in late) if each.wakes else 1 + (each.role in bound) for each in arrivals]
    for number in range(3):
        party = tuple(each for each, place in zip(arrivals, places, strict=True) if place == number)
        if party:
            yield party


# -- writing steps down ----------------------------------------------------------------------------------------------


class _Script:
    """Steps as they are written, in stages: what a stage drains, it may drain at once."""

    def __init__(self, state: FleetState, service: Service, serving: Counter[Role]) -> None:
        self.groups: list[ActionGroup] = []
        self._state = state
        self._service = service
        self._serving = serving
        """As it is when all steps so far are done."""
        self._gap = False
        """Of the stage."""
        self._steps: list[Step] = []
        """Of the group."""
        self._written = 0
        self._admissions: list[int] = []
        self._waits: list[int] = []
        """Admissions of earlier stages: drains of this one come after them."""
        self._freed: dict[GpuId, list[int]] = {}
        """Steps that free a GPU."""

    def depart(
        self, kind: GroupKind, workers: Sequence[Worker], back: tuple[GpuId, ...], to: GpuOwner = GpuOwner.EXTERNAL
    ) -> None:
        """A stage in which workers go, and GPUs back to their owner."""
        self._begin([_Move(leaving=tuple(workers))])
        self._leave(kind, workers, back, to)

    def round(self, moves: Sequence[_Move]) -> list[_Move]:
        """A stage of as many moves as service allows at once, of all where it allows none; gives what is left."""
        now: list[_Move] = []
        later: list[_Move] = []
        serving, missing = self._serving, self._service.missing(self._serving)
        for move in moves:
            rest = serving - move.drained()
            if self._service.missing(rest) <= missing:
                serving = rest
                now.append(move)
            else:
                later.append(move)
        if not now:
            now, later = later, now
        self._begin(now)
        self._turn([pair for move in now for pair in move.turning])
        self._leave(GroupKind.CLEAR, [worker for move in now for worker in move.leaving], (), GpuOwner.EXTERNAL)
        self._expand([arrival for move in now for arrival in move.arrivals])
        return later

    def _begin(self, moves: Iterable[_Move]) -> None:
        lowest = Counter(self._serving)
        for move in moves:
            lowest -= move.drained()
        self._gap = bool(self._service.missing(lowest))
        self._waits = list(self._admissions)

    def _leave(self, kind: GroupKind, workers: Sequence[Worker], back: tuple[GpuId, ...], to: GpuOwner) -> None:
        drains = self._drain(workers)
        ends: list[int] = []
        for worker in workers:
            action = Sleep(worker=worker.id) if kind is GroupKind.RETURN else Stop(worker=worker.id)
            ends.append(self._write(action, drains.get(worker.id, ())))
            for gpu in worker.gpus:
                self._freed.setdefault(gpu, []).append(ends[-1])
        if back:
            self._write(GiveBack(gpus=back, to=to), ends)
        self._close(kind)

    def _turn(self, turning: Sequence[tuple[Worker, Role]]) -> None:
        drains = self._drain([worker for worker, _ in turning])
        ready = [self._write(SetRole(worker=worker.id, role=role), drains[worker.id]) for worker, role in turning]
        self._admit({worker.id: role for worker, role in turning}, ready)
        self._close(GroupKind.ROLES)

    def _expand(self, arrivals: Sequence[Arrival]) -> None:
        there = +self._serving
        admitted: dict[Role, int] = {}
        for party in parties(arrivals, there.keys()):
            begun = [
                self._write(_begin(each), {step for gpu in each.gpus for step in self._freed.get(gpu, ())})
                for each in party
            ]
            ready = [
                self._write(LoadWeights(worker=each.worker), [step]) for each, step in zip(party, begun, strict=True)
            ]
            roles = {each.role for each in party}
            needs = {PARTNERS[role] for role in roles & PARTNERS.keys()} - roles - there.keys()
            ready += [admitted[role] for role in needs if role in admitted]
            self._admit({each.worker: each.role for each in party}, ready)
            admitted |= dict.fromkeys(roles, self._admissions[-1])
            self._close(GroupKind.EXPAND)

    def _drain(self, workers: Iterable[Worker]) -> dict[WorkerId, tuple[int, ...]]:
        """Those of them that serve; gives where."""
        drains: dict[WorkerId, tuple[int, ...]] = {}
        for worker in workers:
            if worker.activity is Activity.ACTIVE:
                drains[worker.id] = (self._write(Drain(worker=worker.id), self._waits),)
                self._serving[worker.role] -= 1
        return drains

    def _admit(self, roles: Mapping[WorkerId, Role], ready: Sequence[int]) -> None:
        if roles:
            self._admissions.append(self._write(Admit(workers=tuple(sorted(roles))), ready))
            self._serving.update(roles.values())

    def _write(self, action: Action, after: Iterable[int]) -> int:
        index = self._written
        undo = undo_of(self._state, action)
        self._steps.append(Step(index=index, action=action, after=tuple(sorted(after)), undo=undo))
        self._written += 1
        return index

    def _close(self, kind: GroupKind) -> None:
        if self._steps:
            self.groups.append(ActionGroup(kind=kind, steps=tuple(self._steps), gap=self._gap))
            self._steps = []


def _begin(arrival: Arrival) -> Action:
    if arrival.wakes:
        return Wake(worker=arrival.worker, role=arrival.role)
    return Start(worker=arrival.worker, gpus=arrival.gpus, role=arrival.role)
