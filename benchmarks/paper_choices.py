"""Which shape each predictor chooses where the paper states the best one, from a profile of the paper's section 3 alone.

The profile (`_section3`) was fixed before any choice was made with it, and knows nothing of the figures it is compared with.
Every choice is the shortest predicted batch among `nC` and all `xPyD` of TP2 workers on the GPUs of a row, without hysteresis.
Nothing is measured here: times are predictions. Mismatches are results and fail nothing.

The margin of a row is how much longer the best shape that is not the paper's takes, below 0 where it is the shorter one. Within
1 % either way the row is a tie: no predictor is that exact, so neither a match nor a mismatch says anything there.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks._report import Check, report
from benchmarks._section3 import MEAN_ALONE_S, ROLLOUT_S, TP, Open, qwen3_8b, qwen3_30b_a3b
from pearl.core.makespan import Predictor, Profile, Target, candidates_of
from pearl.core.paper_model import PaperPredictor
from pearl.core.progress import Progress, fresh_batch
from pearl.core.shape import parse_shape

GROUP_SIZE = 16
ANY_PD = "PD"
"""The paper says that disaggregation is best there, and not in which ratio."""

TIE = 0.01
"""Margins below it, either way, are ties. Source: a tenth of what the predictors are off by."""

Make = Callable[[Open | None], Profile]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A situation in which the paper states the best shape."""

    source: str
    model: Make
    gpus: int
    batch: int
    best: tuple[str, ...]
    """The shapes that the paper has no more than 0.4 % apart, the best one first."""
    gain: str = ""
    """Disaggregated over colocated, as the paper measured it."""

    @property
    def workers(self) -> int:
        """TP2 workers."""
        return self.gpus // TP

    def matches(self, shape: str) -> bool:
        """Whether a shape is what the paper found."""
        return shape in self.best or (ANY_PD in self.best and "P" in shape)


ROWS = (
    Row(source="Table 2", model=qwen3_8b, gpus=10, batch=64, best=("2P3D",)),
    Row(source="Table 2, with overlap", model=qwen3_8b, gpus=26, batch=64, best=("5P8D", "4P9D")),
    Row(source="Table 2", model=qwen3_8b, gpus=12, batch=64, best=("3P3D",)),
    Row(source="Table 2, with overlap", model=qwen3_8b, gpus=28, batch=64, best=("4P10D",)),
    Row(source="Table 2", model=qwen3_8b, gpus=16, batch=64, best=("3P5D",)),
    Row(source="Table 2, with overlap", model=qwen3_8b, gpus=32, batch=64, best=("4P12D",)),
    Row(source="Fig. 7", model=qwen3_8b, gpus=4, batch=64, best=("2C",), gain="-20.6 %"),
    Row(source="Fig. 7", model=qwen3_30b_a3b, gpus=4, batch=64, best=("2C",), gain="-30.9 %"),
    Row(source="Fig. 2c", model=qwen3_30b_a3b, gpus=16, batch=32, best=(ANY_PD,), gain="+9.7 %"),
    Row(source="Fig. 2c", model=qwen3_30b_a3b, gpus=16, batch=48, best=("4P4D",)),
    Row(source="Fig. 2c", model=qwen3_30b_a3b, gpus=16, batch=64, best=("5P3D",)),
    Row(source="Fig. 2c", model=qwen3_30b_a3b, gpus=16, batch=80, best=(ANY_PD,), gain="+1.4 %"),
    Row(source="Fig. 2c", model=qwen3_30b_a3b, gpus=16, batch=96, best=("8C",), gain="-6.1 %"),
)

VARIANTS = (
    ("as fixed", Open()),
    ("no environment", Open(env_s=0.0)),
    ("1 s of environment per turn", Open(env_s=1.0)),
    ("5 s of environment per turn", Open(env_s=5.0)),
    ("no bubbles", Open(theta=0.0)),
    ("no bubbles, no environment", Open(theta=0.0, env_s=0.0)),
    ("half of the time decoding", Open(theta=1.0)),
    ("15 turns of twice the environment", Open(mean_turns=15.0, env_s=5.8)),
    ("batch of 32 in Fig. 2a and 2b", Open(batch=32)),
    ("batch of 128 in Fig. 2a and 2b", Open(batch=128)),
)
"""Other values of what section 3 leaves open, one or two at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a predictor says of a row."""

    shape: str
    colocated_s: float
    apart: str
    """The best disaggregated shape; empty where none is feasible."""
    apart_s: float
    paper_s: float
    """The shortest of what the paper found best."""
    other_s: float
    """The shortest of all else."""

    @property
    def gain(self) -> str:
        """Disaggregated over colocated."""
        return f"{100 * (self.colocated_s / self.apart_s - 1):+.1f} %" if self.apart else "infeasible"

    @property
    def margin(self) -> float:
        """How much longer than what the paper found best the best of all else takes, over the former; -1 where that cannot be."""
        return self.other_s / self.paper_s - 1

    @property
    def ties(self) -> bool:
        """Whether the predictor cannot really tell."""
        return abs(self.margin) < TIE


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Rows of a table."""

    matches: int
    """Strictly: the shape chosen is the paper's."""
    ties: int
    """By margin, whatever was chosen."""
    tied_matches: int
    """Both."""

    def __str__(self) -> str:
        clear = self.matches - self.tied_matches
        missed = len(ROWS) - self.ties - clear
        return (
            f"{clear} matched, {missed} not matched, {self.ties} ties (margin below {100 * TIE:g} %); "
            f"strictly {self.matches} of {len(ROWS)} match, {self.tied_matches} of them in ties"
        )


def predictors() -> list[Predictor]:
    """The paper's and, where it is there, pearl's."""
    found: list[Predictor] = [PaperPredictor()]
    try:
        found.append(importlib.import_module("pearl.core.fluid").FluidPredictor())
    except ModuleNotFoundError as error:
        if error.name != "pearl.core.fluid":
            raise
    return found


def fresh(batch: int) -> Progress:
    """All of a batch before its first turn, and nothing else."""
    return fresh_batch(batch // GROUP_SIZE, GROUP_SIZE)


def predicted_s(predictor: Predictor, profile: Profile, batch: int, shapes: Sequence[str]) -> list[float]:
    """Seconds until the batch closes, for each shape."""
    candidates = candidates_of([Target(shape=parse_shape(f"{shape}@tp{TP}")) for shape in shapes])
    seconds: list[float] = predictor.forecast(profile, fresh(batch))(candidates).close_s.tolist()
    return seconds


def choice(predictor: Predictor, row: Row, profile: Profile) -> Choice:
    """The shortest of all shapes on the row's GPUs."""
    apart = [f"{x}P{row.workers - x}D" for x in range(1, row.workers)]
    colocated = f"{row.workers}C"
    colocated_s, *apart_s = predicted_s(predictor, profile, row.batch, [colocated, *apart])
    place = int(np.argmin(apart_s))
    times_s = {colocated: colocated_s, **dict(zip(apart, apart_s, strict=True))}
    return Choice(
        shape=colocated if colocated_s <= apart_s[place] else apart[place],
        colocated_s=colocated_s,
        apart=apart[place] if np.isfinite(apart_s[place]) else "",
        apart_s=apart_s[place],
        paper_s=min(second for shape, second in times_s.items() if row.matches(shape)),
        other_s=min(second for shape, second in times_s.items() if not row.matches(shape)),
    )


def print_fit(found: Sequence[Predictor]) -> None:
    """What the profile gives back of the statements that it was made from."""
    profile = qwen3_8b()
    print("Qwen3-8B colocated, batch 64, seconds of a rollout (Fig. 2a, which the profile was fitted to by equation 1)")
    print(f"  {'GPUs':>6} {'stated':>8}" + "".join(f"{predictor.name:>8}" for predictor in found))
    for workers, stated_s in ROLLOUT_S.items():
        times = [predicted_s(predictor, profile, 64, [f"{workers}C"])[0] for predictor in found]
        print(f"  {workers * TP:>6} {stated_s:>8.0f}" + "".join(f"{second:>8.0f}" for second in times))
    workload = profile.workload
    print(
        f"  turns: mean {workload.turns.mean:.0f}, slowest {workload.turns.largest:.0f}; per turn "
        f"{workload.new_tokens.mean:.0f} new and {workload.generated_tokens.mean:.0f} generated tokens, "
        f"{workload.env_s.mean:.1f} s of environment; theta {workload.theta:.2f}; "
        f"a mean trajectory alone takes {MEAN_ALONE_S} s\n"
    )


def print_choices(predictor: Predictor) -> Counts:
    """A table, and what came of its rows."""
    print(f"chosen by {predictor.name}'s predictor, beside the paper's figure")
    head = f"  {'':<22} {'model':<14} {'GPUs':>4} {'batch':>5}  {'paper':<12} {'chosen':<7}        "
    print(head + f"{'colocated':>10} {'apart':>8} {'best apart':<10} {'gain':>10} {'stated':>8} {'margin':>8}")
    matches = ties = both = 0
    for row in ROWS:
        profile = row.model(None)
        made, model = choice(predictor, row, profile), profile.platform.by_tp[TP].model
        good = row.matches(made.shape)
        mark = f"{'=' if good else 'x'} {'tie' if made.ties else ''}"
        matches, ties, both = matches + good, ties + made.ties, both + (good and made.ties)
        print(
            f"  {row.source:<22} {model:<14} {row.gpus:>4} {row.batch:>5}  {' or '.join(row.best):<12} {made.shape:<7} "
            f"{mark:<5}  {made.colocated_s:>8.0f} s {made.apart_s:>6.0f} s {made.apart:<10} "
            f"{made.gain:>10} {row.gain:>8} {100 * made.margin:+6.1f} %"
        )
    counts = Counts(matches=matches, ties=ties, tied_matches=both)
    print(f"  {counts}\n")
    return counts


def print_variants(found: Sequence[Predictor]) -> None:
    """How far the matches hang on what section 3 leaves open."""
    print(
        "strict matches under other values of what section 3 leaves open (information only: the first line is the result)"
    )
    print(f"  {'':<36} {'theta':>6}" + "".join(f"{predictor.name:>8}" for predictor in found))
    for name, values in VARIANTS:
        counts = [
            sum(row.matches(choice(predictor, row, row.model(values)).shape) for row in ROWS) for predictor in found
        ]
        theta = qwen3_8b(values).workload.theta
        print(f"  {name:<36} {theta:>6.2f}" + "".join(f"{count:>8}" for count in counts))
    print()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paper_choices", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="without other values of what section 3 leaves open")
    quick = parser.parse_args(arguments).quick
    found = predictors()
    print_fit(found)
    counts = {predictor.name: print_choices(predictor) for predictor in found}
    if not quick:
        print_variants(found)
    checks: list[Check] = []
    for name in ("paper", "pearl"):
        count = counts.get(name)
        values = (None,) * 3 if count is None else (count.matches, count.ties, count.tied_matches)
        checks += [
            Check(name=f"{name}_{what}", value=None if value is None else float(value))
            for what, value in zip(("matches", "ties", "tied_matches"), values, strict=True)
        ]
    checks.append(Check(name="rows", value=float(len(ROWS))))
    return report("paper_choices", checks, {"quick": quick, "tp": TP})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
