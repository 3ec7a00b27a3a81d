"""The whole simulated world under seeded schedules of all that can go wrong, judged from outside (`tests.simulated_oracles`).

More of them, and which seed to look at: `python -m tests.simulated_runs 0 10000 --processes 2`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pearl.elastic.control import ElasticFleet
from pearl.elastic.loans import Loans
from pearl.elastic.rebuild import Rebuilder
from pearl.pipeline import rollout, training_loop
from pearl.pipeline.batch import assemble
from pearl.records.journal import GroupEntry, TrajectoryEntry, TurnEntry
from pearl.records.training import TrainingBatch
from pearl.records.trajectory import EnvironmentReply
from pearl.records.turn import Versions
from pearl.sim.codec import SimCodec
from pearl.sim.environment import SimEnvironment, SimEnvironmentPool
from pearl.sim.faults import FaultKind
from pearl.sim.fleet import SimFleet
from tests.simulated_oracles import findings
from tests.simulated_runs import judge, random_run
from tests.simulated_world import Run

ROOT = Path(__file__).parent.parent.parent
SEEDS, MORE = 60, 10_000
AT_ONCE = 20


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="pearl")


def play(seeds: range) -> Counter[str]:
    """What happened in schedules that must be right."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        verdict = judge(seed)
        assert not verdict.wrong, f"replay with: python -m tests.simulated_runs {seed} {seed + 1}: {verdict.wrong}"
        counts += verdict.counts
    return counts


@pytest.mark.timeout(120)
@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_any_schedule(first: int) -> None:
    counts = play(range(first, first + AT_ONCE))
    # Else nothing above could fail.
    assert counts["trained tokens"] > 10_000
    assert counts["loans"] > 5
    assert counts["withdrawals of GPUs in use, with notice"] + counts["withdrawals of GPUs in use, without notice"] > 1
    assert sum(counts[f"fault {kind.value}"] for kind in FaultKind) > 20


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(SEEDS, MORE, 710))
def test_many_more_schedules(first: int) -> None:
    counts = play(range(first, min(first + 710, MORE)))
    assert all(counts[f"fault {kind.value}"] for kind in FaultKind)


def test_the_same_seed_gives_the_same_journal_in_any_process() -> None:
    """Byte for byte, whatever strings hash to."""
    script = (
        "import logging, hashlib; logging.disable(50)\n"
        "from tests.simulated_runs import random_run\n"
        "for seed in (4, 12, 21):\n"
        "    print(hashlib.sha256(repr(random_run(seed).play().journal.all).encode()).hexdigest())\n"
    )
    told = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
            capture_output=True,
            text=True,
            check=True,
            timeout=100,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert told[0] == told[1]
    assert len(set(told[0].split())) == 3


# -- the oracles can fail: of what was recorded -------------------------------------------------------------------------

GOOD = 0
"""A schedule in which all is well, and GPUs are borrowed."""


def _twice(run: Run) -> None:
    run.journal.all.append(run.of(TrajectoryEntry)[0])


def _never(run: Run) -> None:
    run.journal.all.remove(run.of(TrajectoryEntry)[0])


def _group_twice(run: Run) -> None:
    run.journal.all.append(run.of(GroupEntry)[0])


def _token_less(run: Run) -> None:
    entry = run.of(TurnEntry)[0]
    run.journal.all[run.journal.all.index(entry)] = replace(entry, generated=entry.generated - 1)


def _change_batch(run: Run, change: Callable[[TrainingBatch], TrainingBatch]) -> None:
    run.watch.batches[1] = change(run.watch.batches[1])


def _dropped(run: Run) -> None:
    _change_batch(run, lambda batch: replace(batch, samples=batch.samples[1:]))


def _trained_again(run: Run) -> None:
    first = run.watch.batches[0].samples
    _change_batch(run, lambda batch: replace(batch, samples=(*first[:1], *batch.samples[1:])))


def _stale(run: Run) -> None:
    def change(batch: TrainingBatch) -> TrainingBatch:
        sample = batch.samples[0]
        versions = Versions.of([(-9, len(sample.versions))])
        return replace(batch, samples=(replace(sample, versions=versions), *batch.samples[1:]))

    _change_batch(run, change)


def _half(run: Run) -> None:
    def change(batch: TrainingBatch) -> TrainingBatch:
        sample = batch.samples[0]
        return replace(batch, samples=(replace(sample, trained=sample.trained[:-1]), *batch.samples[1:]))

    _change_batch(run, change)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_twice, "ended 2 times"),
        (_never, "attempts began"),
        (_group_twice, " ended 2 times"),
        (_token_less, "its script is"),
        (_dropped, "trained groups of"),
        (_trained_again, "was trained 2 times"),
        (_stale, "version -9 in the step of 1"),
        (_half, "generated were"),
        (lambda run: run.watch.returns_s.append(99.0), "the trainer waited 99.0 s"),
        (lambda run: run.watch.batches.pop(), "steps of"),
    ],
)
def test_what_is_recorded_wrongly_is_found(change: Callable[[Run], object], told: str) -> None:
    run = random_run(GOOD).play()
    assert findings(run) == []
    change(run)
    assert told in "; ".join(findings(run))


# -- of code that does the wrong thing ------------------------------------------------------------------------------------


def _found(seeds: range) -> str:
    return "; ".join(text for seed in seeds for text in judge(seed).wrong)


def test_a_sample_that_is_trained_again_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before: list[TrainingBatch] = []

    def again(*args: Any) -> TrainingBatch:
        before.append(assemble(*args))
        return replace(before[-1], samples=(*before[0].samples[:1], *before[-1].samples[1:]))

    monkeypatch.setattr(training_loop, "assemble", again)
    assert "was trained 4 times" in _found(range(GOOD, GOOD + 1))


def test_a_sample_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fewer(*args: Any) -> TrainingBatch:
        batch = assemble(*args)
        return replace(batch, samples=batch.samples[1:])

    monkeypatch.setattr(training_loop, "assemble", fewer)
    assert "trained groups of" in _found(range(GOOD, GOOD + 1))


def test_groups_that_begin_too_early_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def loose(what: Callable[..., object]) -> Callable[..., object]:
        return lambda limits, *args, **now: what(replace(limits, max_staleness=limits.max_staleness + 2), *args, **now)

    monkeypatch.setattr(rollout, "admissible_groups", loose(rollout.admissible_groups))
    monkeypatch.setattr(rollout, "close_batch", loose(rollout.close_batch))
    # In most schedules the scheduler stumbles over them first.
    assert "version 0 in the step of 2" in _found(range(19, 20))


def test_a_turn_that_reads_a_token_more_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    append = SimCodec.append

    def longer(codec: SimCodec, observation: str, *, closed: bool) -> object:
        del closed
        return append(codec, observation, closed=False)

    monkeypatch.setattr(SimCodec, "append", longer)
    assert "its script is" in _found(range(3))


def test_gpus_that_come_back_late_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    reclaim = Loans._reclaim

    async def late(loans: Loans, gpus: Any) -> str | None:
        await asyncio.sleep(55.0)
        return await reclaim(loans, gpus)

    monkeypatch.setattr(Loans, "_reclaim", late)
    assert "the trainer waited" in _found(range(GOOD, GOOD + 1))


def test_gpus_that_do_not_come_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def kept(_loans: Loans, _gpus: Any) -> str | None:
        return None

    monkeypatch.setattr(Loans, "_reclaim", kept)
    assert "training begins with" in _found(range(GOOD, GOOD + 1))


def test_workers_on_gpus_that_are_gone_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stop = SimFleet.stop

    async def late(fleet: SimFleet, workers: Any, grace_s: float) -> None:
        await asyncio.sleep(1.0)
        await stop(fleet, workers, grace_s)

    monkeypatch.setattr(SimFleet, "kill", lambda *_: None)
    monkeypatch.setattr(SimFleet, "stop", late)
    assert "GPUs that are gone are in use" in _found(range(30))


def test_notices_that_nobody_hears_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rebuilder, "_notice", lambda *_: False)
    assert "after their notice, with workers" in _found(range(20))


def test_gpus_that_are_kept_after_the_end_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stays(_: ElasticFleet) -> None:
        pass

    monkeypatch.setattr(ElasticFleet, "leave", stays)
    assert "left at the end: GPUs from outside" in _found(range(5))


def test_slots_that_are_not_given_back_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimEnvironmentPool, "give_slot_back", lambda _: None)
    assert "environments open" in _found(range(GOOD, GOOD + 1))


def test_a_stall_that_no_schedule_has_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step, hung = SimEnvironment.step, list[SimEnvironment]()

    async def hangs(environment: SimEnvironment, action: str) -> EnvironmentReply:
        if not hung:
            hung.append(environment)
            await asyncio.get_running_loop().create_future()
        return await step(environment, action)

    monkeypatch.setattr(SimEnvironment, "step", hangs)
    seeds = [seed for seed in range(60) if not random_run(seed).conditions.faults][:4]
    found = ""
    for seed in seeds:
        hung.clear()
        found += _found(range(seed, seed + 1))
    assert "stall: from" in found
