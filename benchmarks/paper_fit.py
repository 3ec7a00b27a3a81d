"""How well `paper_world.json` gives back what the paper's section 3 states, measured in simulation.

Nothing of section 6 is in here. Run it before anything of `benchmarks.paper`: it is what that benchmark's world was fitted with.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks._cells import ROOT, Result, code_hash, measure
from benchmarks._paper_cells import PaperCell, run_cell
from benchmarks._paper_tables import DENSE, SPARSE
from benchmarks._paper_world import WORLD, Fitted, fitted, world_hash
from benchmarks._report import Check, report
from benchmarks._section3 import (
    DECODE_TOKENS_PER_S,
    MEAN_ALONE_S,
    PREFILL_TIME_SHARE,
    PROMPT_SHARE,
    ROLLOUT_S,
    TP,
    TRAINING_S,
)
from pearl.core.priors import platform_prior
from pearl.silicon.tables import silicon_profiles

TRAINING_GPUS = 8
ALONE = 16
"""Workers and trajectories of the measurement with one on each."""
TOLERANCE = 0.10
"""Relative, for times; `SHARE_TOLERANCE` for shares and ratios, absolute."""
SHARE_TOLERANCE = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """What section 3 says, and what the world has for it."""

    name: str
    stated: float
    measured: float
    relative: bool

    @property
    def off(self) -> float:
        """Relative or absolute."""
        return self.measured / self.stated - 1 if self.relative else self.measured - self.stated

    @property
    def holds(self) -> bool:
        return abs(self.off) <= (TOLERANCE if self.relative else SHARE_TOLERANCE)


def rollout_cell(world: Fitted, workers: int, seed: int) -> PaperCell:
    """Batches one after the other: the time until a batch closes is the trainer's wait."""
    return PaperCell(
        model=world.name,
        policy="static",
        shape=f"{workers}C@tp{TP}",
        gpus=workers * TP,
        training=TRAINING_GPUS,
        batch=world.batch,
        staleness=0,
        steps=4,
        seed=seed,
    )


def alone_cell(world: Fitted, seed: int) -> PaperCell:
    """One trajectory on each worker."""
    return PaperCell(
        model=world.name,
        policy="static",
        shape=f"{ALONE}C@tp{TP}",
        gpus=ALONE * TP,
        training=TRAINING_GPUS,
        batch=ALONE,
        staleness=0,
        steps=12,
        seed=seed,
    )


def mean(results: Sequence[Result], name: str) -> float:
    return sum(float(result[name]) for result in results) / len(results)


def dense_statements(world: Fitted, seeds: int, fresh: bool) -> list[Statement]:
    """Fig. 2a."""
    cells = [rollout_cell(world, workers, seed) for workers in ROLLOUT_S for seed in range(seeds)]
    cells += [alone_cell(world, seed) for seed in range(seeds)]
    code = code_hash(WORLD)
    found = measure("paper_fit", [each.cell for each in cells], run_cell, code=code, fresh=fresh)
    by_size = [found[i * seeds : (i + 1) * seeds] for i in range(len(ROLLOUT_S) + 1)]
    times = {workers: mean(results, "wait_s") for workers, results in zip(ROLLOUT_S, by_size, strict=False)}
    first = min(ROLLOUT_S)
    said = [
        Statement(
            name=f"rollout on {first * TP} GPUs, s", stated=ROLLOUT_S[first], measured=times[first], relative=True
        )
    ]
    said += [
        Statement(
            name=f"rollout on {workers * TP} GPUs over that",
            stated=ROLLOUT_S[workers] / ROLLOUT_S[first],
            measured=times[workers] / times[first],
            relative=False,
        )
        for workers in ROLLOUT_S
        if workers != first
    ]
    trained = [result for results in by_size[:-1] for result in results]
    return [
        *said,
        Statement(
            name="mean trajectory, one per worker, s",
            stated=MEAN_ALONE_S,
            measured=mean(by_size[-1], "flight_s"),
            relative=True,
        ),
        Statement(name="training on 8 GPUs, s", stated=TRAINING_S, measured=mean(trained, "train_s"), relative=True),
    ]


def sparse_statements(world: Fitted) -> list[Statement]:
    """Fig. 2b, from the fitted numbers and the table alone, with six sequences decoding on a worker."""
    model, _, gpu = world.platform.rpartition("-")
    times = silicon_profiles(model, gpu, (TP,))[TP].iterations
    context = round(world.prompt_tokens + world.turns / 2 * (world.new_tokens + world.generated_tokens))
    decode_s = world.time_scale * times.seconds(0, DECODING, context)
    chunk = platform_chunk()
    whole, rest = divmod(round(world.new_tokens), chunk)
    prefill_s = world.time_scale * (
        whole * times.seconds(chunk, 0, context) + (times.seconds(rest, 0, context) if rest else 0.0)
    )
    decoding_s = world.generated_tokens * decode_s / DECODING
    return [
        Statement(
            name="decoded tokens/s per GPU between prefills",
            stated=DECODE_TOKENS_PER_S / TP,
            measured=DECODING / decode_s / TP,
            relative=True,
        ),
        Statement(
            name="prefill's share of tokens",
            stated=PROMPT_SHARE,
            measured=world.new_tokens / (world.new_tokens + world.generated_tokens),
            relative=False,
        ),
        Statement(
            name="prefill's share of time",
            stated=PREFILL_TIME_SHARE,
            measured=prefill_s / (prefill_s + decoding_s),
            relative=False,
        ),
    ]


DECODING = 6
"""Sequences that decode at once on a worker, of the eight that it has in the middle of Fig. 2c's batches (64 on 8 workers)."""


def platform_chunk() -> int:
    """Prompt tokens of one iteration: `platform.prefill_chunk_tokens` by default."""
    return platform_prior("qwen3-8b-h100").prefill_chunk_tokens


def print_statements(title: str, statements: Sequence[Statement]) -> None:
    print(f"{title}\n  {'':<40} {'stated':>10} {'here':>10} {'off':>9}")
    for each in statements:
        off = f"{100 * each.off:+.1f} %" if each.relative else f"{each.off:+.3f}"
        print(
            f"  {each.name:<40} {each.stated:>10.4g} {each.measured:>10.4g} {off:>9} {'' if each.holds else 'beyond'}"
        )
    print()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_fit", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed")
    parser.add_argument("--fresh", action="store_true", help="measure anew what was measured before")
    options = parser.parse_args(arguments)
    worlds, seeds = fitted(), 1 if options.quick else 3
    dense = dense_statements(worlds[DENSE], seeds, options.fresh)
    sparse = sparse_statements(worlds[SPARSE])
    print(f"{WORLD.relative_to(ROOT)}, SHA-256 {world_hash()}\n")
    print_statements("Qwen3-8B, Fig. 2a", dense)
    print_statements("Qwen3-30B-A3B, Fig. 2b", sparse)
    beyond = sum(not each.holds for each in [*dense, *sparse])
    checks = [
        Check(name="statements", value=len(dense) + len(sparse)),
        Check(name="beyond_tolerance", value=beyond, target="<= 0"),
    ]
    return report("paper_fit", checks, {"world": world_hash(), "seeds": seeds})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
