"""Any order of events, against a model that keeps flat tables.

Invariants: GPUs are those that joined and have not left; a slot is never renumbered and never changes its GPUs; no GPU serves
two workers; every worker's GPUs exist, on one node and in one zone; leases hold external GPUs that are here, each under one
of them; a refused event changes nothing, an accepted one raises the version by one; equal states have equal hashes.
"""

from __future__ import annotations

from dataclasses import replace

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pearl.core.state import (
    Activity,
    ActivityChanged,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    GpusLeft,
    LeaseBegan,
    LeaseEnded,
    NoticeGiven,
    Role,
    RoleChanged,
    StateEvent,
    WorkerAdded,
    WorkerRemoved,
    fold,
)
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId

# Few of everything, so that events meet.
GPUS = {
    name: Gpu(id=GpuId(name), node=NodeId(node), owner=owner)
    for name, node, owner in (
        ("a", "n1", GpuOwner.RESERVED),
        ("b", "n1", GpuOwner.TRAINING),
        ("c", "n1", GpuOwner.TRAINING),
        ("d", "n1", GpuOwner.EXTERNAL),
        ("e", "n2", GpuOwner.EXTERNAL),
        ("f", "n2", GpuOwner.EXTERNAL),
    )
}
EXTERNAL = {"d", "e", "f"}
TRAINING = {"b", "c"}
SOME = st.lists(st.sampled_from(sorted(GPUS)), max_size=3)
LENT = st.lists(st.sampled_from(["d", "d", "e", "f", "a"]), max_size=3)
SLOTS = st.integers(0, 2).map(WorkerId)
LEASES = st.sampled_from(["one", "two"]).map(LeaseId)
TIMES = st.sampled_from([-1.0, 0.0, 5.0, 5.0, 9.0, float("nan"), float("inf")])


def fine(time_s: float) -> bool:
    return 0 <= time_s < float("inf")


class Fleet(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.state = FleetState()
        self.gpus: set[str] = set()
        self.slots: dict[WorkerId, tuple[str, ...]] = {}
        self.workers: dict[WorkerId, tuple[Role, Activity]] = {}
        self.leases: dict[LeaseId, list[str]] = {}
        self.notices: dict[str, float] = {}
        self.join(["a", "b", "c"])

    def submit(self, event: StateEvent, *, allowed: bool) -> bool:
        before, digest = replace(self.state), self.state.hash
        result = fold(self.state, event)
        assert self.state == before
        assert self.state.hash == digest
        assert isinstance(result, FleetState) == allowed, result
        if isinstance(result, FleetState):
            assert result.version == self.state.version + 1
            self.state = result
        return allowed

    def serving(self, name: str) -> list[WorkerId]:
        return [w for w, (_, act) in self.workers.items() if act is Activity.ACTIVE and name in self.slots[w]]

    def zone_allows(self, names: tuple[str, ...], role: Role) -> bool:
        return set(names) <= TRAINING or (role is not Role.TRAINING and not TRAINING & set(names))

    def gone(self, names: set[str]) -> None:
        self.gpus -= names
        self.workers = {w: kept for w, kept in self.workers.items() if not names & set(self.slots[w])}
        self.notices = {name: due for name, due in self.notices.items() if name not in names}
        left = {lease: [name for name in held if name not in names] for lease, held in self.leases.items()}
        self.leases = {lease: held for lease, held in left.items() if held}

    @rule(names=SOME)
    def join(self, names: list[str]) -> None:
        allowed = len(set(names)) == len(names) > 0 and not self.gpus.intersection(names)
        if self.submit(GpusJoined(gpus=tuple(GPUS[name] for name in names)), allowed=allowed):
            self.gpus.update(names)

    @rule(names=SOME)
    def leave(self, names: list[str]) -> None:
        allowed = bool(names) and self.gpus.issuperset(names)
        if self.submit(GpusLeft(gpus=tuple(map(GpuId, names))), allowed=allowed):
            self.gone(set(names))

    @rule(lease=LEASES, names=LENT, at_s=TIMES, end_s=st.one_of(st.none(), TIMES))
    def begin_lease(self, lease: LeaseId, names: list[str], at_s: float, end_s: float | None) -> None:
        allowed = (
            fine(at_s)
            and (end_s is None or (fine(end_s) and end_s > at_s))
            and lease not in self.leases
            and len(set(names)) == len(names) > 0
            and not self.gpus.intersection(names)
            and EXTERNAL.issuperset(names)
        )
        event = LeaseBegan(lease=lease, gpus=tuple(GPUS[name] for name in names), at_s=at_s, end_s=end_s)
        if self.submit(event, allowed=allowed):
            self.gpus.update(names)
            self.leases[lease] = names

    @rule(lease=LEASES)
    def lend_the_rest(self, lease: LeaseId) -> None:
        self.begin_lease(lease, sorted(EXTERNAL - self.gpus)[:2], 5.0, None)

    @rule(lease=LEASES)
    def end_lease(self, lease: LeaseId) -> None:
        held = self.leases.get(lease)
        if self.submit(LeaseEnded(lease=lease), allowed=held is not None):
            assert held is not None
            self.gone(set(held))

    @rule(names=LENT, deadline_s=TIMES, at_s=TIMES)
    def give_notice(self, names: list[str], deadline_s: float, at_s: float) -> None:
        allowed = (
            fine(deadline_s)
            and fine(at_s)
            and bool(names)
            and self.gpus.issuperset(names)
            and EXTERNAL.issuperset(names)
        )
        event = NoticeGiven(gpus=tuple(map(GpuId, names)), deadline_s=deadline_s, at_s=at_s)
        if self.submit(event, allowed=allowed):
            self.notices.update(dict.fromkeys(names, deadline_s))

    @rule(worker=SLOTS, names=SOME, role=st.sampled_from(Role))
    def add(self, worker: WorkerId, names: list[str], role: Role) -> None:
        allowed = (
            worker not in self.workers
            and self.slots.get(worker, tuple(names)) == tuple(names)
            and len(set(names)) == len(names) > 0
            and self.gpus.issuperset(names)
            and len({GPUS[name].node for name in names}) == 1
            and self.zone_allows(tuple(names), role)
        )
        if self.submit(WorkerAdded(worker=worker, gpus=tuple(map(GpuId, names)), role=role), allowed=allowed):
            self.slots[worker] = tuple(names)
            self.workers[worker] = (role, Activity.TRANSITIONING)

    @rule(worker=SLOTS, role=st.sampled_from(Role), turned_round=st.booleans())
    def add_again(self, worker: WorkerId, role: Role, turned_round: bool) -> None:
        names = list(self.slots.get(worker, ("b", "c")))
        self.add(worker, names[::-1] if turned_round else names, role)

    @rule(worker=SLOTS)
    def remove(self, worker: WorkerId) -> None:
        if self.submit(WorkerRemoved(worker=worker), allowed=worker in self.workers):
            del self.workers[worker]

    @rule(worker=SLOTS, activity=st.sampled_from(Activity))
    def turn(self, worker: WorkerId, activity: Activity) -> None:
        allowed = False
        if worker in self.workers:
            now = self.workers[worker][1]
            allowed = (now is Activity.TRANSITIONING) != (activity is Activity.TRANSITIONING)
            if activity is Activity.ACTIVE:
                allowed = allowed and not any(self.serving(name) for name in self.slots[worker])
        if self.submit(ActivityChanged(worker=worker, activity=activity), allowed=allowed):
            self.workers[worker] = (self.workers[worker][0], activity)

    @rule(worker=SLOTS)
    def serve(self, worker: WorkerId) -> None:
        self.add_again(worker, Role.COLOCATED, turned_round=False)
        self.turn(worker, Activity.ACTIVE)

    @rule(worker=SLOTS, role=st.sampled_from(Role))
    def change_role(self, worker: WorkerId, role: Role) -> None:
        allowed = (
            worker in self.workers
            and self.workers[worker][1] is not Activity.ACTIVE
            and self.zone_allows(self.slots[worker], role)
        )
        if self.submit(RoleChanged(worker=worker, role=role), allowed=allowed):
            self.workers[worker] = (role, self.workers[worker][1])

    @invariant()
    def equals_the_model(self) -> None:
        assert set(self.state.gpus) == self.gpus
        assert {slot: tuple(gpus) for slot, gpus in self.state.slots.items()} == self.slots
        got = {w: (worker.role, worker.activity) for w, worker in self.state.workers.items()}
        assert got == self.workers
        assert all(worker.gpus == self.slots[w] for w, worker in self.state.workers.items())
        assert {lease: list(held.gpus) for lease, held in self.state.leases.items()} == self.leases
        assert dict(self.state.notices) == self.notices
        assert self.state.leaving() == tuple(sorted(self.notices))

    @invariant()
    def no_gpu_serves_two(self) -> None:
        used = [gpu for worker in self.state.active() for gpu in worker.gpus]
        assert len(used) == len(set(used))

    @invariant()
    def workers_are_placed(self) -> None:
        for worker in self.state.workers.values():
            assert len({self.state.gpus[gpu].node for gpu in worker.gpus}) == 1
            overlap = worker.role is not Role.TRAINING and TRAINING.issuperset(worker.gpus)
            assert self.state.is_overlap(worker.id) == overlap

    @invariant()
    def leases_hold_what_is_here(self) -> None:
        lent = [gpu for lease in self.state.leases.values() for gpu in lease.gpus]
        assert len(lent) == len(set(lent))
        assert self.gpus.intersection(EXTERNAL).issuperset(lent)
        for lease in self.state.leases.values():
            due = [self.notices[gpu] for gpu in lease.gpus if gpu in self.notices]
            assert lease.notice_deadline_s == (min(due) if due else None)

    @invariant()
    def equal_states_hash_equal(self) -> None:
        turned_round = replace(
            self.state,
            gpus=dict(reversed(self.state.gpus.items())),
            workers=dict(reversed(self.state.workers.items())),
            slots=dict(reversed(self.state.slots.items())),
            leases=dict(reversed(self.state.leases.items())),
            notices=dict(reversed(self.state.notices.items())),
        )
        assert turned_round == self.state
        assert turned_round.hash == self.state.hash


TestFleet = Fleet.TestCase
TestFleet.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
