"""What an iteration computes, on the scheduler alone."""

from __future__ import annotations

from typing import Any

from pearl.engine.embedded.scheduler import Scheduler
from pearl.engine.embedded.slots import SlotTable


def make(slots: int = 4, budget: int = 10, running: int = 0) -> tuple[SlotTable, Scheduler]:
    table = SlotTable(slots, 64)
    return table, Scheduler(table, prefill_chunk_tokens=budget, max_running=running or slots)


def shares(table: SlotTable, scheduler: Scheduler) -> dict[str, int]:
    """Tokens of the next iteration by request; counts them as computed."""
    batch = scheduler.batch()
    if batch is None:
        return {}
    table.cached[batch.slots] += batch.counts
    result = {table.request(s).id: c for s, c in zip(batch.slots.tolist(), batch.counts.tolist(), strict=True)}
    for slot in batch.slots.tolist():
        table.length[slot] = max(table.length[slot], table.cached[slot] + 1)  # as if a token was drawn
    return dict(sorted(result.items()))


def test_nothing_to_do() -> None:
    _, scheduler = make()
    assert scheduler.batch() is None


def test_prefill_shares_the_budget_in_order_of_arrival_and_decode_is_always_in(kit: Any) -> None:
    table, scheduler = make()
    for name, length in (("a", 1), ("b", 7), ("c", 12), ("d", 2)):
        scheduler.add(kit.request(name, kit.tokens(1, length)))
    scheduler.admit()
    assert shares(table, scheduler) == {"a": 1, "b": 7, "c": 3}
    assert shares(table, scheduler) == {"a": 1, "b": 1, "c": 9, "d": 1}
    assert shares(table, scheduler) == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_order_of_arrival_holds_across_slots(kit: Any) -> None:
    """The second turn of slot 0's trajectory arrives after the others."""
    table, scheduler = make(slots=2, budget=4)
    scheduler.add(kit.request("a", [5], trajectory="t"))
    scheduler.admit()
    table.end(0)
    scheduler.add(kit.request("b", kit.tokens(1, 6)))
    scheduler.admit()
    scheduler.add(kit.request("c", kit.tokens(2, 6), trajectory="t"))
    assert shares(table, scheduler) == {"b": 4}
    assert shares(table, scheduler) == {"b": 2, "c": 2}


def test_waiting_is_first_in_first_out_and_prefix_owners_start_at_once(kit: Any) -> None:
    table, scheduler = make(slots=2)
    for name in "abcde":
        scheduler.add(kit.request(name, [5], trajectory=name))
    scheduler.admit()
    assert [scheduler.holds(n) for n in "abcdef"] == [True] * 5 + [False]
    assert (table.running_count, scheduler.waiting_count) == (2, 3)
    table.end(0)
    scheduler.add(kit.request("a2", [5, 6], trajectory="a"))
    assert table.running_slot("a2") == 0
    assert scheduler.admit() == ()
    table.end(1)
    assert scheduler.admit() == (1,)
    assert table.running_slot("c") == 1
    assert scheduler.withdraw("d") is not None
    assert scheduler.withdraw("d") is None
    table.end(1)
    scheduler.admit()
    assert table.running_slot("e") == 1


def test_a_trajectory_is_served_while_it_runs_or_waits(kit: Any) -> None:
    table, scheduler = make(slots=1)
    scheduler.add(kit.request("a", [5], trajectory="t"))
    assert scheduler.serves("t")
    scheduler.admit()
    assert scheduler.serves("t")
    table.end(0)
    assert not scheduler.serves("t")
    scheduler.add(kit.request("b", [5], trajectory="u"))
    scheduler.withdraw("b")
    assert not scheduler.serves("u")


def test_slots_beyond_the_running_ones_keep_prefixes(kit: Any) -> None:
    table, scheduler = make(slots=3, running=1)
    for name in "ab":
        scheduler.add(kit.request(name, [5], trajectory=name))
    assert scheduler.admit() == (0,)
    table.end(0)
    assert scheduler.admit() == (1,)
    scheduler.add(kit.request("a2", [5, 6], trajectory="a"))
    assert scheduler.waiting == ("a2",), "one request runs already"
    table.end(1)
    assert scheduler.admit() == (), "it goes on in the slot that its trajectory kept"
    assert table.running_slot("a2") == 0
    assert table.slot_of("b") == 1
