"""Pacing, on a clock that only sleeps move: an iteration lasts as long as the table says, or is late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pearl.config.engine import EngineConfig
from pearl.core.profile import IterationTimes, PlatformProfile
from pearl.engine.embedded.attention import Batch
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.pace import Pace
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.errors import ConfigError


class Clock:
    """Time that passes in sleeps, and in `work_s` for every look at it."""

    def __init__(self, work_s: float = 0.0) -> None:
        self.now_s, self.work_s = 0.0, work_s
        self.slept: list[float] = []

    def __call__(self) -> float:
        self.now_s += self.work_s
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now_s += seconds


def linear(prefill: int, decoding: int, context: int) -> float:
    """Exact under linear interpolation, and different in each number."""
    return 1000 + 100 * prefill + 10 * decoding + context


AXES = {"prefill_tokens": (0, 64), "decoding": (0, 64), "context_tokens": (1, 512)}
TIMES = IterationTimes(
    **AXES,
    cells_s=tuple(
        tuple(tuple(float(linear(p, d, c)) for c in AXES["context_tokens"]) for d in AXES["decoding"])
        for p in AXES["prefill_tokens"]
    ),
)


def batch(*sequences: tuple[int, int]) -> Batch:
    """Sequences as `(cached tokens, new tokens)`."""
    starts, counts = (np.array(column, dtype=np.int64) for column in zip(*sequences, strict=True))
    return Batch.of(np.arange(len(sequences), dtype=np.int64), starts, counts)


class TestPace:
    @pytest.mark.parametrize(
        ("sequences", "want"),
        [
            ([(9, 1)], linear(0, 1, 10)),
            ([(9, 1), (29, 1)], linear(0, 2, 20)),
            # The prefill's own context, 8, does not count beside sequences that decode.
            ([(9, 1), (0, 8), (29, 1)], linear(8, 2, 20)),
            ([(0, 8)], linear(8, 0, 8)),
            ([(0, 8), (20, 12)], linear(20, 0, 20)),
        ],
    )
    def test_what_an_iteration_computes_sets_its_time(self, sequences: list[tuple[int, int]], want: float) -> None:
        clock = Clock()
        pace = Pace(TIMES, clock=clock, sleep=clock.sleep)
        pace.begin()
        pace.end(batch(*sequences))
        assert clock.slept == [pytest.approx(want)]

    def test_time_scale_multiplies(self) -> None:
        clock = Clock()
        pace = Pace(TIMES, 0.25, clock=clock, sleep=clock.sleep)
        pace.begin()
        pace.end(batch((9, 1)))
        assert clock.slept == [pytest.approx(linear(0, 1, 10) / 4)]

    def test_only_the_rest_is_slept(self) -> None:
        clock = Clock()
        pace = Pace(TIMES, clock=clock, sleep=clock.sleep)
        pace.begin()
        clock.now_s += 400
        pace.end(batch((9, 1)))
        assert clock.slept == [pytest.approx(1020 - 400)]
        assert pace.late_iterations == 0

    def test_an_iteration_over_its_time_is_late_and_does_not_sleep(self) -> None:
        clock = Clock()
        pace = Pace(TIMES, clock=clock, sleep=clock.sleep)
        for took_s, late in ((1000, 0), (1021, 1), (1019, 1), (5000, 2)):
            pace.begin()
            clock.now_s += took_s
            pace.end(batch((9, 1)))
            assert pace.late_iterations == late
        assert clock.slept == [pytest.approx(20), pytest.approx(1)]


class TestEngine:
    def engine(self, folder: Path, pace: Pace) -> EmbeddedEngine:
        config = EngineConfig(max_sequences=4, max_context_tokens=96, prefill_chunk_tokens=8)
        return EmbeddedEngine(folder, config, pace=pace)

    def test_the_total_is_the_sum_of_the_table(self, folder: Path, kit: Any) -> None:
        clock = Clock()
        engine = self.engine(folder, Pace(TIMES, 2.0, clock=clock, sleep=clock.sleep))
        results = kit.generate(
            engine,
            kit.request("long", kit.tokens(1, 12), new=3),
            kit.request("short", kit.tokens(2, 3), new=2),
        )
        assert [len(results[name].ids) for name in ("long", "short")] == [3, 2]
        want = [
            linear(8, 0, 8),  # the first 8 of 12 tokens; the other waits
            linear(7, 0, 7.5),  # 4 more, and 3: lengths 12 and 3
            linear(0, 2, 8.5),  # lengths 13 and 4
            linear(0, 1, 14),
        ]
        assert clock.slept == [pytest.approx(2 * seconds) for seconds in want]
        assert clock.now_s == pytest.approx(2 * sum(want))
        assert (engine.stats().iterations, engine.stats().late_iterations) == (4, 0)

    def test_late_iterations_are_counted(self, folder: Path, kit: Any) -> None:
        clock = Clock(work_s=1e6)
        engine = self.engine(folder, Pace(TIMES, clock=clock, sleep=clock.sleep))
        kit.generate(engine, kit.request("r", kit.tokens(1, 4), new=5))
        assert clock.slept == []
        assert (engine.stats().iterations, engine.stats().late_iterations) == (5, 5)

    def test_a_step_without_work_takes_no_time(self, folder: Path) -> None:
        clock = Clock()
        engine = self.engine(folder, Pace(TIMES, clock=clock, sleep=clock.sleep))
        assert engine.step() is False
        assert clock.slept == []

    def test_without_pacing_nothing_is_late(self, make_engine: Callable[..., EmbeddedEngine], kit: Any) -> None:
        engine = make_engine()
        kit.generate(engine, kit.request("r", kit.tokens(1, 4), new=5))
        assert (engine.stats().iterations, engine.stats().late_iterations) == (5, 0)


def profile_text(times: IterationTimes = TIMES) -> str:
    return PlatformProfile(
        model="m",
        model_hash="h",
        device="d",
        dtype="float32",
        tp=1,
        iterations=times,
        kv_capacity_tokens=1,
        kv_bytes_per_token=1,
        hand_off=None,
        weight_load_s=0.0,
        sleep_s=0.0,
        wake_s=0.0,
        engine_start_s=None,
    ).to_json()


class TestRead:
    def test_no_pacing_by_default(self) -> None:
        assert Pace.read(EngineConfig()) is None

    def test_the_engine_keeps_the_pace_of_its_file(self, tmp_path: Path, folder: Path, kit: Any) -> None:
        """Times so short that every iteration is late: the file is read, and scaled."""
        file = tmp_path / "p.json"
        file.write_text(profile_text())
        engine = EmbeddedEngine(
            folder, EngineConfig(max_sequences=2, max_context_tokens=32, pacing=file, time_scale=1e-15)
        )
        file.unlink()  # read once, at the start
        kit.generate(engine, kit.request("r", kit.tokens(1, 4), new=3))
        assert engine.stats().late_iterations == 3

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "engine.pacing: .*p.json: no such file; want a file of `pearl profile`"),
            (b"\xff", "engine.pacing: .*p.json: cannot be read: not UTF-8 at byte 0; want a file"),
            (b"{}", "engine.pacing: .*p.json: schema: got null"),
        ],
    )
    def test_a_bad_file_is_a_mistake_in_the_recipe(self, tmp_path: Path, content: bytes | None, message: str) -> None:
        file = tmp_path / "p.json"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            Pace.read(EngineConfig(pacing=file))

    def test_it_is_found_when_the_engine_starts(self, tmp_path: Path, folder: Path) -> None:
        config = EngineConfig(max_sequences=2, max_context_tokens=32, pacing=tmp_path)
        with pytest.raises(ConfigError, match=r"engine\.pacing"):
            asyncio.run(ThreadedEngine.create(folder, config))
