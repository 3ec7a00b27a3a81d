"""What simulated time costs, and how the cost grows with the fleet.

    python -m benchmarks.sim_speed [--quick] [--data FOLDER]

- *segment*: two virtual hours of the PEARL paper's setting under `pearl`, as `recipes/sim/qwen3_8b_spot.toml` has it: 16 GPUs
  train, 4 are reserved, up to 12 come and go as in the first Bamboo segment.
- *large*: 1,024 GPUs, half of them the trainer's, all as workers of 2 GPUs; 8,192 trajectories of 15 turns each are in flight at
  once, until the batch closes. Everything is simulated, borrowing included.
- *growth*: the same with 8 trajectories per GPU on 128, 256, 512 and 1,024 GPUs; the exponent is the slope of the logarithm of
  time over that of the number of turns.

Times are of one process, warm, on one core, and the checks are of wall time: run it on an idle core. Processor time stands beside
it. `--quick` measures less, under names of its own (`quick_...`), with targets in proportion: 20 virtual minutes, and up to 128
GPUs.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from benchmarks._cells import SETTING
from benchmarks._data import Data, add_data_argument, find_data, write_trace, write_trajectories
from benchmarks._report import Check, report
from pearl.cli.recipes import load_arguments
from pearl.config.check import check_plan
from pearl.config.recipe import Recipe
from pearl.core.distribution import constant
from pearl.core.priors import workload_prior
from pearl.sim.generate import SyntheticWorkload
from pearl.sim.presets import ALIKE
from pearl.sim.script import Script
from pearl.sim.simulate import simulate

SEGMENT = "bamboo_s1_2h"
SEED = 0
SEGMENT_S, QUICK_SEGMENT_S = 7200, 1200
SEGMENT_TARGET_S = 8.0
SIZES, QUICK_SIZES = (128, 256, 512, 1024), (32, 64, 128)
LARGE_TARGET_S = 120.0
"""For the largest of `SIZES`."""
GROWTH_TARGET = 1.15
PER_GPU = 8
"""Trajectories in flight."""
GROUP = 16
TURNS = 15
CONTEXT_TOKENS = 32_768
RECORDED = 1024
"""Trajectories that are drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """One simulation."""

    wall_s: float
    cpu_s: float
    """Processor time of the process."""
    virtual_s: float
    turns: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="20 virtual minutes, and up to 128 GPUs")
    add_data_argument(parser)
    given = parser.parse_args(arguments)
    quick, data = bool(given.quick), find_data(given.data)
    sizes, duration_s = (QUICK_SIZES, QUICK_SEGMENT_S) if quick else (SIZES, SEGMENT_S)
    # Workers that are withdrawn with their GPUs are lost with a warning each.
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        trace, label = _trace(data, Path(folder))
        recording = _recording(Path(folder))
        _spent(_segment(trace, 120))
        segment = _spent(_segment(trace, duration_s))
        _tell(f"{duration_s / 60:g} virtual minutes of the paper's setting", segment)
        by_size: dict[int, Spent] = {}
        for gpus in sizes:
            by_size[gpus] = _spent(_batch(recording, gpus))
            _tell(f"{gpus:,} GPUs, {PER_GPU * gpus:,} trajectories", by_size[gpus])
    settings: dict[str, str | int | float | bool] = {"quick": quick, "data": data.label, "trace": label, **_machine()}
    return report("sim_speed", _checks(segment, by_size, duration_s, "quick_" if quick else ""), settings)


def _checks(segment: Spent, by_size: dict[int, Spent], duration_s: float, prefix: str) -> list[Check]:
    largest = max(by_size)
    large, turns = by_size[largest], [spent.turns for spent in by_size.values()]
    segment_target_s = SEGMENT_TARGET_S * duration_s / SEGMENT_S
    large_target_s = LARGE_TARGET_S * largest / max(SIZES)
    wall, cpu = ([getattr(spent, each) for spent in by_size.values()] for each in ("wall_s", "cpu_s"))
    return [
        Check(name=f"{prefix}segment_wall_s", value=segment.wall_s, target=f"<= {segment_target_s:.3g}"),
        Check(name=f"{prefix}segment_cpu_s", value=segment.cpu_s),
        Check(name=f"{prefix}segment_us_per_turn", value=segment.wall_s / segment.turns * 1e6),
        Check(name=f"{prefix}large_wall_s", value=large.wall_s, target=f"<= {large_target_s:.3g}"),
        Check(name=f"{prefix}large_cpu_s", value=large.cpu_s),
        Check(name=f"{prefix}large_us_per_turn", value=large.wall_s / large.turns * 1e6),
        Check(name=f"{prefix}growth_exponent", value=exponent(turns, wall), target=f"<= {GROWTH_TARGET:g}"),
        Check(name=f"{prefix}growth_exponent_cpu", value=exponent(turns, cpu)),
    ]


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """The slope of log(time) over log(size), by least squares."""
    xs, ys = [math.log(size) for size in sizes], [math.log(taken) for taken in times]
    mean_x, mean_y = math.fsum(xs) / len(xs), math.fsum(ys) / len(ys)
    rise = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return rise / math.fsum((x - mean_x) ** 2 for x in xs)


def _spent(recipe: Recipe) -> Spent:
    gc.collect()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    run = simulate(recipe)
    return Spent(
        wall_s=time.perf_counter() - wall_s,
        cpu_s=time.process_time() - cpu_s,
        virtual_s=run.seconds,
        turns=run.tally.turns,
    )


def _tell(what: str, spent: Spent) -> None:
    print(
        f"{what}: {spent.wall_s:.1f} s ({spent.cpu_s:.1f} s of the processor) for {spent.turns:,} turns, "
        f"{spent.virtual_s:,.0f} virtual s",
        flush=True,
    )


def _machine() -> dict[str, str | int]:
    return {
        "cores": os.cpu_count() or 0,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "system": platform.system(),
    }


# -- what is simulated ----------------------------------------------------------------------------------------------


def _segment(trace: Path, duration_s: float) -> Recipe:
    # More steps than there can be.
    return _recipe("run.steps=100000", f"simulation.duration_s={duration_s}", f"simulation.availability={trace}")


def _batch(recording: Path, gpus: int) -> Recipe:
    trajectories = PER_GPU * gpus
    return _recipe(
        "run.steps=1",
        f"fleet.reserved_gpus={gpus // 2}",
        f"fleet.training_gpus={gpus // 2}",
        "fleet.external_gpus=0",
        f"environment.slots={trajectories}",
        f"rollout.groups_per_batch={trajectories // GROUP}",
        f"rollout.group_size={GROUP}",
        "rollout.max_staleness=0",
        f"rollout.max_turns={TURNS}",
        f"workload.trajectories={recording}",
    )


def _recipe(*changes: str) -> Recipe:
    return load_arguments([str(SETTING), *changes], checks=(check_plan,)).recipe


def _trace(data: Data, folder: Path) -> tuple[Path, str]:
    """A file of the availability that is replayed, and where it is from."""
    found = data.availability(SEGMENT, seed=SEED)
    return write_trace(found.trace, folder / "availability.csv"), found.label


def _recording(folder: Path) -> Path:
    """A file of trajectories like those of the preset `swe`, of 15 turns each, that fit the context."""
    return write_trajectories(
        ((None, script) for script in islice(_fitting(), RECORDED)), folder / "trajectories.jsonl"
    )


def _fitting() -> Iterator[Script]:
    profile = replace(workload_prior("swe"), turns=constant(float(TURNS)))
    workload = SyntheticWorkload(profile, seed=SEED, likeness=ALIKE)
    for number in count():
        script = workload.script(number, 0)
        if script.starts[-1] + script.turns[-1].output_tokens < CONTEXT_TOKENS:
            yield script


if __name__ == "__main__":
    sys.exit(main())
