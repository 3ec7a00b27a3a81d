"""The world of the paper's evaluation: workloads and engines fitted to its section 3, and nothing else.

`paper_world.json` has the fitted numbers; `python -m benchmarks.paper_fit` measures them against the statements. What the
statements are, how they are read and what was free is told in `docs/evaluation.md`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

import numpy as np

from pearl.core.distribution import Distribution, distribution_of
from pearl.core.workload import WorkloadProfile
from pearl.sim.generate import SyntheticWorkload
from pearl.sim.presets import ALIKE
from pearl.sim.script import Script
from pearl.sim.workload import Workload

WORLD = Path(__file__).with_name("paper_world.json")
POINTS = 64
"""Quantiles that stand for a log-normal distribution."""
TASKS, ATTEMPTS = 64, 16
"""Of a file of trajectories: groups are drawn from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A model's workload and engines."""

    name: str
    platform: str
    """`platform.prior`."""
    weight_bytes: float
    turns: float
    """Mean per trajectory; log-normal, like all that follows."""
    turns_cv: float
    """Standard deviation over mean."""
    prompt_tokens: float
    new_tokens: float
    """Per later turn."""
    generated_tokens: float
    """Per turn."""
    env_s: float
    """Per turn."""
    time_scale: float
    """What iterations take over the shipped tables."""
    batch: int
    """Trajectories of a step behind section 3's statements, which do not say; section 6 has 64."""
    train_tokens_per_gpu_s: float

    def profile(self) -> WorkloadProfile:
        """Before any limit on contexts."""
        return WorkloadProfile(
            turns=log_normal(self.turns, self.turns_cv, least=1),
            prompt_tokens=log_normal(self.prompt_tokens, 0.3, least=16),
            new_tokens=log_normal(self.new_tokens, 1.0, least=1),
            generated_tokens=log_normal(self.generated_tokens, 1.0, least=1),
            env_s=log_normal(self.env_s, 1.0, least=0),
        )


def log_normal(mean: float, cv: float, *, least: float) -> Distribution:
    """A log-normal distribution at its quantiles (i + 1/2) / `POINTS`, with exactly that mean before `least` is applied."""
    spread, normal = math.sqrt(math.log(1 + cv * cv)), NormalDist()
    values = np.exp([spread * normal.inv_cdf((i + 0.5) / POINTS) for i in range(POINTS)])
    return distribution_of(np.maximum(least, mean * values / values.mean()).tolist())


def fitted() -> dict[str, Fitted]:
    """Model -> what was fitted for it."""
    return {name: Fitted(name=name, **values) for name, values in json.loads(WORLD.read_text(encoding="utf-8")).items()}


def world_hash() -> str:
    """Of the file of fitted numbers: SHA-256."""
    return hashlib.sha256(WORLD.read_bytes()).hexdigest()


def trajectories_of(world: Fitted) -> SyntheticWorkload:
    """Of a model's world."""
    return SyntheticWorkload(world.profile(), seed=1, likeness=ALIKE)


def scripts_of(workload: Workload) -> Iterator[tuple[str, Script]]:
    """As many as a file of trajectories has, each with its task."""
    for task in range(TASKS):
        for attempt in range(ATTEMPTS):
            yield str(task), workload.script(task, attempt)
