"""What the meter makes of counters, by hand, and what it does in a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import cast

import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.makespan import Profile
from pearl.core.workload import WorkloadProfile
from pearl.elastic.meter import ANSWER_S, INTERVAL_S, Meter, Window, expected_s, window_of
from pearl.errors import WorkerLost
from pearl.pipeline.workers import Workers
from pearl.ports import EngineStats
from pearl.records.ids import WeightVersion, WorkerId
from pearl.testing.virtual_time import run_virtual
from tests.platforms import linear_times, platform_of

WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(130),
    new_tokens=constant(90),
    generated_tokens=constant(20),
    env_s=constant(3),
)
"""100 new tokens per turn, mean."""
TIMES = linear_times(0.01, 0.002, 0.001)
"""0.01 s, and 0.002 s per decoding sequence or 0.001 s per prompt token, whichever the helper has them for."""
PROFILE = Profile(workload=WORK, platform=platform_of({1: TIMES}, 2048))


def stats(iterations: int, busy_s: float, generated: int, computed: int) -> EngineStats:
    return EngineStats(
        version=WeightVersion(0),
        running=0,
        waiting=0,
        kv_used_tokens=0,
        generated_tokens=generated,
        computed_prompt_tokens=computed,
        iterations=iterations,
        busy_s=busy_s,
    )


def test_what_lies_between_two_readings() -> None:
    window = window_of(stats(10, 1.0, 50, 300), stats(110, 3.5, 450, 700))
    assert window == Window(iterations=100, busy_s=2.5, generated_tokens=400, computed_prompt_tokens=400)


@pytest.mark.parametrize("now", [stats(10, 1.0, 50, 300), stats(5, 0.2, 10, 20), stats(20, 0.5, 60, 300)])
def test_nothing_and_another_engine_teach_nothing(now: EngineStats) -> None:
    assert window_of(stats(10, 1.0, 50, 300), now) is None


def test_by_hand() -> None:
    """4 prompts of 100 tokens in 100 iterations: 4 sequences decode, 396 tokens in all; prompts ride on 4 iterations."""
    window = Window(iterations=100, busy_s=0.0, generated_tokens=404, computed_prompt_tokens=400)
    want = 96 * TIMES.seconds(0, 4, 1000) + 4 * TIMES.seconds(100, 4, 1000)
    assert expected_s(PROFILE, 1, window) == pytest.approx(want)


def test_only_prompts() -> None:
    """More prompts than iterations share them; the tokens that they draw are nobody's decoding."""
    window = Window(iterations=2, busy_s=0.0, generated_tokens=4, computed_prompt_tokens=400)
    assert expected_s(PROFILE, 1, window) == pytest.approx(2 * TIMES.seconds(200, 0, 1000))


def test_the_scale_is_in_it() -> None:
    window = Window(iterations=100, busy_s=0.0, generated_tokens=400, computed_prompt_tokens=0)
    slow = replace(PROFILE, platform=replace(PROFILE.platform, time_scale={1: 1.5}))
    assert expected_s(slow, 1, window) == pytest.approx(1.5 * expected_s(PROFILE, 1, window))


def test_of_an_uneven_workload() -> None:
    """1 or 5 turns: a turn is met after (0 + 0 + 1 + 2 + 3 + 4) / 6 others, at 130 + 10 / 6 * 110 tokens, and 10."""
    times = linear_times(0.0, 1.0, 0.0, contexts=(1, 8192))
    work = replace(WORK, turns=Distribution((1.0, 5.0), (0.5, 0.5)))
    profile = Profile(workload=work, platform=platform_of({1: times}, 2048))
    window = Window(iterations=10, busy_s=0.0, generated_tokens=30, computed_prompt_tokens=0)
    context = 130 + 10 / 6 * 110 + 10
    assert expected_s(profile, 1, window) == pytest.approx(30 * (1 + context / 32768))


@dataclass
class Counting:
    """An engine's counters, each reading the next ones; an error is raised."""

    readings: list[EngineStats | BaseException]
    asked: int = 0

    async def stats(self) -> EngineStats:
        self.asked += 1
        found = self.readings.pop(0)
        if isinstance(found, TimeoutError):
            await asyncio.sleep(10 * ANSWER_S)  # it hangs
        if isinstance(found, BaseException):
            raise found
        return found


@dataclass
class Fleet:
    """What a meter sees of `Workers`: engines that serve, and the GPUs of those that the state has."""

    engines: dict[int, Counting | None]
    gpus: dict[int, int] = field(default_factory=dict)

    @property
    def router(self) -> SimpleNamespace:
        return SimpleNamespace(workers=tuple(map(WorkerId, sorted(self.engines))), engine=self.engines.get)

    @property
    def state(self) -> SimpleNamespace:
        workers = {slot: SimpleNamespace(gpus=("g",) * tp) for slot, tp in self.gpus.items()}
        return SimpleNamespace(snapshot=SimpleNamespace(workers=workers))


def meter_of(fleet: Fleet, profile: Callable[[], Profile] = lambda: PROFILE) -> Meter:
    return Meter(workers=cast(Workers, fleet), profile=profile)


ZERO = stats(0, 0.0, 0, 0)
DONE = stats(100, 3.0, 404, 400)
"""What `test_by_hand` expects, and in that time 3 s."""
WANT_S = 96 * TIMES.seconds(0, 4, 1000) + 4 * TIMES.seconds(100, 4, 1000)


def taken(fleet: Fleet, readings: int) -> Mapping[int, float]:
    async def main() -> Mapping[int, float]:
        meter = meter_of(fleet)
        for _ in range(readings):
            await meter.read()
        found = meter.take()
        assert meter.take() == {}  # what was taken counts once
        return found

    return run_virtual(main())


class TestReadings:
    def test_one_reading_says_nothing(self) -> None:
        assert taken(Fleet({0: Counting([DONE])}, {0: 1}), 1) == {}

    def test_busy_over_expected(self) -> None:
        assert taken(Fleet({0: Counting([ZERO, DONE])}, {0: 1}), 2) == pytest.approx({1: 3.0 / WANT_S})

    def test_engines_of_one_tensor_parallelism_are_summed(self) -> None:
        """The second has been up for a while, and was twice as fast."""
        later = stats(500, 9.0, 2404, 2400)
        fleet = Fleet({0: Counting([ZERO, DONE]), 3: Counting([stats(400, 7.5, 2000, 2000), later])}, {0: 1, 3: 1})
        assert taken(fleet, 2) == pytest.approx({1: 4.5 / (2 * WANT_S)})

    def test_windows_add_up(self) -> None:
        fleet = Fleet({0: Counting([ZERO, DONE, stats(200, 4.0, 808, 800)])}, {0: 1})
        assert taken(fleet, 3) == pytest.approx({1: 4.0 / (2 * WANT_S)})

    def test_each_tensor_parallelism_by_its_own_tables(self) -> None:
        """Of 4 nothing is known."""
        slow = linear_times(0.02, 0.004, 0.002)
        profile = Profile(workload=WORK, platform=platform_of({1: TIMES, 2: slow}, 2048))
        fleet = Fleet({slot: Counting([ZERO, DONE]) for slot in range(3)}, {0: 2, 1: 1, 2: 4})

        async def main() -> Mapping[int, float]:
            meter = meter_of(fleet, lambda: profile)
            await meter.read()
            await meter.read()
            return meter.take()

        assert run_virtual(main()) == pytest.approx({1: 3.0 / WANT_S, 2: 1.5 / WANT_S})

    def test_who_is_not_there_is_left_out(self) -> None:
        """An engine without a worker in the state, and a worker whose engine has gone."""
        fleet = Fleet({0: Counting([ZERO, DONE]), 1: Counting([ZERO, DONE]), 2: None}, {0: 1, 2: 1})
        assert taken(fleet, 2) == pytest.approx({1: 3.0 / WANT_S})

    @pytest.mark.parametrize("fault", [WorkerLost("gone"), TimeoutError()])
    def test_one_that_does_not_answer_begins_anew(self, fault: BaseException) -> None:
        """What it did since the reading before is lost, the others' is not."""
        lossy = Counting([ZERO, fault, DONE, stats(200, 5.0, 808, 800)])
        steady = Counting([ZERO, ZERO, ZERO, ZERO])
        assert taken(Fleet({0: lossy, 1: steady}, {0: 1, 1: 1}), 4) == pytest.approx({1: 2.0 / WANT_S})
        assert steady.asked == 4

    def test_a_worker_that_started_again(self) -> None:
        fleet = Fleet({0: Counting([stats(900, 9.0, 999, 999), DONE, stats(200, 5.0, 808, 800)])}, {0: 1})
        assert taken(fleet, 3) == pytest.approx({1: 2.0 / WANT_S})

    def test_windows_of_nothing_expected_teach_nothing(self) -> None:
        """By tables of zeros any time is infinitely much."""
        free = Profile(workload=WORK, platform=platform_of({1: linear_times(0.0, 0.0, 0.0)}, 2048))

        async def main() -> Mapping[int, float]:
            meter = meter_of(Fleet({0: Counting([ZERO, DONE])}, {0: 1}), lambda: free)
            await meter.read()
            await meter.read()
            return meter.take()

        assert run_virtual(main()) == {}


def test_it_reads_when_turns_end_and_no_more_often_than_it_should() -> None:
    async def main() -> list[int]:
        engine = Counting([ZERO] * 20)
        meter = meter_of(Fleet({0: engine}, {0: 1}))
        task = asyncio.ensure_future(meter.run())
        asked = []
        for at_s in (0.0, INTERVAL_S - 0.1, INTERVAL_S, INTERVAL_S + 5, 2 * INTERVAL_S, 9 * INTERVAL_S, 9 * INTERVAL_S):
            meter.turn_ended(at_s)
            await asyncio.sleep(1000.0)  # by itself it does nothing, however long it takes
            asked.append(engine.asked)
        task.cancel()
        return asked

    assert run_virtual(main()) == [0, 0, 1, 1, 2, 3, 3]
