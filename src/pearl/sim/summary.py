"""What a simulated run came to: the numbers by which policies are compared, for people and for programs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pearl.config.recipe import Recipe
from pearl.config.simulation import PricesConfig
from pearl.records.journal import Json
from pearl.records.trajectory import TrajectoryStatus
from pearl.report.live import percent
from pearl.sim.simulate import Simulated
from pearl.sim.tally import OWNERS
from pearl.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run; times in virtual seconds. None: there is nothing that it could be said of."""

    policy: str
    """With policy `static`: and its shape, `static:1P3D@tp2`."""
    seed: int
    seconds: float
    """From the first worker's start on."""
    steps: int
    tokens_per_s: float
    """System throughput: tokens of rollout and of training. Source: PEARL, section 6."""
    step_s: float | None
    """Mean over steps, the first one, which has the start in it, left out where there are others."""
    step_s_p50: float | None
    step_s_p90: float | None
    generated_tokens: int
    trained_tokens: int
    recomputed_tokens: int
    """Prompt tokens that went through a forward pass though they had before."""
    turns: int
    trajectories: Mapping[str, int]
    """Status -> how many ended so."""
    truncated: int
    """Trajectories that reached a limit; they are trained on."""
    lost: int
    """Trajectories that ended by a fault; they are not."""
    gpu_hours: Mapping[str, float]
    """By owner; and `borrowed`: of training, while rollout was served on them."""
    price: float | None
    """By `[prices]`; None where none is set."""
    price_per_mtoken: float | None
    """Of a million trained tokens."""
    rollout_idle_share: float | None
    """Of the GPU-hours that rollout had, borrowed ones included: not inside an iteration. 0..1."""
    training_idle_share: float | None
    """Of the training GPU-hours: neither training nor borrowed. 0..1."""
    trainer_wait_s: float
    """The trainer waited for batches."""
    workers: Mapping[str, int]
    """`started`, `stopped`, `lost`, `withdrawn`, `roles` changed, `borrowed`, `returned`."""
    plans: Mapping[str, int]
    """Kind of change -> how often it was done; `failed` where it was not."""
    decisions: Mapping[str, int]
    """Reason -> how often."""
    restarts: int
    """Lost workers that were started again."""
    faults: int
    """Injected faults that hit something."""
    trained_twice: int
    """Trajectories; a mistake of pearl's if not 0."""
    stalls: int
    """Times at which nothing could happen any more but that something was given up."""


def figures_of(run: Simulated, recipe: Recipe) -> Figures:
    """The numbers of a run."""
    tally, hours = run.tally, run.tally.gpu_hours(run.seconds)
    training_h = hours.get("training", 0.0)
    lent_h = hours.get("borrowed", 0.0) + hours.get("lent", 0.0)
    rollout_h = hours.get("reserved", 0.0) + hours.get("external", 0.0) + hours.get("borrowed", 0.0)
    ends_s = [step.at_s for step in tally.steps]
    lasted_s = [end_s - begin_s for begin_s, end_s in pairwise(ends_s)] or ends_s
    trainable = {status.value for status in TrajectoryStatus if status.trainable}
    cancelled = TrajectoryStatus.CANCELLED.value
    price = price_of(hours, recipe.prices)
    return Figures(
        policy=f"static:{recipe.elastic.shape}" if run.policy == "static" else run.policy,
        seed=recipe.run.seed,
        seconds=run.seconds,
        steps=len(ends_s),
        tokens_per_s=run.tokens_per_s,
        step_s=float(np.mean(lasted_s)) if lasted_s else None,
        step_s_p50=float(np.quantile(lasted_s, 0.5)) if lasted_s else None,
        step_s_p90=float(np.quantile(lasted_s, 0.9)) if lasted_s else None,
        generated_tokens=tally.generated_tokens,
        trained_tokens=run.trained_tokens,
        recomputed_tokens=max(0, tally.computed_tokens - tally.prompt_tokens),
        turns=tally.turns,
        trajectories=dict(sorted(tally.ends.items())),
        truncated=sum(count for status, count in tally.ends.items() if status.startswith("truncated")),
        lost=sum(count for status, count in tally.ends.items() if status not in trainable and status != cancelled),
        gpu_hours={name: hours[name] for name in (*OWNERS, "borrowed") if hours.get(name)},
        price=price,
        price_per_mtoken=price / run.trained_tokens * 1e6 if price is not None and run.trained_tokens else None,
        rollout_idle_share=_share(1 - run.busy_gpu_s / 3600 / rollout_h) if rollout_h else None,
        training_idle_share=_share(1 - run.trainer_busy_s / run.seconds - lent_h / training_h) if training_h else None,
        trainer_wait_s=math.fsum(step.wait_s for step in tally.steps),
        workers={name: count for name, count in sorted(tally.workers.items()) if count},
        plans=dict(sorted(tally.changes.items())),
        decisions=dict(sorted(tally.reasons.items())),
        restarts=run.restarts,
        faults=run.faults,
        trained_twice=run.trained_twice,
        stalls=len(run.stalls),
    )


def price_of(hours: Mapping[str, float], prices: PricesConfig) -> float | None:
    """What GPU-hours by owner cost; owners without a price cost nothing. None where no price is set."""
    known = {owner: price for owner, price in prices.model_dump().items() if price is not None}
    return math.fsum(price * hours.get(owner, 0.0) for owner, price in known.items()) if known else None


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def figures_json(figures: Figures) -> dict[str, Json]:
    """For programs."""
    return dataclasses.asdict(figures)


def summary_text(run: Simulated, figures: Figures) -> str:
    """One run, a line for each of what matters."""
    rows = [
        ("policy", figures.policy),
        ("throughput", f"{figures.tokens_per_s:,.0f} tokens/s of rollout and training"),
        ("virtual time", format_duration(figures.seconds)),
        ("steps", _steps_text(figures)),
        ("trajectories", counts_text(figures.trajectories)),
        ("recomputed", f"{figures.recomputed_tokens:,} prompt tokens"),
        ("GPU-hours", ", ".join(f"{hours:.2f} {name}" for name, hours in figures.gpu_hours.items()) or "none"),
        ("idle", _idle_text(figures)),
        ("workers", counts_text(figures.workers)),
    ]
    if figures.price is not None:
        per = (
            "" if figures.price_per_mtoken is None else f", {figures.price_per_mtoken:,.2f} per million trained tokens"
        )
        rows.append(("price", f"{figures.price:,.2f}{per}"))
    if figures.faults:
        rows.append(
            ("faults", f"{figures.faults} injected, {figures.lost} trajectories lost, {figures.restarts} restarts")
        )
    if run.stalls:
        first = run.stalls[0]
        named = ", ".join(first.guards)
        rows.append(("stalls", f"{len(run.stalls)}; the first after {format_duration(first.at_s)}: {named}"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)


def counts_text(counts: Mapping[str, int]) -> str:
    """`10 done, 182 truncated_tokens`; `none`."""
    return ", ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "none"


def _steps_text(figures: Figures) -> str:
    if figures.step_s is None or figures.step_s_p90 is None:
        return "none was reached"
    return f"{figures.steps}, mean {format_duration(figures.step_s)}, p90 {format_duration(figures.step_s_p90)}"


def _idle_text(figures: Figures) -> str:
    shares = (("rollout", figures.rollout_idle_share), ("training", figures.training_idle_share))
    return (
        ", ".join(f"{name} GPUs {percent(share).strip()}" for name, share in shares if share is not None) or "unknown"
    )
