"""What deciding takes, and what the search and the plans give away.

    python -m benchmarks.decide [--quick]

- *decide*: whole decisions of `pearl` (budget, choice among modes, ratios, append-prefill and numbers of borrowed workers, gates,
  plan) for fleets of 32, 512 and 10,000 GPUs, half of them the trainer's, as workers of 2 GPUs each (the paper's). Four moments:
  nothing serves yet; a shape serves and training has finished; external GPUs have joined; some are under notice. Every decision
  sees another progress of the batch, so nothing is warm but code. The figure is the slowest moment's median; the moments, and the
  same with a choice among tensor parallelisms 1, 2 and 4 for each role (`any_tp`), are information. Absolute times: run it on an
  idle core.
- *predict*: 1,000 distinct shapes, nothing known before.
- *search*: predicted time of the found shape over that of the best of all, for seeded random workloads and platforms, 32 to 128
  GPUs: on dedicated GPUs alone, with half of them borrowed, and (fewer cases: there are thousands of shapes) with hybrid pools,
  some of them borrowed.
- *plans*: share of random small fleets for which no cheaper plan exists (everything is tried).
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from benchmarks._plans import optimal_fraction
from benchmarks._report import Check, report
from pearl.core.budget import Budget
from pearl.core.choose import Choice, choose
from pearl.core.decide import decide
from pearl.core.decision import Moment, Situation
from pearl.core.distribution import Distribution, distribution_of
from pearl.core.fluid import APPEND_TOKENS, FluidPredictor
from pearl.core.lines import Space
from pearl.core.makespan import Profile, Target, candidates_of
from pearl.core.platform import Platform
from pearl.core.policy import Policy, PolicyOptions, policy_named
from pearl.core.priors import platform_prior, workload_prior
from pearl.core.progress import Progress, fresh_batch
from pearl.core.shape import Pool, Shape
from pearl.core.state import (
    Activity,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    LeaseBegan,
    NoticeGiven,
    Role,
    StateEvent,
    Worker,
)
from pearl.core.toggle import toggle_prior
from pearl.core.workload import WorkloadProfile
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from pearl.report.planning import folded

FLEETS = {32: 10.0, 512: 50.0, 10_000: 1000.0}
"""GPUs -> milliseconds that a decision may take."""
PER_NODE = 8
WARM_UP_S = 2.0
OVERLAP_TP = 2
TRAJECTORIES_PER_GPU = 8
SEARCH_GPUS = (32, 64, 96, 128)
SERVING = Worker(id=WorkerId(0), gpus=(), role=Role.COLOCATED, activity=Activity.ACTIVE)
SLEEPER = Worker(id=WorkerId(0), gpus=(), role=Role.COLOCATED, activity=Activity.INACTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decision to take."""

    name: str
    state: FleetState
    moment: Moment
    now_s: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.decide", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    quick = parser.parse_args(arguments).quick
    repeats, instances = (5, 300) if quick else (15, 3000)
    checks: list[Check] = []
    # Code is warm, and so is the core: one that has idled takes its time to come to speed.
    until_s = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < until_s:
        _moments_ms(32, (OVERLAP_TP,), 1)
    for gpus, most_ms in FLEETS.items():
        taken_ms = _moments_ms(gpus, (OVERLAP_TP,), repeats)
        checks.append(Check(name=f"decide_ms_{gpus}", value=max(taken_ms.values()), target=f"<= {most_ms:g}"))
        checks += [Check(name=f"decide_ms_{gpus}_{name}", value=value) for name, value in taken_ms.items()]
        any_tp_ms = _moments_ms(gpus, (1, 2, 4), repeats)
        checks.append(Check(name=f"decide_ms_{gpus}_any_tp", value=max(any_tp_ms.values())))
    checks.append(Check(name="predict_ms_1000", value=_predict_ms(repeats), target="<= 50"))
    gaps = _search_gaps(5 if quick else 25)
    checks += [
        Check(name="search_gap_max", value=max(gap for gap, _ in gaps.values()), target="<= 0.01"),
        *(Check(name=f"search_gap_max_{kind}", value=gap) for kind, (gap, _) in gaps.items()),
        *(Check(name=f"search_looked_at_frac_{kind}", value=looked_at) for kind, (_, looked_at) in gaps.items()),
        Check(name="plan_optimal_frac", value=optimal_fraction(instances), target="== 1"),
    ]
    return report("decide", checks, {"quick": quick, "repeats": repeats, "plans": instances})


# -- decisions ------------------------------------------------------------------------------------------------------


def _moments_ms(gpus: int, tps: tuple[int, ...], repeats: int) -> dict[str, float]:
    """Moment -> median, every time with another progress."""
    policy = policy_named("pearl", PolicyOptions(tps=tps))
    situations = [_situation(gpus, tps, turns) for turns in range(1, repeats + 1)]
    return {
        case.name: _median_ms(partial(decide, policy, case.state, each, case.moment, case.now_s) for each in situations)
        for case in _cases(policy, situations[0], gpus)
    }


def _cases(policy: Policy, situation: Situation, gpus: int) -> Iterator[Case]:
    bare = _fleet(gpus)
    yield Case(name="start", state=bare, moment=Moment.TRAINING_BEGAN, now_s=0.0)
    begun = decide(policy, bare, situation, Moment.TRAINING_BEGAN, 0.0)
    assert begun.plan is not None
    added = begun.plan.added
    served = _with_workers(
        bare,
        [replace(SERVING, id=each.worker, gpus=each.gpus, role=each.role) for each in added],
    )
    yield Case(name="training_finished", state=served, moment=Moment.TRAINING_FINISHED, now_s=60.0)
    count = max(2, gpus // 16)
    joined = _gpus(count, GpuOwner.EXTERNAL, "x")
    more = folded(served, [LeaseBegan(lease=LeaseId("more"), gpus=joined, at_s=60.0)])
    yield Case(name="gpus_joined", state=more, moment=Moment.GPUS_CHANGED, now_s=60.0)
    external = tuple(sorted(gpu.id for gpu in served.gpus.values() if gpu.owner is GpuOwner.EXTERNAL))
    noticed = folded(served, [NoticeGiven(gpus=external[:count], deadline_s=61.0, at_s=60.0)])
    yield Case(name="notice", state=noticed, moment=Moment.GPUS_CHANGED, now_s=60.0)


def _median_ms(works: Iterable[Callable[[], object]]) -> float:
    taken_s: list[float] = []
    for work in works:
        began_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - began_s)
    return 1e3 * statistics.median(taken_s)


def _situation(gpus: int, tps: tuple[int, ...], turns: int) -> Situation:
    groups = gpus * TRAJECTORIES_PER_GPU // 32
    batch = fresh_batch(groups, 16, batches=2)
    progress = Progress(
        batch_trajectories=batch.batch_trajectories,
        unfinished=batch.unfinished,
        live_groups=batch.live_groups,
        needed_groups=batch.needed_groups,
        running=MappingProxyType({turns: batch.unfinished, 0: batch.unfinished}),
    )
    known = platform_prior("qwen3-8b-h100")
    platform = replace(known, by_tp={tp: known.by_tp[tp] for tp in tps})
    return Situation(
        profile=Profile(workload=workload_prior("swe"), platform=platform),
        progress=progress,
        toggle=toggle_prior(platform.costs),
        since_training_s=0.0,
    )


def _fleet(gpus: int) -> FleetState:
    """Half the trainer's, an eighth reserved, the rest external; overlap workers asleep, nothing serves."""
    training, reserved = gpus // 2, gpus // 8
    lent = _gpus(training, GpuOwner.TRAINING, "t")
    events: list[StateEvent] = [
        GpusJoined(gpus=_gpus(reserved, GpuOwner.RESERVED, "r")),
        GpusJoined(gpus=lent),
    ]
    external = _gpus(gpus - training - reserved, GpuOwner.EXTERNAL, "e")
    events += [
        LeaseBegan(lease=LeaseId(f"l{first}"), gpus=external[first : first + PER_NODE], at_s=0.0)
        for first in range(0, len(external), PER_NODE)
    ]
    state = folded(FleetState(), events)
    blocks = [lent[first : first + OVERLAP_TP] for first in range(0, training, OVERLAP_TP)]
    sleepers = [
        replace(SLEEPER, id=WorkerId(slot), gpus=tuple(gpu.id for gpu in block)) for slot, block in enumerate(blocks)
    ]
    return _with_workers(state, sleepers)


def _with_workers(state: FleetState, workers: Sequence[Worker]) -> FleetState:
    """With more workers: thousands of events, each of which copies the mapping, at once."""
    return replace(
        state,
        workers=MappingProxyType({**state.workers, **{worker.id: worker for worker in workers}}),
        slots=MappingProxyType({**state.slots, **{worker.id: worker.gpus for worker in workers}}),
    )


def _gpus(count: int, owner: GpuOwner, letter: str) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(id=GpuId(f"{letter}{index:05}"), node=NodeId(f"{letter}-{index // PER_NODE:04}"), owner=owner)
        for index in range(count)
    )


# -- prediction and search ------------------------------------------------------------------------------------------


def _predict_ms(repeats: int) -> float:
    platform = platform_prior("qwen3-8b-h100")
    profile = Profile(workload=workload_prior("swe"), platform=platform)
    pairs = [(x, y, append) for x in range(1, 40) for y in range(1, 40) for append in APPEND_TOKENS][:970]
    shapes = [_paired(x, y, append) for x, y, append in pairs] + [_colocated(n) for n in range(1, 31)]
    candidates = candidates_of(shapes)
    assert len({str(shape) for shape in shapes}) == len(candidates) == 1000

    def cold(progress: Progress) -> None:
        FluidPredictor().forecast(profile, progress)(candidates)

    return _median_ms(partial(cold, fresh_batch(groups, 16)) for groups in range(4, 4 + repeats))


def _paired(x: int, y: int, append: int) -> Target:
    pools = (Pool(role=Role.PREFILL, workers=x, tp=2), Pool(role=Role.DECODE, workers=y, tp=2))
    return Target(shape=Shape(pools), append_tokens=append)


def _colocated(workers: int) -> Target:
    return Target(shape=Shape((Pool(role=Role.COLOCATED, workers=workers, tp=2),)))


def _search_gaps(cases: int) -> dict[str, tuple[float, float]]:
    """Kind of search -> largest gap; shapes that the search looks at over all there are."""
    rng = random.Random(0)
    plain = Space(append_tokens=APPEND_TOKENS)
    hybrid = replace(plain, hybrid=True)
    few = max(1, cases // 5)
    return {
        "dedicated": _gap([_searched(rng, gpus, plain, lent=False) for gpus in SEARCH_GPUS for _ in range(cases)]),
        "borrowed": _gap([_searched(rng, gpus, plain, lent=True) for gpus in SEARCH_GPUS for _ in range(cases)]),
        "hybrid": _gap([_searched(rng, gpus, hybrid, lent=gpus > 64) for gpus in SEARCH_GPUS for _ in range(few)]),
    }


def _gap(found: Sequence[tuple[Choice, Choice]]) -> tuple[float, float]:
    gaps: list[float] = []
    for quick, whole in found:
        if whole.best is None:  # contexts longer than a borrowed worker holds
            continue
        assert quick.best is not None
        gaps.append(quick.best.close_s / whole.best.close_s - 1)
    return max(gaps), sum(quick.evaluated for quick, _ in found) / sum(whole.evaluated for _, whole in found)


def _searched(rng: random.Random, gpus: int, space: Space, *, lent: bool) -> tuple[Choice, Choice]:
    """What the search finds for a random case, and the best of all; `lent`: half of the GPUs are borrowed."""
    profile, progress = _random_case(rng, gpus)
    forecast = FluidPredictor().forecast(profile, progress)
    tps = profile.platform.tps
    lent_tp = rng.choice(tps)
    dedicated, borrowed = (gpus // 2, gpus // 2 // lent_tp) if lent else (gpus, 0)
    budget = Budget(
        usable=frozenset(),
        workers={tp: dedicated // tp for tp in tps},
        lendable=frozenset(),
        overlap=borrowed,
        overlap_tp=lent_tp,
    )
    found, best = (
        choose(forecast, profile.platform, budget, each, borrowed=borrowed)
        for each in (space, replace(space, exhaustive=True))
    )
    return found, best


def _random_case(rng: random.Random, gpus: int) -> tuple[Profile, Progress]:
    def long_tailed(mean: float, spread: float, low: float) -> Distribution:
        return distribution_of(max(low, rng.lognormvariate(0, spread) * mean) for _ in range(300))

    work = WorkloadProfile(
        turns=distribution_of(max(1.0, round(rng.lognormvariate(0, 0.6) * rng.uniform(3, 40))) for _ in range(300)),
        prompt_tokens=long_tailed(rng.uniform(200, 6000), 0.5, 1.0),
        new_tokens=long_tailed(rng.uniform(30, 2500), 1.0, 1.0),
        generated_tokens=long_tailed(rng.uniform(20, 600), 0.8, 1.0),
        env_s=long_tailed(rng.uniform(0.05, 8), 1.2, 0.0),
    )
    name = rng.choice(("qwen3-8b-h100", "qwen3-30b-a3b-h200"))
    known = platform_prior(name)
    platform: Platform = replace(known, time_scale={tp: rng.uniform(0.7, 1.4) for tp in known.tps})
    groups = max(1, int(gpus * rng.choice((0.5, 2, 8, 24))) // 16)
    return Profile(workload=work, platform=platform), fresh_batch(groups, 16, batches=rng.choice((1, 2)))


if __name__ == "__main__":
    sys.exit(main())
