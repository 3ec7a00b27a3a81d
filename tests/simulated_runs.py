"""Seeded schedules of everything that can happen to the simulated world, judged; a range of them, in processes:

python -m tests.simulated_runs 0 10000 --processes 2
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from random import Random

from pearl.config.recipe import Recipe
from pearl.elastic.control import ElasticFleet
from pearl.pipeline.tasks import derive_seed
from pearl.sim.faults import Fault, FaultKind
from pearl.sim.leases import Availability
from pearl.sim.script import Script, ScriptTurn, script_of
from pearl.sim.trainer import TrainTimes
from pearl.testing.world import fake_recipe
from tests.elastic_runs import POLICIES, Moody
from tests.simulated_oracles import findings
from tests.simulated_world import Conditions, Run, make_run

TIMES_S = (60.0, 120.0, 300.0)
"""Within one of which things happen: most runs take 40 .. 250 s."""


@dataclass(slots=True)
class Scripts:
    """Short trajectories: a pure function of (seed, group, attempt)."""

    seed: int
    most_turns: int
    env_s: float
    _made: dict[tuple[int, int], Script] = field(default_factory=dict)

    def script(self, group: int, attempt: int) -> Script:
        """See `pearl.sim.environment.Workload`."""
        if (group, attempt) not in self._made:
            rng = Random(derive_seed("script", self.seed, group, attempt))
            turns = [
                ScriptTurn(
                    rng.randint(1, 1500) if not turn else rng.choice((0, rng.randint(1, 600))),
                    int(10 ** rng.uniform(0, 2.9)),
                    rng.choice((0.0, rng.uniform(0.0, self.env_s))),
                )
                for turn in range(rng.randint(1, self.most_turns))
            ]
            self._made[group, attempt] = script_of(tuple(turns))
        return self._made[group, attempt]


def random_recipe(rng: Random, seed: int) -> Recipe:
    """A small fleet under any policy."""
    policy, elastic = rng.choice((*POLICIES, POLICIES[0], POLICIES[0]))
    tps = [1] if policy == "static" else rng.choice(([1], [1], [1, 2], [2]))
    reserved = rng.choice((2, 4) if policy == "roll" else (0, 2, 2, 4))
    return fake_recipe(
        run={"steps": rng.randint(2, 4), "seed": seed},
        rollout={
            "groups_per_batch": rng.randint(1, 2),
            "group_size": rng.randint(1, 3),
            "max_staleness": rng.randint(0, 2),
            "max_turns": rng.choice((3, 8)),
            "max_context_tokens": rng.choice((2500, 8192)),
            "env_step_timeout_s": 60.0,
            "env_reset_timeout_s": 60.0,
            "turn_timeout_s": rng.choice((150.0, 600.0)),
            "max_replacements": 50,
            "max_failed_groups": 50,
            "max_turn_attempts": 50,
        },
        sampling={"max_new_tokens": 8192},
        engine={"max_context_tokens": 8192, "on_load": rng.choice(("keep_kv", "recompute"))},
        fleet={
            "gpus_per_node": 4,
            "reserved_gpus": reserved,
            "training_gpus": rng.choice((0, 2, 2, 4)),
            "external_gpus": rng.choice((2, 4)) if reserved == 0 else rng.choice((0, 2, 4, 4)),
            "tp": tps,
            "overlap_tp": rng.choice(tps),
            "hybrid": rng.random() < 0.3,
        },
        elastic={"policy": policy, **elastic},
        cluster={"max_worker_restarts": 1000, "start_timeout_s": 100.0, "health_timeout_s": 30.0},
        workload={"prior": "webshop"},
        platform={
            "start_s": 10,
            "activate_s": 2,
            "return_s": 1,
            "role_change_s": 1,
            "stop_s": 1,
            "finalise_s": 1,
            "max_sequences": 8,
        },
        simulation={
            "notice_s": rng.choice((0, 5, 30)),
            "mixing": rng.choice(("chunked", "alone")),
            "weight_bytes": 4e9,
            "network_bytes_per_s": rng.choice((2e9, 50e9)),
        },
    )


def random_faults(rng: Random, within_s: float) -> tuple[Fault, ...]:
    """Any number of anything, at any time, also several at once."""
    kinds = [kind for kind in FaultKind if rng.random() < 0.6]
    faults = []
    for _ in range(rng.choice((0, 2, 5, 10, 20)) if kinds else 0):
        at_s = rng.uniform(0.0, within_s)
        faults.append(
            Fault(
                at_s=float(round(at_s, -1)) if rng.random() < 0.3 else at_s,
                kind=rng.choice(kinds),
                # Numbers name any worker, and no two faults the same one by name.
                worker=rng.randrange(1 << 30),
                seconds=rng.choice((0.0, 5.0, rng.expovariate(1 / 40))),
                factor=rng.uniform(1.0, 5.0),
                units=rng.randint(1, 2),
            )
        )
    return tuple(sorted(faults, key=lambda fault: fault.at_s))


def random_availability(rng: Random, most: int, within_s: float) -> Availability:
    """GPUs that come and go; some are there in the end, as a run needs some."""
    if not most:
        return ()
    times = sorted({round(rng.uniform(0.0, within_s), rng.choice((0, 3))) for _ in range(rng.randint(0, 6))})
    levels = [(at_s, rng.randint(0, most)) for at_s in times if at_s > 0]
    return ((0.0, rng.choice((0, most, most))), *levels, (within_s + 50.0, most))


def random_run(seed: int) -> Run:
    """One seed, one schedule."""
    rng = Random(derive_seed("simulated world", seed))
    recipe, within_s = random_recipe(rng, seed), rng.choice(TIMES_S)
    moody, close_s, lease_aware = rng.random() < 0.7, rng.choice((30.0, 150.0)), rng.random() < 0.5

    def change_options(control: ElasticFleet) -> None:
        if moody:
            policy = replace(control.options.policy, predictor=Moody(seed, close_s), lease_aware=lease_aware)
            control.options = replace(control.options, policy=policy)

    conditions = Conditions(
        workload=Scripts(seed, rng.choice((2, 5)), rng.choice((0.0, 5.0, 40.0))),
        faults=random_faults(rng, within_s),
        availability=random_availability(rng, recipe.fleet.external_gpus, within_s),
        times=TrainTimes(
            gpus=1,
            gpu_s_per_token=0.0,
            step_s=rng.choice((0.0, 5.0, 30.0)),
            lend_s=rng.choice((0.0, 1.0)),
            reclaim_s=rng.choice((0.0, 1.0)),
        ),
        change_options=change_options,
    )
    return make_run(seed, recipe, conditions)


@dataclass(slots=True)
class Verdict:
    """What became of one schedule."""

    seed: int
    wrong: list[str]
    counts: Counter[str]
    return_s: float
    seconds: float


def judge(seed: int) -> Verdict:
    """Play a schedule and look at it from all sides."""
    began_s = time.process_time()
    run = random_run(seed)
    wrong = findings(run.play())
    return Verdict(seed, wrong, counts_of(run), max(run.watch.returns_s, default=0.0), time.process_time() - began_s)


def counts_of(run: Run) -> Counter[str]:
    """What happened."""
    watch = run.watch
    found = Counter(f"fault {fault.kind.value}" for _, fault in run.applied)
    found.update({f"workers {name}": count for name, count in run.simulation.tally.workers.items()})
    found.update({f"end {name}": count for name, count in run.simulation.tally.ends.items()})
    found["withdrawals of GPUs in use, with notice"] = sum(noticed for _, _, noticed in watch.withdrawals)
    found["withdrawals of GPUs in use, without notice"] = sum(not noticed for _, _, noticed in watch.withdrawals)
    found["withdrawals under workers, with notice"] = sum(notice_s > 0 for notice_s, _ in watch.surprised)
    found["withdrawals under workers, without notice"] = sum(notice_s <= 0 for notice_s, _ in watch.surprised)
    found["stalls"] = len(watch.stalls)
    found["loans"] = watch.borrowed
    found["runs"] = 1
    hangs = any(fault.kind is FaultKind.HANG for _, fault in run.applied)
    for limit_s in (0.5, 3.5, 12.5, 27.0, 60.0):
        name = f"returns of training GPUs over {limit_s:04.1f} s, {'with' if hangs else 'without'} workers that hang"
        found[name] = sum(seconds > limit_s for seconds in watch.returns_s)
    found["steps"] = len(run.steps)
    found["trained tokens"] = sum(len(sample.logprobs) for batch in watch.batches for sample in batch.samples)
    if run.failure is not None:
        found[f"failed: {str(run.failure)[:40]}"] = 1
    return found


def many(first: int, last: int, processes: int) -> Iterator[Verdict]:
    """Verdicts of a range, in order."""
    if processes == 1:
        yield from map(judge, range(first, last))
        return
    with ProcessPoolExecutor(processes, initializer=_quiet) as pool:
        yield from pool.map(judge, range(first, last), chunksize=20)


def _quiet() -> None:
    logging.disable(logging.CRITICAL)


def main() -> int:
    """Run a range; the exit status says whether all of it was right."""
    parser = argparse.ArgumentParser(description="Seeded schedules of the simulated world, judged.")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int, help="the first seed that is not run")
    parser.add_argument("--processes", type=int, default=1)
    args = parser.parse_args()
    _quiet()
    counts: Counter[str] = Counter()
    bad, slowest, return_s, total_s = 0, (0.0, 0), 0.0, 0.0
    for verdict in many(args.first, args.last, args.processes):
        counts += verdict.counts
        slowest = max(slowest, (verdict.seconds, verdict.seed))
        return_s, total_s = max(return_s, verdict.return_s), total_s + verdict.seconds
        bad += bool(verdict.wrong)
        if (done := verdict.seed + 1 - args.first) % 500 == 0:
            print(f"{done} done, {bad} wrong, {json.dumps(dict(sorted(counts.items())))}", file=sys.stderr, flush=True)
        if verdict.wrong:
            print(f"seed {verdict.seed}: {'; '.join(verdict.wrong)[:600]}", flush=True)
    print(json.dumps(dict(sorted(counts.items())), indent=1))
    print(
        f"{args.last - args.first} schedules, {bad} wrong; {total_s:.0f} s of processors, the slowest "
        f"{slowest[0]:.2f} s (seed {slowest[1]}); the longest return {return_s:.1f} s"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
