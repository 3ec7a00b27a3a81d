"""What the steps of a run add up to, and each of them as reporters show it: alike for real and simulated runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pearl.pipeline.training_loop import Baseline, StepOutcome
from pearl.report.live import StepReport


@dataclass(slots=True)
class RunTotals:
    """Sums over steps, for the summary."""

    wait_s: float = 0.0
    trained_tokens: int = 0
    stale_tokens: int = 0
    staleness_max: int = 0
    steps: int = 0
    last_at_s: float = 0.0
    last_generated: int = 0
    generated_tokens: int = 0
    last_busy_s: dict[int, float] = field(default_factory=dict)
    busy_s: float = 0.0
    rollout_s: float = 0.0
    """Worker-seconds that busy_s is a part of."""
    last_iterations: dict[int, tuple[int, int]] = field(default_factory=dict)
    iterations: int = 0
    late_iterations: int = 0

    def begin(self, baseline: Baseline) -> None:
        """Count from here: what came before belongs to start-up and evaluation."""
        self.last_at_s, self.last_generated = baseline.at_s, baseline.generated_tokens
        self.last_busy_s = dict(baseline.rollout_busy_s)
        self.last_iterations = dict(baseline.rollout_iterations)

    def add(self, outcome: StepOutcome) -> StepReport:
        """Add a step; how it is shown."""
        batch = outcome.batch
        elapsed_s = max(outcome.at_s - self.last_at_s, 1e-9)
        generated = outcome.router.generated_tokens - self.last_generated
        busy_s, worker_s = self._busy(outcome, elapsed_s)
        stale = sum(tokens for staleness, tokens in batch.staleness_tokens.items() if staleness > 0)
        tokens = sum(batch.staleness_tokens.values())
        self.wait_s += outcome.wait_s
        self.trained_tokens += outcome.report.trained_tokens
        self.stale_tokens += stale
        self.staleness_max = max(self.staleness_max, batch.staleness_max)
        self.steps += 1
        self.last_at_s, self.last_generated = outcome.at_s, outcome.router.generated_tokens
        self.generated_tokens += generated
        self.busy_s += busy_s
        self.rollout_s += worker_s
        self.count_iterations(outcome.rollout_iterations)
        weighted = sum(staleness * count for staleness, count in batch.staleness_tokens.items())
        return StepReport(
            step=outcome.report.version,
            version=outcome.report.version,
            elapsed_s=outcome.at_s,
            reward_mean=outcome.reward_mean,
            success_mean=outcome.success_mean,
            tokens_per_s=generated / elapsed_s,
            staleness_mean=weighted / max(tokens, 1),
            staleness_max=batch.staleness_max,
            stale_token_frac=stale / max(tokens, 1),
            trainer_idle_frac=min(1.0, outcome.wait_s / elapsed_s),
            rollout_idle_frac=1 - min(1.0, busy_s / max(worker_s, 1e-9)),
            in_flight_trajectories=outcome.active_trajectories,
            faults={status.value: count for status, count in outcome.faults.items()},
            metrics=outcome.report.metrics,
        )

    def count_iterations(self, now: Mapping[int, tuple[int, int]]) -> None:
        """Add what workers have done since the last time; a restarted worker counts from zero again."""
        for worker, (iterations, late) in now.items():
            before, late_before = self.last_iterations.get(worker, (0, 0))
            if iterations < before:
                before, late_before = 0, 0
            self.iterations += iterations - before
            self.late_iterations += late - late_before
            self.last_iterations[worker] = (iterations, late)

    def _busy(self, outcome: StepOutcome, elapsed_s: float) -> tuple[float, float]:
        """Busy and total worker-seconds since the last step; a restarted worker counts from zero again."""
        before, now = self.last_busy_s, dict(outcome.rollout_busy_s)
        self.last_busy_s = now
        grown = [
            busy - before.get(worker, 0.0) if busy >= before.get(worker, 0.0) else busy for worker, busy in now.items()
        ]
        return sum(grown), elapsed_s * len(now)
