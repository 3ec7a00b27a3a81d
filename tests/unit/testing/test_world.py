"""The ledger of a world finds what it says it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from pearl.records.ids import WorkerId
from pearl.records.journal import GroupEntry, JournalEntry, StateEntry, TrajectoryEntry, TurnEntry
from pearl.records.tokens import Floats, TokenIds
from pearl.records.trajectory import Task
from pearl.records.turn import Versions
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.environment import Behaviour, Fault
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_gpus, fake_recipe


def script(_task: Task, attempt: int) -> Behaviour:
    return Behaviour(turns=2, step_s=1, reward=1.0, fault=Fault.RAISE if attempt == 1 else None)


def world_of(**options: object) -> FakeWorld:
    world = FakeWorld(
        fake_recipe(run={"steps": 2}), engine=FakeEngineConfig(token_s=0.1), script=script, train_s=5, **options
    )
    run_virtual(world.run())
    return world


def test_a_world_runs_its_recipe_and_its_ledger_holds() -> None:
    world = world_of(start_s=2.0)
    world.check_ledger()
    assert [step.report.version for step in world.steps] == [1, 2]
    assert [name for name, _ in world.stages] == ["rollout", "training"]
    assert world.weights.published == [0, 1, 2]
    assert world.checkpointer.saved[-1][0] == 2
    assert world.steps[0].at_s == pytest.approx(2 + 2 * 1.8 + 1.8 + 5)


def test_a_world_goes_on_from_its_last_checkpoint() -> None:
    world = world_of()
    start = world.resumed_start()
    assert (start.version, start.incarnation) == (2, 1)
    assert start.progress == world.checkpointer.saved[-1][1]
    assert FakeWorld(world.recipe, start=start).trainer.version == 2


def first(world: FakeWorld, kind: type[JournalEntry]) -> int:
    return next(n for n, entry in enumerate(world.journal.entries) if isinstance(entry, kind))


def repeat(kind: type[JournalEntry]) -> Callable[[FakeWorld], None]:
    return lambda world: world.journal.entries.append(world.journal.entries[first(world, kind)])


def drop(kind: type[JournalEntry]) -> Callable[[FakeWorld], None]:
    return lambda world: world.journal.entries.pop(first(world, kind))


def keep_slot(world: FakeWorld) -> None:
    world.environments.open_now += 1


def keep_worker(world: FakeWorld) -> None:
    world.fleet.engines[WorkerId(0)] = FakeEngine()


def train_twice(world: FakeWorld) -> None:
    world.trainer.consumed.append(world.trainer.consumed[0])


def train_group_twice(world: FakeWorld) -> None:
    world.trainer.batches.append(world.trainer.batches[0])


def train_fault(world: FakeWorld) -> None:
    faulty = next(entry for entry in world.journal.of(TrajectoryEntry) if entry.status == "env_raised")
    world.trainer.consumed.append(replace(world.trainer.consumed[0], trajectory=faulty.trajectory))


def train_stale(world: FakeWorld) -> None:
    batch = world.trainer.batches[0]
    world.trainer.batches[0] = replace(batch, version=batch.version + 2)


def tamper_sample(**change: object) -> Callable[[FakeWorld], None]:
    def tamper(world: FakeWorld) -> None:
        batch = world.trainer.batches[0]
        sample = replace(batch.samples[0], **change)
        world.trainer.batches[0] = replace(batch, samples=(sample, *batch.samples[1:]))

    return tamper


def other_tokens(world: FakeWorld) -> None:
    ids = world.trainer.batches[0].samples[0].token_ids.tolist()
    start = world.trainer.batches[0].samples[0].trained[0][0]
    ids[start] += 1
    tamper_sample(token_ids=TokenIds(ids))(world)


def refuse(world: FakeWorld) -> None:
    at = first(world, StateEntry)
    entry = world.journal.entries[at]
    assert isinstance(entry, StateEntry)
    world.journal.entries[at] = replace(entry, refused="unknown_worker")


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (repeat(TrajectoryEntry), "a trajectory ended twice"),
        (drop(TrajectoryEntry), "an attempt has no end"),
        (repeat(GroupEntry), "a group ended twice"),
        (drop(GroupEntry), "a group was trained that did not complete"),
        (repeat(TurnEntry), "a turn is missing"),
        (drop(TurnEntry), "a turn is missing"),
        (drop(StateEntry), "a version of the fleet state is missing"),
        (refuse, "the fleet state refused an event"),
        (keep_slot, "an environment slot was not given back"),
        (keep_worker, "a worker was left running"),
        (train_twice, "a trajectory was trained twice"),
        (train_group_twice, "a group was trained twice"),
        (train_fault, "a fault was trained on"),
        (train_stale, "staler than allowed"),
        (other_tokens, "a trained token was never delivered"),
        (tamper_sample(logprobs=Floats([-0.5] * 16)), "a trained token was never delivered"),
        (tamper_sample(versions=Versions.of([(-1, 16)])), "staler than allowed|never delivered"),
    ],
)
def test_the_ledger_finds(tamper: Callable[[FakeWorld], None], message: str) -> None:
    world = world_of()
    tamper(world)
    with pytest.raises(AssertionError, match=message):
        world.check_ledger()


def test_gpus_of_a_world_are_reserved_and_on_one_node() -> None:
    gpus = fake_gpus(3)
    assert [gpu.id for gpu in gpus] == ["gpu0", "gpu1", "gpu2"]
    assert len({gpu.node for gpu in gpus}) == 1


def test_sections_of_a_recipe_replace_values_one_by_one() -> None:
    recipe = fake_recipe(rollout={"group_size": 5}, run={"seed": 3})
    assert (recipe.rollout.group_size, recipe.rollout.groups_per_batch) == (5, 2)
    assert (recipe.run.seed, recipe.run.steps) == (3, 4)
