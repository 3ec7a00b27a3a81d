"""Small fleets, whole runs: the same code as real ones, and the same answer every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config.load import load_recipe
from pearl.errors import ConfigError, RunFailed
from pearl.records.journal import JournalEntry
from pearl.sim.simulate import Simulated, simulate

RECIPE = Path(__file__).parents[3] / "recipes" / "sim" / "qwen3_8b_spot.toml"
SMALL = (
    "rollout.groups_per_batch=2",
    "rollout.group_size=4",
    "rollout.max_turns=6",
    "fleet.reserved_gpus=2",
    "fleet.external_gpus=4",
    "fleet.training_gpus=4",
    "run.steps=3",
)


class Entries:
    """A journal in memory."""

    def __init__(self) -> None:
        self.all: list[JournalEntry] = []

    def write(self, entry: JournalEntry) -> None:
        self.all.append(entry)

    async def flush(self) -> None:
        """It is there."""


def run(*overrides: str, journal: Entries | None = None) -> Simulated:
    return simulate(load_recipe(RECIPE, [*SMALL, *overrides]).recipe, journal)


@pytest.mark.parametrize("policy", ["pearl", "paper", "roll", "rlboost_plus", "rlboost_plus_seeding", "borrow_all"])
def test_every_policy_comes_to_the_end(policy: str) -> None:
    found = run(f"elastic.policy={policy}")
    assert found.policy == policy
    assert len(found.tally.steps) == 3
    assert found.trained_twice == 0
    assert found.stalls == ()
    # Three batches of eight, each with a result; those of the batch in flight are cancelled at the end.
    trained = sum(count for status, count in found.tally.ends.items() if status != "cancelled")
    assert trained >= 24
    assert sum(step.samples for step in found.tally.steps) == 24
    assert found.tokens_per_s > 0


def test_the_same_seed_is_the_same_run_entry_by_entry() -> None:
    one, again = Entries(), Entries()
    run(journal=one)
    run(journal=again)
    assert one.all == again.all
    assert len(one.all) > 100


def test_it_ends_when_it_is_told_to() -> None:
    found = run("simulation.duration_s=200")
    assert found.seconds == 200
    assert len(found.tally.steps) < 3


def test_gpus_that_come_and_go(tmp_path: Path) -> None:
    """Two workers' worth for five minutes, none after."""
    trace = tmp_path / "trace.csv"
    trace.write_text("time_s,gpus\n0,4\n300,0\n4000,0\n", encoding="utf-8")
    found = run(f'simulation.availability="{trace}"', "run.steps=5")
    hours = found.tally.gpu_hours(found.seconds)
    # From the source's beginning, when the run begins, until 300 s later, less what is given back at the notice before.
    assert 4 * 200 / 3600 < hours["external"] <= 4 * 300 / 3600 + 1e-9
    assert found.tally.timeline[-1].owned.get("external", 0) == 0
    assert found.trained_twice == 0


def test_without_gpus_there_is_nothing_to_simulate() -> None:
    with pytest.raises(ConfigError, match=r"\[fleet\]: got no GPUs, want"):
        run("fleet.reserved_gpus=0", "fleet.external_gpus=0", "fleet.training_gpus=0")


def test_a_policy_whose_gpus_never_come_ends_with_why() -> None:
    with pytest.raises(RunFailed, match="no rollout worker serves within 1800 s"):
        run("elastic.policy=roll", "fleet.reserved_gpus=0")
