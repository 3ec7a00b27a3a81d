from dataclasses import replace
from types import MappingProxyType

import pytest

from pearl.core.budget import Budget, Budgets
from pearl.core.state import FleetState, Gpu, GpuOwner
from pearl.records.ids import GpuId, NodeId
from tests.unit.core._fleets import fleet, ids


def budget(state: FleetState, *tps: int, lending: bool = True, avoid: str = "") -> Budget:
    return Budgets(state, tps or (1, 2, 4), lending=lending).without(frozenset(ids(avoid)))


# Dedicated GPUs


def test_nothing_is_nothing_to_plan_with() -> None:
    assert budget(FleetState()) == Budget(
        usable=frozenset(), workers={1: 0, 2: 0, 4: 0}, lendable=frozenset(), overlap=0, overlap_tp=1
    )


def test_reserved_and_external_gpus_are_usable_and_those_of_training_are_not() -> None:
    assert budget(fleet("a2 b2t c1x")).usable == {"a0", "a1", "c0"}


@pytest.mark.parametrize(
    ("nodes", "avoid", "workers"),
    [
        ("a4", "", {1: 4, 2: 2, 4: 1}),
        # tp larger than a node; an odd one left over.
        ("a3", "", {1: 3, 2: 1, 4: 0}),
        ("a2 b2", "", {1: 4, 2: 2, 4: 0}),
        # Blocks begin at multiples: a1 and a2 are neighbours, but of two blocks.
        ("a4", "a0", {1: 3, 2: 1, 4: 0}),
        ("a4", "a0 a3", {1: 2, 2: 0, 4: 0}),
        ("a8", "a1 a6", {1: 6, 2: 2, 4: 0}),
        ("a8", "a7", {1: 7, 2: 3, 4: 1}),
    ],
)
def test_workers_take_aligned_blocks_of_one_node(nodes: str, avoid: str, workers: dict[int, int]) -> None:
    assert budget(fleet(nodes), avoid=avoid).workers == workers


def test_only_what_was_asked_for_is_counted() -> None:
    assert budget(fleet("a4"), 2).workers == {2: 2}


def test_blocks_are_cut_from_all_gpus_of_a_node_whoever_owns_them() -> None:
    # a0 is the trainer's, so of the blocks a0 a1, a2 a3 only the second is whole.
    state = fleet("a4")
    gpus = {**state.gpus, GpuId("a0"): Gpu(id=GpuId("a0"), node=NodeId("a"), owner=GpuOwner.TRAINING)}
    assert budget(replace(state, gpus=MappingProxyType(gpus))).workers == {1: 3, 2: 1, 4: 0}


def test_workers_that_sit_across_blocks_count_where_that_gives_more() -> None:
    # A worker on a1 a2 and free a0, a3: around it one of tp 2; anew two.
    assert budget(fleet("a4", "0 C a1 a2")).workers == {1: 4, 2: 2, 4: 1}
    # Without a0 it is the other way round: it and nothing else, against the block a2 a3.
    assert budget(fleet("a4", "0 C a1 a2"), avoid="a0").workers == {1: 3, 2: 1, 4: 0}
    # Three across blocks of which only one is whole, on six GPUs of eight.
    across = fleet("a8", "0 C a1 a2", "1 D a3 a4", "2 P a5 a6")
    assert budget(across, avoid="a0 a7").workers == {1: 6, 2: 3, 4: 0}
    # Node by node: on one those that sit there, on the other all anew.
    both = fleet("a8 b4", "0 C a1 a2", "1 D a3 a4", "2 P a5 a6", "3 P b1 b2")
    assert budget(both, avoid="a0 a7").workers == {1: 10, 2: 5, 4: 1}
    # One that sleeps is not in the way, and is no worker that can be counted on: of two on the same GPUs one can serve.
    asleep = fleet("a8", "0 C a1 a2", "1 D a3 a4", "2 P- a5 a6", "3 P- a5 a6")
    assert budget(asleep, avoid="a0 a7").workers == {1: 6, 2: 2, 4: 0}
    # Those that have to go are not counted.
    assert budget(across, avoid="a0 a7 a1").workers == {1: 5, 2: 2, 4: 0}


def test_gpus_in_transition_are_neither_workers_nor_free() -> None:
    assert budget(fleet("a4", "0 C~ a0 a1")) == Budget(
        usable=frozenset(ids("a2 a3")), workers={1: 2, 2: 1, 4: 0}, lendable=frozenset(), overlap=0, overlap_tp=1
    )


# Overlap workers


def test_overlap_workers_are_counted_whole() -> None:
    found = budget(fleet("a1 b4t", "0 C- b0 b1", "1 D b2 b3"))
    assert (found.overlap, found.overlap_tp, found.lendable) == (2, 2, frozenset(ids("b0 b1 b2 b3")))
    assert found.usable == {"a0"}
    assert found.workers == {1: 1, 2: 0, 4: 0}


def test_gpus_of_training_without_an_overlap_worker_cannot_be_borrowed() -> None:
    found = budget(fleet("b4t", "0 C- b0"))
    assert (found.overlap, found.lendable) == (1, {"b0"})


@pytest.mark.parametrize(
    ("workers", "lending", "avoid"),
    [
        (["0 C- b0"], False, ""),
        (["0 C- b0"], True, "b0"),
        (["0 C- b0", "1 T b0"], True, ""),  # trains now
        (["0 C- b0", "1 T~ b0"], True, ""),  # is about to
        (["0 C~ b0"], True, ""),
    ],
)
def test_what_training_needs_is_not_lent(workers: list[str], lending: bool, avoid: str) -> None:
    found = budget(fleet("b1t", *workers), lending=lending, avoid=avoid)
    assert (found.overlap, found.overlap_tp, found.lendable) == (0, 1, frozenset())


def test_a_trainer_that_rests_lends() -> None:
    found = budget(fleet("b2t", "0 C- b0 b1", "1 T- b0", "2 T- b1"))
    assert (found.overlap, found.overlap_tp) == (1, 2)


def test_an_overlap_worker_is_borrowed_whole_or_not() -> None:
    assert budget(fleet("b2t", "0 C- b0 b1"), avoid="b1").overlap == 0


def test_of_several_tensor_parallelisms_the_most_common_one_is_borrowed() -> None:
    found = budget(fleet("b8t", "0 C- b0", "1 C- b1", "2 C- b2 b3", "3 C- b4 b5", "4 C- b6 b7"))
    assert (found.overlap, found.overlap_tp) == (3, 2)
    assert found.lendable == frozenset(ids("b2 b3 b4 b5 b6 b7"))
    # The smaller one on a tie.
    found = budget(fleet("b3t", "0 C- b1 b2", "1 C- b0"))
    assert (found.overlap, found.overlap_tp, found.lendable) == (1, 1, {"b0"})
