"""Slot ownership, prefix reuse and eviction, on the table alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pearl.engine.embedded.slots import SlotTable


def begin(table: SlotTable, request: Any) -> int:
    slot = table.slot_of(request.trajectory)
    if slot is None:
        slot = table.take(request.trajectory)
    assert slot is not None
    table.start(slot, request, request.context.array.astype(np.int64))
    return slot


def pretend_computed(table: SlotTable, slot: int) -> None:
    table.cached[slot] = table.length[slot] - 1


def test_low_slots_come_first_and_freed_ones_come_back(kit: Any) -> None:
    table = SlotTable(3, 16)
    slots = [begin(table, kit.request(name, [5])) for name in "abc"]
    assert slots == [0, 1, 2]
    assert table.take("d") is None
    table.end(1, keep=False)
    assert table.take("d") == 1


def test_the_longest_unused_prefix_is_evicted_and_a_running_one_never(kit: Any) -> None:
    table = SlotTable(3, 16)
    for name in "abc":
        begin(table, kit.request(name, [5], trajectory=name))
    table.end(2)
    table.end(0)
    table.end(1)
    again = begin(table, kit.request("c2", [5, 6], trajectory="c"))
    assert again == 2
    assert table.take("d") == 0
    assert table.slot_of("a") is None
    assert table.take("e") == 1
    begin(table, kit.request("d1", [5], trajectory="d"))
    begin(table, kit.request("e1", [5], trajectory="e"))
    assert table.take("f") is None


@pytest.mark.parametrize(
    ("context", "cached"),
    [
        ([1, 2, 3, 4, 5, 6, 7], 4),  # the usual next turn: all that was cached is kept
        ([1, 2, 3, 4, 5], 4),  # nothing new: the last token must be computed again to get its logits
        ([1, 2, 3], 2),  # a shorter context
        ([1, 2, 9, 4, 5, 6], 2),  # differs in the middle
        ([9, 2, 3, 4, 5], 0),  # differs at once
        ([1], 0),
    ],
)
def test_the_shared_prefix_is_kept(kit: Any, context: list[int], cached: int) -> None:
    table = SlotTable(1, 16)
    slot = begin(table, kit.request("a", [1, 2, 3, 4, 5], trajectory="t"))
    pretend_computed(table, slot)
    table.end(slot)
    begin(table, kit.request("b", context, trajectory="t"))
    assert table.cached[slot] == cached
    assert table.token_ids[slot, : len(context)].tolist() == context
    assert table.length[slot] == len(context)


def test_tokens_known_but_not_cached_are_not_reused(kit: Any) -> None:
    table = SlotTable(1, 16)
    slot = begin(table, kit.request("a", [1, 2, 3, 4, 5], trajectory="t"))
    table.cached[slot] = 2  # interrupted in the middle of its prefill
    table.end(slot)
    begin(table, kit.request("b", [1, 2, 3, 4, 5, 6], trajectory="t"))
    assert table.cached[slot] == 2


def test_a_slot_that_changes_hands_keeps_nothing(kit: Any) -> None:
    table = SlotTable(1, 16)
    slot = begin(table, kit.request("a", [1, 2, 3], trajectory="t"))
    pretend_computed(table, slot)
    table.end(slot)
    begin(table, kit.request("b", [1, 2, 3], trajectory="u"))
    assert table.cached[slot] == 0


def test_release_while_running_takes_effect_at_the_end(kit: Any) -> None:
    table = SlotTable(2, 16)
    slot = begin(table, kit.request("a", [1, 2, 3], trajectory="t"))
    table.release("t")
    assert table.slot_of("t") == slot
    table.end(slot)
    assert table.slot_of("t") is None
    begin(table, kit.request("b", [1, 2, 3], trajectory="t"))
    table.end(slot)
    assert table.slot_of("t") == slot
    table.release("t")
    table.release("nobody")
    assert table.slot_of("t") is None


def test_forgetting_all_kv_frees_idle_slots_and_keeps_running_ones(kit: Any) -> None:
    table = SlotTable(2, 16)
    idle = begin(table, kit.request("a", [1, 2, 3], trajectory="idle"))
    running = begin(table, kit.request("b", [1, 2, 3, 4], trajectory="running"))
    pretend_computed(table, idle)
    pretend_computed(table, running)
    table.end(idle)
    assert table.forget_kv() == 2 + 3
    assert table.slot_of("idle") is None
    assert table.slot_of("running") == running
    assert table.cached_tokens == 0


def test_stop_tokens_of_an_earlier_request_do_not_stay(kit: Any) -> None:
    table = SlotTable(1, 16)
    slot = begin(table, kit.request("a", [1], trajectory="t", stops=(7, 8, 9)))
    table.end(slot)
    begin(table, kit.request("b", [1], trajectory="t", stops=(5,)))
    assert set(table.stops[slot].tolist()) == {5, -1}


def test_many_stop_tokens(kit: Any) -> None:
    table = SlotTable(2, 16)
    first = begin(table, kit.request("a", [1], stops=(7,)))
    second = begin(table, kit.request("b", [1], stops=tuple(range(20, 29))))
    assert set(table.stops[first].tolist()) == {7, -1}
    assert set(table.stops[second].tolist()) == set(range(20, 29))
