"""What is said of runs."""

from __future__ import annotations

import json

from pearl.core.state import FleetState
from pearl.records.journal import JournalEntry, StepEntry
from pearl.sim.simulate import Simulated
from pearl.sim.summary import comparison_text, summary_json, summary_text
from pearl.sim.tally import Tally


class Nothing:
    def write(self, entry: JournalEntry) -> None:
        """Forget it."""

    async def flush(self) -> None:
        """It is there."""


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


def run(policy: str, *ends_s: float, generated: int = 0) -> Simulated:
    tally = Tally(sink=Nothing(), state=FleetState)
    tally.generated_tokens, tally.prompt_tokens, tally.computed_tokens = generated, 50, 80
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
    )


def test_numbers_of_a_run() -> None:
    """50 + 850 tokens of rollout and 300 trained in 100 s; steps 20 and 40 s after the first; 30 computed again."""
    found = summary_json(run("pearl", 30.0, 50.0, 90.0, generated=850))
    json.dumps(found, allow_nan=False)
    assert found["tokens_per_s"] == 12.0
    assert found["step_s"] == 30.0
    assert (found["steps"], found["trainer_wait_s"], found["recomputed_tokens"]) == (3, 15.0, 30)
    assert found["trainer_idle_share"] is None  # no training GPUs


def test_text_of_a_run() -> None:
    text = summary_text(run("pearl", 30.0, 50.0, generated=850))
    assert "policy        pearl" in text
    assert "11 tokens/s of rollout and training" in text
    assert "2, mean 20.0 s" in text
    assert "none" in summary_text(run("roll"))


def test_policies_side_by_side() -> None:
    text = comparison_text([run("roll", 50.0, generated=50), run("pearl", 30.0, 50.0, generated=150)])
    first, second, third = text.splitlines()
    assert first.split()[:2] == ["policy", "tokens/s"]
    assert second.split()[:3] == ["roll", "2", "1.000"]
    assert third.split()[:3] == ["pearl", "4", "2.000"]
