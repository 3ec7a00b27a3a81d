"""What is said of a run."""

from __future__ import annotations

import json

import pytest

from pearl.config.recipe import Recipe
from pearl.core.state import FleetState
from pearl.records.journal import JournalEntry, StepEntry
from pearl.sim.simulate import Simulated
from pearl.sim.summary import Figures, counts_text, figures_json, figures_of, price_of, summary_text
from pearl.sim.tally import Moment, Tally


class Nothing:
    def write(self, entry: JournalEntry) -> None:
        """Forget it."""

    async def flush(self) -> None:
        """It is there."""


def recipe(**sections: dict[str, object]) -> Recipe:
    return Recipe.model_validate({"model": {"path": "m"}, "environment": {"kind": "guess_number"}, **sections})


def step(at_s: float) -> StepEntry:
    return StepEntry(
        at_s=at_s,
        version=1,
        groups=[],
        samples=1,
        trained_tokens=100,
        staleness_tokens={},
        wait_s=5.0,
        train_s=1.0,
        publish_s=0.0,
        reward_mean=0.0,
        success_mean=None,
    )


def run(policy: str, *ends_s: float, generated: int = 0, timeline: tuple[Moment, ...] = ()) -> Simulated:
    tally = Tally(sink=Nothing(), state=FleetState)
    tally.generated_tokens, tally.prompt_tokens, tally.computed_tokens = generated, 50, 80
    tally.timeline += timeline
    tally.ends.update({"done": 5, "truncated_turns": 3, "env_hung": 2, "expired": 1, "cancelled": 9})
    for end_s in ends_s:
        tally.write(step(end_s))
    return Simulated(
        policy=policy,
        seconds=100.0,
        tally=tally,
        trainer_busy_s=25.0,
        trained_tokens=100 * len(ends_s),
        trained_twice=0,
        stalls=(),
        busy_gpu_s=150.0,
    )


def test_numbers_of_a_run() -> None:
    """50 + 850 tokens of rollout and 300 trained in 100 s; steps 20 and 40 s after the first; 30 computed again."""
    found = figures_of(run("pearl", 30.0, 50.0, 90.0, generated=850), recipe())
    assert found.tokens_per_s == 12.0
    assert (found.step_s, found.step_s_p50, found.step_s_p90) == (30.0, 30.0, 38.0)
    assert (found.steps, found.trainer_wait_s, found.recomputed_tokens) == (3, 15.0, 30)
    assert (found.truncated, found.lost) == (3, 3)
    assert (found.rollout_idle_share, found.training_idle_share, found.price) == (None, None, None)
    json.dumps(figures_json(found), allow_nan=False)


def test_shares_and_prices() -> None:
    """For 100 s: 2 reserved GPUs, 4 of training, 2 of which serve for the second half; engines compute for 150 GPU-seconds."""
    owned = {"reserved": 2, "training": 4}
    timeline = (
        Moment(at_s=0.0, owned=owned, serving={"colocated": 2}),
        Moment(at_s=50.0, owned=owned, serving={"colocated": 4, "borrowed": 2}),
    )
    prices = {"reserved": 36.0, "training": 18.0}
    found = figures_of(run("pearl", 60.0, timeline=timeline), recipe(prices=prices))
    assert found.gpu_hours == pytest.approx({"reserved": 200 / 3600, "training": 400 / 3600, "borrowed": 100 / 3600})
    assert found.rollout_idle_share == pytest.approx(1 - 150 / (200 + 100))
    # It trains for 25 of 100 s; a quarter of its GPU-time is lent.
    assert found.training_idle_share == pytest.approx(1 - 0.25 - 0.25)
    assert found.price == pytest.approx(36 * 200 / 3600 + 18 * 400 / 3600)
    assert found.price_per_mtoken == pytest.approx(4.0 / 100 * 1e6)


def test_owners_without_a_price_cost_nothing() -> None:
    hours = {"reserved": 2.0, "external": 3.0}
    assert price_of(hours, recipe(prices={"external": 0.5}).prices) == 1.5
    assert price_of(hours, recipe().prices) is None
    assert price_of(hours, recipe(prices={"external": 0.0}).prices) == 0.0


def test_a_run_without_a_step() -> None:
    found = figures_of(run("roll"), recipe())
    assert (found.step_s, found.step_s_p90, found.price_per_mtoken) == (None, None, None)
    assert "none was reached" in summary_text(run("roll"), found)


def test_the_shape_of_a_static_fleet_is_part_of_its_name() -> None:
    found = figures_of(run("static"), recipe(elastic={"policy": "static", "shape": "2C@tp1"}))
    assert found.policy == "static:2C@tp1"


def text(found: Simulated, **sections: dict[str, object]) -> str:
    figures: Figures = figures_of(found, recipe(**sections))
    return summary_text(found, figures)


def test_text_of_a_run() -> None:
    said = text(run("pearl", 30.0, 50.0, generated=850))
    assert "policy        pearl" in said
    assert "11 tokens/s of rollout and training" in said
    assert "2, mean 20.0 s, p90 20.0 s" in said
    assert "price" not in said
    assert "per million trained tokens" in text(run("pearl", 30.0), prices={"training": 1.0})


def test_counts() -> None:
    assert counts_text({"done": 1200, "lost": 0, "x": 1}) == "1,200 done, 1 x"
    assert counts_text({}) == "none"
