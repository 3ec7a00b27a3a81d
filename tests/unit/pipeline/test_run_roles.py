"""Whole runs on fleets of several roles, and on fleets whose roles change while they run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pearl.core.state import Role
from pearl.pipeline.turns import RouterCounts
from pearl.records.ids import WorkerId
from pearl.records.journal import StateEntry, TurnEntry
from pearl.records.trajectory import Task
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe

TURNS = 3


def script(_task: Task, _attempt: int) -> Behaviour:
    return Behaviour(turns=TURNS, step_s=0.5, reward=1.0)


def world_of(shape: str, **engine: object) -> FakeWorld:
    return FakeWorld(
        fake_recipe(run={"steps": 3}, engine={"shape": shape, **engine}),
        engine=FakeEngineConfig(token_s=0.1, turn_tokens=6, progress_interval_s=0.2),
        script=script,
        train_s=3,
        start_s=1.0,
    )


def play(world: FakeWorld, disturb: Callable[[FakeWorld], None] | None = None, at_s: float = 2.5) -> RouterCounts:
    async def work() -> None:
        if disturb is not None:
            asyncio.get_running_loop().call_later(at_s, disturb, world)
        await world.run()

    run_virtual(work())
    world.check_ledger()
    assert len(world.trainer.batches) == 3
    assert world.workers is not None
    return world.workers.router.counts


def roles(world: FakeWorld) -> list[str]:
    assert world.workers is not None
    return [spec.role.value for spec in world.workers._specs.values()]


@pytest.mark.parametrize("shape", ["1P1D", "1P2D", "2P2D+1C"])
def test_prefill_and_decode_workers_share_the_turns_of_a_run(shape: str) -> None:
    world = world_of(shape, append_prefill_tokens=0)
    counts = play(world)
    # Without appending every turn that a decode worker generates was handed to it.
    by_role: dict[str, set[int]] = {"P": set(), "D": set(), "C": set()}
    slots = [letter for letter in "PDC" for _ in range({"1P1D": "PD", "1P2D": "PDD"}.get(shape, "PPDDC").count(letter))]
    turns = world.journal.of(TurnEntry)
    for turn in turns:
        for worker in turn.workers:
            by_role[slots[worker]].add(worker)
        assert [slots[worker] for worker in turn.workers] in (["P", "D"], ["C"])
    assert all(by_role[letter] == {n for n, role in enumerate(slots) if role == letter} for letter in "PDC")
    handed = sum(len(turn.workers) == 2 for turn in turns)
    assert counts.handoffs >= handed > 0
    assert (counts.appended_turns, counts.failed_handoffs, counts.failed_requests) == (0, 0, 0)


def test_what_is_read_back_is_not_computed_again() -> None:
    computed = {}
    for readback in (False, True):
        world = world_of("1P1D", append_prefill_tokens=0, readback=readback, on_load="keep_kv")
        counts = play(world)
        computed[readback] = sum(turn.computed for turn in world.journal.of(TurnEntry))
        assert (counts.readbacks > 0) is readback
    # Each turn but a trajectory's first finds 5 of the 6 tokens that the one before it drew.
    later = sum(turn.turn > 0 for turn in world.journal.of(TurnEntry))
    assert computed[False] - computed[True] == 5 * later


def test_by_default_short_replies_are_appended_on_the_decode_worker() -> None:
    world = world_of("1P1D", on_load="keep_kv")
    counts = play(world)
    # The first turn of a trajectory is handed over, the others lack a token and a few words.
    for turn in world.journal.of(TurnEntry):
        assert turn.workers == ([0, 1] if turn.turn == 0 else [1])
    assert counts.appended_turns > counts.handoffs > 0
    assert counts.readbacks == 0


def change(*changes: tuple[int, Role]) -> Callable[[FakeWorld], None]:
    def disturb(world: FakeWorld) -> None:
        workers = world.workers
        assert workers is not None
        for worker, role in changes:
            workers.nursery.spawn(workers.set_role(WorkerId(worker), role), name="change of role")

    return disturb


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ("2C", ((0, Role.PREFILL), (1, Role.DECODE))),
        ("2P1D", ((0, Role.DECODE),)),
        ("1P2D", ((1, Role.PREFILL),)),
        ("1P1D", ((0, Role.DECODE), (1, Role.PREFILL))),
        ("1P1D", ((0, Role.COLOCATED), (1, Role.COLOCATED))),
        ("1P1D", ((1, Role.PREFILL),)),  # nobody decodes any more
    ],
)
@pytest.mark.parametrize("at_s", [1.25, 2.5])
def test_roles_change_in_the_middle_of_a_run(shape: str, changes: tuple[tuple[int, Role], ...], at_s: float) -> None:
    world = world_of(shape)
    counts = play(world, change(*changes), at_s)
    for worker, role in changes:
        assert roles(world)[worker] == role.value
    assert sum(entry.event == "RoleChanged" for entry in world.journal.of(StateEntry)) == len(changes)
    assert (counts.worker_losses, counts.failed_requests) == (0, 0)
    # Nobody was restarted, and not a token was drawn twice.
    assert len(world.fleet.past_engines) == len(roles(world))
    drawn = sum(engine.generated_tokens for engine in world.fleet.past_engines)
    assert drawn == sum(engine.delivered_tokens for engine in world.fleet.past_engines)


@pytest.mark.parametrize("victim", [0, 1])
def test_either_side_may_die_in_the_middle_of_a_run(victim: int) -> None:
    world = world_of("1P1D")
    counts = play(world, lambda one: one.fleet.kill(WorkerId(victim)), 1.25)
    assert counts.worker_losses == 1
    assert roles(world) == ["prefill", "decode"]
