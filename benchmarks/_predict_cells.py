"""The cells of `benchmarks.predict`: what is simulated and predicted, fixed before anything was tuned."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

PLATFORMS = ("qwen3-8b-h100", "qwen3-8b-h200", "qwen3-30b-a3b-h100", "qwen3-30b-a3b-h200")
TUNED = ("swe", "tau", "webshop", "recorded tau", "recorded webshop")
"""Workloads that were looked at while the predictor was made."""
HELD_OUT = ("terminal", "game", "recorded swe")
"""Those that were not."""
WORKLOADS = (*TUNED, *HELD_OUT)
PRIORS = {
    "swe": "terminal",
    "terminal": "swe",
    "tau": "webshop",
    "webshop": "tau",
    "game": "tau",
    "recorded swe": "terminal",
    "recorded tau": "webshop",
    "recorded webshop": "tau",
}
"""Workload -> the preset that is assumed before anything was seen: always another one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much work meets how many GPUs."""

    groups: int
    group_size: int
    workers: int
    tp: int
    context_tokens: int = 32_768

    @property
    def batch(self) -> int:
        """Trajectories."""
        return self.groups * self.group_size


FEW = (
    Load(groups=4, group_size=8, workers=4, tp=1),
    Load(groups=4, group_size=8, workers=4, tp=2),
    Load(groups=4, group_size=12, workers=5, tp=1, context_tokens=16_384),
)
"""For workloads of some twenty turns and more, so that a run is over within seconds."""
MANY = (
    *FEW,
    Load(groups=4, group_size=16, workers=4, tp=2),
    Load(groups=8, group_size=8, workers=6, tp=1),
    Load(groups=8, group_size=16, workers=5, tp=2),
)
"""Budgets of 4 to 10 GPUs, batches of 32 to 128, 8 to 26 trajectories per worker and batch."""
LONG = ("swe", "terminal", "recorded swe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One configuration."""

    platform: str
    workload: str
    load: Load
    max_staleness: int
    time_scale: float
    """What iterations really take over what the tables say: hidden."""
    seed: int

    @property
    def held_out(self) -> bool:
        """Whether its workload was kept from view."""
        return self.workload in HELD_OUT

    def __str__(self) -> str:
        load = self.load
        return (
            f"{self.platform} {self.workload}, {load.groups} x {load.group_size}, {load.workers} workers of tp {load.tp}, "
            f"staleness {self.max_staleness}"
        )

    def shapes(self) -> tuple[tuple[str, int], ...]:
        """Shapes, and bounds of append-prefill, that are simulated."""
        workers, tp = self.load.workers, self.load.tp
        few = max(1, workers // 4)
        half = workers // 2
        mostly_decode = f"{few}P{workers - few}D"
        found = [
            (f"{workers}C", 0),
            (f"{half}P{workers - half}D", 0),
            *((mostly_decode, bound) for bound in (0, 256, 2048)),
        ]
        return tuple((f"{shape}@tp{tp}" if tp > 1 else shape, bound) for shape, bound in found)


def cells() -> Iterator[Cell]:
    """All of them: 64 configurations of five shapes each, loads in turn."""
    for second, platform in enumerate(PLATFORMS):
        for max_staleness in (0, 1):
            for first, workload in enumerate(WORKLOADS):
                rng = random.Random(f"{workload}/{platform}/{max_staleness}")
                loads = FEW if workload in LONG else MANY
                yield Cell(
                    platform=platform,
                    workload=workload,
                    load=loads[(first + second + 3 * max_staleness) % len(loads)],
                    max_staleness=max_staleness,
                    time_scale=round(rng.uniform(0.8, 1.25), 3),
                    seed=rng.randrange(1 << 31),
                )


def quick_cells() -> list[Cell]:
    """A fixed few: short trajectories, two platforms, both bounds on staleness, one workload that is held out."""
    wanted = (("webshop", PLATFORMS[0], 0), ("webshop", PLATFORMS[2], 1), ("game", PLATFORMS[0], 0))
    return [cell for cell in cells() if (cell.workload, cell.platform, cell.max_staleness) in wanted]
