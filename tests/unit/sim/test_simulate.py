"""Small fleets, whole runs: the same code as real ones, and the same answer every time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config.load import load_recipe
from pearl.errors import ConfigError, RunFailed
from pearl.records.journal import JournalEntry
from pearl.sim.simulate import Simulated, Simulation, simulate

RECIPE = Path(__file__).parents[3] / "recipes" / "sim" / "qwen3_8b_spot.toml"
SMALL = (
    "rollout.groups_per_batch=2",
    "rollout.group_size=4",
    "rollout.max_turns=6",
    "fleet.reserved_gpus=2",
    "fleet.external_gpus=4",
    "fleet.training_gpus=4",
    "simulation.mean_external_gpus=4",
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


def test_gpus_come_and_go_at_random_alike_for_all_policies() -> None:
    overrides = ("simulation.mean_external_gpus=2", "simulation.changes_per_h=60", "simulation.change_gpus=2")
    one, other, third = (
        run(*overrides, f"elastic.policy={policy}", f"run.seed={seed}")
        for policy, seed in (("pearl", 0), ("rlboost_plus", 0), ("pearl", 1))
    )
    assert one.availability == other.availability != third.availability
    assert {gpus for _, gpus in one.availability} == {0, 2, 4}
    held = {moment.owned.get("external", 0) for moment in one.tally.timeline}
    assert held <= {0, 1, 2, 3, 4}


def test_a_policy_without_gpus_from_outside_takes_none() -> None:
    found = run("elastic.policy=roll")
    assert found.tally.gpu_hours(found.seconds).get("external", 0.0) == 0.0


def test_withdrawals_without_notice_are_no_restarts(tmp_path: Path) -> None:
    """Twelve of them, of four GPUs with workers each: more workers than restarts are allowed."""
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at_s},{0 if number % 2 else 4}\n" for number, at_s in enumerate(range(0, 24 * 60, 60)))
    trace.write_text(f"time_s,gpus\n{rows}", encoding="utf-8")
    found = run(
        *(f'simulation.availability="{trace}"', "simulation.notice_s=0", "platform.start_s=5"),
        *("run.steps=100", "simulation.duration_s=1440", "cluster.max_worker_restarts=2"),
    )
    assert found.seconds == 1440
    assert found.restarts == 0
    assert found.tally.workers["lost"] + found.tally.workers["withdrawn"] > 2


def test_faults_happen_and_are_mended() -> None:
    found = run(
        *("run.steps=4", "faults.kills_per_h=30", "faults.slow_per_h=30", "faults.failed_starts_per_h=10"),
        *("faults.environment_faults_per_h=5", "cluster.max_worker_restarts=100", "rollout.env_step_timeout_s=60"),
    )
    assert found.faults > 0
    assert len(found.tally.steps) == 4
    assert found.trained_twice == 0


def test_what_an_interrupted_run_came_to_is_known() -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    journal = Entries()
    simulation = Simulation(load_recipe(RECIPE, SMALL).recipe, journal)
    with pytest.raises(KeyboardInterrupt):
        simulation.run(lambda outcome, _: interrupt(outcome))
    found = simulation.so_far()
    assert len(found.tally.steps) == 1
    assert found.seconds >= found.tally.steps[0].at_s > 0
    assert simulation.now_s == found.seconds


def test_steps_may_end_before_the_time_does() -> None:
    found = run("simulation.duration_s=100000", "run.steps=1")
    assert len(found.tally.steps) == 1
    assert found.seconds < 100000
