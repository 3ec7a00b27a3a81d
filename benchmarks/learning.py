"""Does it learn, how stale is what it learns from, and does training overlap with rollout?

    python -m benchmarks.learning --seeds 0,1,2      about 15 minutes on 2 cores
    python -m benchmarks.learning --quick            one seed, few steps: a look, without the targets for success

*success*: the sampled model over all nine targets x 32 fresh rollouts, before training (after the warm-up) and after it.
*control*: the same with learning rate 0; its evaluations draw with the same seeds, so it must not move.
*overlap*: learning rate 0, so that every run has the same tokens; `max_staleness` 0 and 1 in turn. With rollout taking R
and training T seconds in the synchronous run, no overlap can be faster than by (R + T) / max(R, T). R is what its trainer
waits for batches; publication, which neither can hide, counts in the wall time of both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

from benchmarks._report import Check, report
from benchmarks._runs import RunRecord, train

CONTROL_STEPS = 40
OVERLAP_REPEATS = 3
OVERLAP_STEPS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1,2", help="of the runs that learn")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, no targets for success")
    parser.add_argument("--parts", default="learning,overlap", help="learning (with control), overlap, or both")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    seeds = [0] if options.quick else [int(seed) for seed in options.seeds.split(",")]
    checks: list[Check] = []
    if "learning" in parts:
        checks += _learning(seeds, quick=options.quick)
    if "overlap" in parts:
        checks += _overlap_checks(
            _overlap(1 if options.quick else OVERLAP_REPEATS, 6 if options.quick else OVERLAP_STEPS)
        )
    return report("learning", checks, {"seeds": ",".join(map(str, seeds)), "quick": options.quick})


def _learning(seeds: Sequence[int], *, quick: bool) -> list[Check]:
    steps = ["run.steps=8", "warmup.steps=60"] if quick else []
    runs = [_learn(seed, steps) for seed in seeds]
    control = train([f"run.seed={seeds[0]}", "train.learning_rate=0", *(steps or [f"run.steps={CONTROL_STEPS}"])])
    return [
        *_learning_checks(runs, strict=not quick),
        Check(name="control_drift", value=_drift(control), target="< 0.05"),
        *_staleness_checks(runs),
        Check(name="peak_pss_gib", value=max(run.peak_pss_gib for run in [*runs, control]), target="<= 5"),
    ]


def _learn(seed: int, steps: Sequence[str]) -> RunRecord:
    run = train([f"run.seed={seed}", *steps])
    summary = run.summary
    print(
        f"seed {seed}: success {_number(run, 'success_before'):.3f} -> {_number(run, 'success_after'):.3f} in {summary['steps']} "
        f"steps, {summary['wall_s']:.0f} s; {summary['tokens_per_s']:.0f} tokens/s, trainer idle "
        f"{summary['trainer_idle_frac']:.0%}, peak {run.peak_pss_gib:.2f} GiB",
        flush=True,
    )
    return run


def _drift(control: RunRecord) -> float:
    return abs(_number(control, "success_after") - _number(control, "success_before"))


def _learning_checks(runs: Sequence[RunRecord], *, strict: bool) -> list[Check]:
    before = [_number(run, "success_before") for run in runs]
    after = [_number(run, "success_after") for run in runs]
    return [
        Check(name="success_after_warmup", value=statistics.mean(before)),
        Check(name="success_after_warmup_min", value=min(before)),
        Check(name="success_after_warmup_max", value=max(before)),
        Check(name="success_final_min", value=min(after), target=">= 0.8" if strict else None),
        Check(name="success_final_mean", value=statistics.mean(after), target=">= 0.9" if strict else None),
        Check(name="training_wall_s_max", value=max(_number(run, "wall_s") for run in runs)),
    ]


def _staleness_checks(runs: Sequence[RunRecord]) -> list[Check]:
    return [
        Check(name="stale_token_frac", value=min(_number(run, "stale_token_frac") for run in runs), target=">= 0.3"),
        Check(name="staleness_max", value=max(_number(run, "staleness_max") for run in runs), target="<= 1"),
    ]


def _overlap(repeats: int, steps: int) -> list[tuple[RunRecord, RunRecord]]:
    common = ["train.learning_rate=0", f"run.steps={steps}", "evaluation.rollouts_per_task=0"]
    pairs = []
    for repeat in range(repeats):
        # Which of a pair comes first alternates: a machine that gets busier must not favour one side.
        order = (0, 1) if repeat % 2 == 0 else (1, 0)
        runs = {bound: train([*common, f"rollout.max_staleness={bound}"]) for bound in order}
        synchronous, overlapped = runs[0], runs[1]
        pairs.append((synchronous, overlapped))
        print(
            f"overlap: {_number(synchronous, 'wall_s'):.1f} s synchronous (rollout {synchronous.total('wait_s'):.1f} s, "
            f"training {synchronous.total('train_s'):.1f} s, publication {synchronous.total('publish_s'):.1f} s), "
            f"{_number(overlapped, 'wall_s'):.1f} s overlapped",
            flush=True,
        )
    return pairs


def _overlap_checks(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> list[Check]:
    train_s = statistics.median(synchronous.total("train_s") for synchronous, _ in pairs)
    wall_s = statistics.median(_number(synchronous, "wall_s") for synchronous, _ in pairs)
    overlapped_s = statistics.median(_number(overlapped, "wall_s") for _, overlapped in pairs)
    rollout_s = statistics.median(synchronous.total("wait_s") for synchronous, _ in pairs)
    bound = (rollout_s + train_s) / max(rollout_s, train_s)
    speedup = wall_s / overlapped_s
    tokens = {_number(run, "trained_tokens") for pair in pairs for run in pair}
    return [
        Check(name="overlap_equal_tokens", value=float(len(tokens) == 1), target=">= 1"),
        Check(name="overlap_rollout_s", value=rollout_s),
        Check(name="overlap_train_s", value=train_s),
        Check(name="overlap_publish_s", value=statistics.median(run.total("publish_s") for run, _ in pairs)),
        Check(name="overlap_bound", value=bound),
        Check(name="overlap_speedup", value=speedup),
        Check(name="overlap_efficiency", value=speedup / bound, target=">= 0.7"),
    ]


def _number(run: RunRecord, field: str) -> float:
    value = run.summary[field]
    if not isinstance(value, int | float):
        raise TypeError(f"summary.json: {field}: got {value!r}, want a number")
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
