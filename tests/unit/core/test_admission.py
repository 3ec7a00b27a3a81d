"""Admission and closing, by hand, against brute force, and as a whole process under random completion orders.

Invariants of the process: a batch that closes never leaves the others unable to meet their deadlines; nothing is consumed
staler than allowed; at most `max_staleness + 1` batches are in flight; when every live group has completed, a batch closes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.admission import AdmissionLimits, BatchCloses, BatchWaits, LiveGroup, admissible_groups, close_batch
from pearl.records.ids import WeightVersion


def limits(batch: int, staleness: int, *, size: int = 4, slots: int = 1000) -> AdmissionLimits:
    return AdmissionLimits(groups_per_batch=batch, group_size=size, max_staleness=staleness, slots=slots)


def group(index: int, admitted: int, rank: int | None = None) -> LiveGroup:
    return LiveGroup(index=index, admitted_version=WeightVersion(admitted), completed_rank=rank)


# --- admission by hand -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("staleness", "served", "consumed", "live", "want"),
    [
        (0, 0, 0, 0, 3),  # synchronous: one batch
        (0, 0, 0, 2, 1),
        (0, 0, 3, 0, 0),  # it is being trained: nothing runs meanwhile
        (0, 1, 3, 0, 3),
        (1, 0, 0, 0, 6),  # two batches
        (1, 0, 3, 3, 0),  # one trained, one running
        (1, 1, 3, 3, 3),
        (2, 5, 15, 4, 5),  # (5 + 3) * 3 - 19
        (2, 0, 9, 3, 0),  # 12 are more than allowed: none is taken back
    ],
)
def test_admission_keeps_staleness_plus_one_batches_in_flight(
    staleness: int, served: int, consumed: int, live: int, want: int
) -> None:
    got = admissible_groups(
        limits(3, staleness), served_version=served, consumed=consumed, live=live, active_trajectories=0
    )
    assert got == want


@pytest.mark.parametrize(("active", "want"), [(0, 2), (3, 2), (4, 1), (7, 1), (8, 0), (11, 0), (12, 0)])
def test_a_group_is_admitted_only_when_all_of_its_trajectories_have_slots(active: int, want: int) -> None:
    # 11 slots, groups of 4: the slots left over are no group.
    bounds = limits(100, 0, slots=11)
    got = admissible_groups(bounds, served_version=0, consumed=0, live=0, active_trajectories=active)
    assert got == want


# --- closing by hand -------------------------------------------------------------------------------------------------


def test_a_batch_waits_until_enough_groups_have_completed() -> None:
    live = [group(0, 0), group(1, 0, rank=0), group(2, 0)]
    assert close_batch(limits(2, 1), 0, live) == BatchWaits(needed=())


def test_a_batch_takes_completed_groups_in_completion_order_and_names_them_in_admission_order() -> None:
    live = [group(0, 0), group(1, 0, rank=2), group(2, 0, rank=1), group(3, 0, rank=0)]
    assert close_batch(limits(2, 1), 0, live) == BatchCloses(indices=(2, 3))


def test_without_staleness_a_batch_is_all_of_its_groups() -> None:
    live = [group(0, 4, rank=0), group(1, 4)]
    assert close_batch(limits(2, 0), 4, live) == BatchWaits(needed=(1,))
    assert close_batch(limits(2, 0), 4, [group(0, 4, rank=0), group(1, 4, rank=1)]) == BatchCloses(indices=(0, 1))


def test_a_batch_waits_for_a_group_that_is_due_although_enough_others_have_completed() -> None:
    # Batches of 2, bound 1: group 0 was admitted at 0 and must be trained by the step that begins at 1.
    live = [group(0, 0), group(2, 1, rank=0), group(3, 1, rank=1)]
    assert close_batch(limits(2, 1), 1, live) == BatchWaits(needed=(0,))
    live = [group(0, 0, rank=9), group(2, 1, rank=0), group(3, 1, rank=1)]
    assert close_batch(limits(2, 1), 1, live) == BatchCloses(indices=(0, 2))


def test_groups_that_a_later_batch_can_still_take_are_left_running() -> None:
    # Three of the four are due within two steps: one of the three must come now, whichever.
    live = [group(0, 0), group(1, 0), group(2, 0, rank=1), group(3, 1, rank=0)]
    assert close_batch(limits(2, 1), 0, live) == BatchCloses(indices=(2, 3))


def test_a_batch_leaves_no_more_than_a_batch_to_each_later_deadline() -> None:
    # Five groups are due by version 2 and two steps of two remain after this one: one of the five is needed now, but only
    # one; the rest of the batch is in completion order.
    live = [group(n, 0, rank=10 + n) for n in range(5)] + [group(9, 2, rank=0), group(10, 2, rank=1)]
    assert close_batch(limits(2, 2), 0, live) == BatchCloses(indices=(0, 9))


def test_no_live_group_is_nothing_to_close() -> None:
    assert close_batch(limits(1, 3), 7, []) == BatchWaits(needed=())


# --- closing against brute force -------------------------------------------------------------------------------------


def feasible(rest: list[LiveGroup], version: int, bounds: AdmissionLimits) -> bool:
    """Whether steps `version + 1`, ... of a batch each can take the rest in time, whatever completes when."""
    due = [g.admitted_version + bounds.max_staleness for g in rest]
    return all(
        sum(d <= deadline for d in due) <= max(0, deadline - version) * bounds.groups_per_batch for deadline in due
    )


def best_batch(bounds: AdmissionLimits, version: int, live: list[LiveGroup]) -> tuple[int, ...] | None:
    """Of all batches that leave the others feasible, the one whose groups completed first."""
    done = sorted((g for g in live if g.completed_rank is not None), key=lambda g: g.completed_rank or 0)
    for chosen in combinations(done, bounds.groups_per_batch):  # in lexicographic order of completion
        rest = [g for g in live if g not in chosen]
        if feasible(rest, version, bounds):
            return tuple(sorted(g.index for g in chosen))
    return None


@st.composite
def admitted_groups(draw: st.DrawFn) -> tuple[AdmissionLimits, int, list[LiveGroup]]:
    """Live groups as admission allows them: at most `(d - v + 1) * B` with a deadline of `d` or earlier."""
    bounds = limits(draw(st.integers(1, 3)), draw(st.integers(0, 4)))
    version = draw(st.integers(0, 6))
    admitted: list[int] = []
    for deadline in range(version, version + bounds.max_staleness + 1):
        room = (deadline - version + 1) * bounds.groups_per_batch - len(admitted)
        admitted += [deadline - bounds.max_staleness] * draw(st.integers(0, min(room, 4)))
    order = draw(st.permutations(range(len(admitted))))
    completed = draw(st.integers(0, len(admitted)))
    ranks = {index: rank for rank, index in enumerate(order[:completed])}
    return bounds, version, [group(n, version_, ranks.get(n)) for n, version_ in enumerate(admitted)]


@settings(max_examples=200, deadline=None)
@given(admitted_groups())
def test_a_batch_closes_as_soon_as_any_legal_one_exists_and_takes_the_earliest(
    case: tuple[AdmissionLimits, int, list[LiveGroup]],
) -> None:
    bounds, version, live = case
    want = best_batch(bounds, version, live)
    got = close_batch(bounds, version, live)
    assert (got.indices if isinstance(got, BatchCloses) else None) == want


@settings(max_examples=100, deadline=None)
@given(admitted_groups())
def test_no_batch_closes_before_one_of_the_groups_that_it_waits_for_completes(
    case: tuple[AdmissionLimits, int, list[LiveGroup]],
) -> None:
    bounds, version, live = case
    got = close_batch(bounds, version, live)
    if isinstance(got, BatchCloses):
        return
    if not got.needed:
        assert sum(g.completed_rank is not None for g in live) < bounds.groups_per_batch
        return
    for g in list(live):
        if g.completed_rank is None and g.index not in got.needed:
            live[g.index] = group(g.index, g.admitted_version, rank=100 + g.index)
    assert isinstance(close_batch(bounds, version, live), BatchWaits)
    for index in got.needed:
        live[index] = group(index, live[index].admitted_version, rank=200 + index)
    assert isinstance(close_batch(bounds, version, live), BatchCloses) or len(live) < bounds.groups_per_batch


# --- the process -----------------------------------------------------------------------------------------------------


@dataclass
class Process:
    """The rollout in its laws alone: groups are admitted, complete or expire in any order, and batches are trained."""

    bounds: AdmissionLimits
    trainer: int = 0
    served: int = 0
    consumed: int = 0
    next_index: int = 0
    completed: int = 0
    training: int = 0
    """Groups in the batch that is being trained."""
    live: dict[int, LiveGroup] = field(default_factory=dict)

    def admit(self) -> None:
        count = admissible_groups(
            self.bounds,
            served_version=self.served,
            consumed=self.consumed,
            live=len(self.live),
            active_trajectories=len(self.running()) * self.bounds.group_size,
        )
        for _ in range(count):
            self.live[self.next_index] = group(self.next_index, self.served)
            self.next_index += 1
        batch = self.bounds.groups_per_batch
        assert len(self.live) + self.training <= (self.bounds.max_staleness + 1) * batch, "too many batches in flight"
        assert len(self.running()) * self.bounds.group_size <= self.bounds.slots, "more trajectories than slots"

    def running(self) -> list[int]:
        return [index for index, g in self.live.items() if g.completed_rank is None]

    def complete(self, index: int) -> None:
        self.live[index] = group(index, self.live[index].admitted_version, rank=self.completed)
        self.completed += 1

    def close(self) -> bool:
        if self.training:
            return False
        result = close_batch(self.bounds, self.trainer, list(self.live.values()))
        if isinstance(result, BatchWaits):
            return False
        assert len(result.indices) == self.bounds.groups_per_batch
        for index in result.indices:
            taken = self.live.pop(index)
            assert taken.completed_rank is not None, "a running group was consumed"
            assert self.trainer - taken.admitted_version <= self.bounds.max_staleness, "staler than allowed"
        assert feasible(list(self.live.values()), self.trainer, self.bounds), "a later deadline cannot be met"
        self.consumed += len(result.indices)
        self.training = len(result.indices)
        return True

    def trained(self) -> None:
        self.training = 0
        self.trainer += 1


@settings(max_examples=200, deadline=None)
@given(
    batch=st.integers(1, 4),
    staleness=st.integers(0, 4),
    size=st.integers(1, 3),
    spare=st.integers(0, 30),
    seed=st.integers(0, 2**32),
)
def test_the_process_keeps_its_laws_and_never_deadlocks(
    batch: int, staleness: int, size: int, spare: int, seed: int
) -> None:
    rng = random.Random(seed)
    process = Process(limits(batch, staleness, size=size, slots=size + spare))
    process.admit()
    for _ in range(80):
        moves = ["close"]
        if running := process.running():
            moves += ["complete", "complete", "expire"]
        if process.training:
            moves += ["trained", "trained"]
        if process.served < process.trainer:
            moves += ["serve"]  # weights reach the engines some time after the step
        match rng.choice(moves):
            case "complete":
                process.complete(rng.choice(running))
            case "expire":
                process.live.pop(rng.choice(running))
            case "trained":
                process.trained()
            case "serve":
                process.served = process.trainer
            case _:
                process.close()
        process.admit()
    if process.training:
        process.trained()
    process.served = process.trainer
    process.admit()
    while running := process.running():
        process.complete(running[-1])
        process.admit()
    assert process.close(), "all live groups have completed, and no batch closes"
