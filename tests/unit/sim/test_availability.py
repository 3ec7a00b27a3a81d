"""Traces of availability: read by hand, every mistake with its line, and made-up ones with the moments asked for."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ProfileError
from pearl.sim.availability import Availability, recorded_availability, synthetic_availability

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "availability"


def write(folder: Path, text: str) -> Path:
    path = folder / "a.csv"
    path.write_text(text)
    return path


def mean_gpus(trace: Availability) -> float:
    steps = itertools.pairwise(trace)
    return sum(gpus * (end_s - begin_s) for (begin_s, gpus), (end_s, _) in steps) / trace[-1][0]


class TestRead:
    def test_by_hand(self, tmp_path: Path) -> None:
        path = write(tmp_path, "time_s,gpus\r\n0,12\r\n\n 180.5 , 10\n1e3,0\n")
        assert recorded_availability(path) == ((0.0, 12), (180.5, 10), (1000.0, 0))

    def test_a_level_may_stay(self, tmp_path: Path) -> None:
        assert recorded_availability(write(tmp_path, "time_s,gpus\n0,1\n5,1")) == ((0.0, 1), (5.0, 1))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "got 0 rows, want at least 2"),
            ("\n \n", "got 0 rows, want at least 2"),
            ("time_s,gpus\n", "got 0 rows, want at least 2"),
            ("time_s,gpus\n0,5\n", r"got 1 rows, want at least 2 \(the last one marks the end\)"),
            ("0,5\n9,5\n", "line 1: got '0,5', want time_s,gpus"),
            ("gpus,time_s\n", "line 1: got 'gpus,time_s', want time_s,gpus"),
            ("time_s,gpus\n3,5\n9,5", r"line 2: time_s: got 3, want 0 \(a trace begins at 0\)"),
            ("time_s,gpus\n0,5\n\n9,5\n9,6", "line 5: time_s: got 9 after 9, want times that rise"),
            ("time_s,gpus\n0,5\n9,5\n8.5,6", "line 4: time_s: got 8.5 after 9, want times that rise"),
            ("time_s,gpus\n0,5\n9", "line 3: got '9', want two numbers: time_s,gpus"),
            ("time_s,gpus\n0,5\n9,5,6", "line 3: got '9,5,6', want two numbers"),
            ("time_s,gpus\n0,5\nx,5", "line 3: time_s: got 'x', want seconds 0..1e"),
            ("time_s,gpus\n0,5\n-1,5", "line 3: time_s: got '-1', want seconds"),
            ("time_s,gpus\n0,5\nnan,5", "line 3: time_s: got 'nan', want seconds"),
            ("time_s,gpus\n0,5\ninf,5", "line 3: time_s: got 'inf', want seconds"),
            ("time_s,gpus\n0,5\n1e999,5", "line 3: time_s: got '1e999', want seconds"),
            ("time_s,gpus\n0,5\n1_0,5", "line 3: time_s: got '1_0', want seconds"),
            ("time_s,gpus\n0,-5\n", r"line 2: gpus: got '-5', want a whole number 0\.\.100000"),
            ("time_s,gpus\n0,5.0\n", "line 2: gpus: got '5.0', want a whole number"),
            ("time_s,gpus\n0,true\n", "line 2: gpus: got 'true', want a whole number"),
            ("time_s,gpus\n0,\n", "line 2: gpus: got '', want a whole number"),
            ("time_s,gpus\n0,100001\n", "line 2: gpus: got '100001', want a whole number"),
            ("time_s,gpus\n0," + "9" * 10_000, r"line 2: gpus: got '9{57}\.\.\.', want a whole number"),
            ("time_s,gpus\n0,٣\n", "line 2: gpus: got '٣', want a whole number"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, text: str, message: str) -> None:
        with pytest.raises(ProfileError, match=rf"a\.csv: {message}"):
            recorded_availability(write(tmp_path, text))

    def test_no_file(self, tmp_path: Path) -> None:
        with pytest.raises(ProfileError, match=r"b\.csv: no such file; want a trace of availability \(CSV\)$"):
            recorded_availability(tmp_path / "b.csv")

    def test_what_never_ends(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(ProfileError, match="pipe: got a pipe, no regular file; want a trace"):
            recorded_availability(tmp_path / "pipe")
        with pytest.raises(ProfileError, match="got a folder, no regular file"):
            recorded_availability(tmp_path)

    def test_what_is_too_long(self, tmp_path: Path) -> None:
        path = write(tmp_path, "")
        os.truncate(path, 32 * 2**20 + 1)
        with pytest.raises(ProfileError, match=r"got 32\.0 MiB, more than 32\.0 MiB; want a trace"):
            recorded_availability(path)

    @pytest.mark.parametrize(("name", "mean", "changes"), [("s1", 9.72, 19), ("s2", 5.02, 23), ("s3", 7.73, 11)])
    def test_shared_traces(self, name: str, mean: float, changes: int) -> None:
        """Published mean and changes; the last row is the end."""
        path = DATA / f"bamboo_{name}_2h.csv"
        if not path.exists():
            pytest.skip("no shared/data beside the project")
        trace = recorded_availability(path)
        assert mean_gpus(trace) == pytest.approx(mean, abs=0.006)
        assert sum(before != after for (_, before), (_, after) in itertools.pairwise(trace)) == changes
        assert trace[-1][0] == 7200


class TestSynthetic:
    def test_mean_and_changes_in_the_long_run(self) -> None:
        """2,000 hours at 9.5 changes an hour: 19,000 of them, so both are known to some per cent."""
        trace = synthetic_availability(
            seed=1, length_s=2000 * 3600, most_gpus=12, mean_gpus=9.72, changes_per_h=9.5, step_gpus=2
        )
        assert mean_gpus(trace) == pytest.approx(9.72, rel=0.03)
        assert (len(trace) - 2) / 2000 == pytest.approx(9.5, rel=0.05)

    @given(st.integers(0, 2**40), st.integers(1, 6), st.integers(1, 4), st.floats(0, 1), st.floats(0.1, 100))
    @settings(max_examples=60, deadline=None)
    def test_a_trace_like_any_other(self, seed: int, blocks: int, step: int, share: float, changes: float) -> None:
        most = blocks * step
        made = synthetic_availability(
            seed=seed, length_s=3600, most_gpus=most, mean_gpus=share * most, changes_per_h=changes, step_gpus=step
        )
        assert made == synthetic_availability(
            seed=seed, length_s=3600, most_gpus=most, mean_gpus=share * most, changes_per_h=changes, step_gpus=step
        )
        assert (made[0][0], made[-1][0]) == (0, 3600)
        assert all(before < after for (before, _), (after, _) in itertools.pairwise(made))
        assert all(0 <= gpus <= most and gpus % step == 0 for _, gpus in made)

    def test_always_or_never(self) -> None:
        for mean in (0, 4):
            made = synthetic_availability(seed=0, length_s=10, most_gpus=4, mean_gpus=mean, changes_per_h=1e3)
            assert made == ((0.0, mean), (10.0, mean))

    def test_seeds_differ(self) -> None:
        made = [
            synthetic_availability(seed=seed, length_s=1e5, most_gpus=4, mean_gpus=2, changes_per_h=10)
            for seed in (0, 1)
        ]
        assert made[0] != made[1]

    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"most_gpus": 5}, r"most_gpus: got 5, want a multiple of step_gpus = 2"),
            ({"most_gpus": 0}, r"most_gpus: got 0, want a multiple"),
            ({"most_gpus": 100_002}, r"most_gpus: got 100002, want a multiple of step_gpus = 2, 1\.\.100000"),
            ({"mean_gpus": 5}, r"mean_gpus: got 5, want 0\.\.4"),
            ({"mean_gpus": float("nan")}, r"mean_gpus: got nan, want 0\.\.4"),
            ({"length_s": 0}, "length_s: got 0, want a finite number > 0"),
            ({"length_s": float("inf")}, "length_s: got inf, want a finite number > 0"),
            ({"changes_per_h": -1}, "changes_per_h: got -1, want a finite number > 0"),
            ({"changes_per_h": 1e30}, "got more than 1000000 changes, want fewer"),
        ],
    )
    def test_refused(self, changed: dict[str, float], message: str) -> None:
        wanted = {"length_s": 10, "most_gpus": 4, "mean_gpus": 2, "changes_per_h": 1, "step_gpus": 2, **changed}
        with pytest.raises(ProfileError, match=rf"^availability: {message}"):
            synthetic_availability(seed=0, **wanted)  # type: ignore[arg-type]
