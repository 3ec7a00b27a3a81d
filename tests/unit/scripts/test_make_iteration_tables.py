"""The script that makes the shipped tables, with a made-up source: how cells are composed, mended and compared."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import scripts.make_iteration_tables as script
from pearl.core.profile import parse_profile


class Engine:
    """Kernels of a source in ms: linear, with one dip."""

    def mixed_step_breakdown(self, p: int, d: int, context: int, osl: int, prefix: int) -> tuple[float, ...]:
        shared = 5.0 + 0.01 * (p + d) - (0.5 if p + d == 64 else 0.0)
        return 0.0, shared, 1e6, 0.3 + d * (context + 1) * 1e-4 if d else 0.0

    def run_static_per_op(self, *, batch_size: int, isl: int, osl: int, prefix: int, mode: str) -> tuple[Any, Any]:
        pairs = (isl - prefix) * (isl + prefix + 1) / 2 * batch_size
        return [("context_gemm", 1e6, 0.0, ""), ("context_attention", 1.0 + pairs * 1e-6, 0.0, "")], []

    def decode_step_latency(self, d: int, isl: int, osl: int) -> float:
        return sum(self.mixed_step_breakdown(0, d, isl, osl, 0)[1::2])

    def predict_prefill_latency(self, batch: int, total: int, cached: int) -> float:
        return self.mixed_step_breakdown(total, 0, total, 2, 0)[1] + 1.0 + total * (total + 1) / 2e6

    def mixed_step_latency(self, p: int, d: int, isl: int, osl: int, prefix: int) -> float:
        return 1.01 * (
            self.mixed_step_breakdown(p, d, isl - 1, osl, 0)[1]
            + self.mixed_step_breakdown(p, d, isl - 1, osl, 0)[3]
            + 1.0
            + p * (p + 1) / 2e6
        )


class MadeUp(script.Source):
    def __init__(self, model: script.Model, system: str, tp: int, version: str = "") -> None:
        self.engine = Engine()
        self.shared_s = cache(self._shared_s)
        self.where = (model.path, system, tp)

    def kv(self) -> tuple[int, int]:
        return 10**9, 147_456


@pytest.fixture
def source() -> MadeUp:
    return MadeUp(script.MODELS[0], "h100_sxm", 2)


@pytest.mark.parametrize(
    ("point", "want_ms"),
    [
        # Everything but attention, decoding, prefill.
        ((0, 3, 100), 5.03 + 0.3 + 3 * 100e-4),
        ((100, 0, 100), 6.0 + 1.0 + 5050e-6),
        # The last 10 of 100: 91 + 92 + ... + 100 pairs.
        ((10, 2, 100), 5.12 + 0.3 + 2 * 100e-4 + 1.0 + 955e-6),
        # Two whole sequences of 100, one start for both.
        ((200, 0, 100), 7.0 + 1.0 + 2 * 5050e-6),
        # And half of a third: its last 50 tokens have three quarters of its pairs.
        ((250, 0, 100), 7.5 + 1.0 + 2.75 * 5050e-6),
    ],
)
def test_a_cell(source: MadeUp, point: tuple[int, int, int], want_ms: float) -> None:
    assert source.seconds(*point) * 1e3 == pytest.approx(want_ms)


def test_a_table(source: MadeUp) -> None:
    times = script.times_of(source)
    cells = np.array(times.cells_s)
    assert cells.shape == (len(script.PREFILL), len(script.DECODING), len(script.CONTEXT))
    assert all((np.diff(cells, axis=axis) >= 0).all() for axis in range(3))
    assert times.seconds(128, 16, 4096) == pytest.approx(source.seconds(128, 16, 4096), rel=1e-3)
    # The dip: 63 tokens take 5.63 ms, 64 only 5.14; both become 5.385, and the four digits stay.
    assert times.seconds(0, 64, 64) * 1e3 == pytest.approx(5.385 + 0.3 + 64 * 64e-4, abs=1e-3)
    # Of nothing: as one token without attention.
    assert cells[0, 0, 0] == pytest.approx(5.01e-3)


def test_mended_and_own_steps(source: MadeUp) -> None:
    """The dip is the only thing out of order: at most 0.245 of 5.14 + 1 ms or so; own mixed steps are 1 % more."""
    assert 0.03 < script.mended_share(source, script.times_of(source)) < 0.05
    assert script.own_steps_share(source) == pytest.approx(0.01 / 1.01, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "want"), [([1, 2, 3], [1, 2, 3]), ([1, 3, 2], [1, 2.5, 2.5]), ([2, 0, 1], [1, 1, 1.5]), ([5], [5])]
)
def test_mend(values: list[float], want: list[float]) -> None:
    assert script.mend(np.array(values, dtype=np.float64), 0).tolist() == want


@given(st.lists(st.lists(st.floats(0, 10), min_size=3, max_size=3), min_size=1, max_size=6))
def test_mending_orders_both_axes_and_stays_within_the_disorder(rows: list[list[float]]) -> None:
    values = np.array(rows)
    mended = script.mend(script.mend(values, 0), 1)
    assert (np.diff(mended, axis=0) >= 0).all()
    assert (np.diff(mended, axis=1) >= 0).all()
    worst = float((np.maximum.accumulate(values, 0) - values).max())
    assert np.abs(script.mend(values, 0) - values).max() <= worst / 2 + 1e-12


@pytest.mark.parametrize(("value", "want"), [(0.0123449, 0.01234), (1.23456, 1.235), (0.0, 0.0)])
def test_digits(value: float, want: float) -> None:
    assert script.rounded(value) == want


def test_random_points_fit_and_repeat() -> None:
    points = list(script.random_points(500, 100_000, seed=1))
    assert points == list(script.random_points(500, 100_000, seed=1))
    assert len(points) == 500
    for p, d, c in points:
        assert 0 <= p <= 8192
        assert 0 <= d <= 512
        assert 64 <= c <= 131_072
        assert p + d > 0
        assert d * c + p <= 100_000
    assert 100 < sum(p == 0 for p, _, _ in points) < 300


class TestCommand:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(script, "Source", MadeUp)
        monkeypatch.setattr(script, "POINTS", 20)
        monkeypatch.setattr(script, "PREFILL", (0, 64, 8192))
        monkeypatch.setattr(script, "DECODING", (0, 16, 512))
        monkeypatch.setattr(script, "CONTEXT", (64, 131_072))
        monkeypatch.setattr(script.logging, "disable", lambda level: None)

    def test_writes_and_compares(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert script.main(["--out", str(tmp_path)]) == 0
        report = capsys.readouterr().out
        (tmp_path / "README.md").write_text(f"# Title\n\n{report}")
        assert len(list(tmp_path.glob("*.json"))) == 16
        made = parse_profile((tmp_path / "qwen3-30b-a3b-h200-tp8.json").read_text())
        assert (made.model, made.device, made.tp) == ("Qwen3-30B-A3B", "NVIDIA H200 SXM (tabulated)", 8)
        assert (made.kv_capacity_tokens, made.weight_load_s) == (10**9, 0.85)
        assert script.main(["--out", str(tmp_path), "--check"]) == 0

        (tmp_path / "qwen3-8b-h100-tp1.json").unlink()
        other = tmp_path / "qwen3-8b-h100-tp2.json"
        other.write_text(other.read_text().replace("0.23", "0.24"))
        (tmp_path / "README.md").write_text("# Title\n")
        before = other.read_text()
        capsys.readouterr()
        assert script.main(["--out", str(tmp_path), "--check"]) == 1
        assert capsys.readouterr().out.splitlines()[-3:] == [
            "qwen3-8b-h100-tp1.json: differs from what the source says",
            "qwen3-8b-h100-tp2.json: differs from what the source says",
            "README.md (its table of errors): differs from what the source says",
        ]
        assert other.read_text() == before


def test_without_the_extra() -> None:
    with pytest.raises(SystemExit, match=r"make_iteration_tables: .*; want the extra: pip install '\.\[silicon\]'"):
        script.Source(script.MODELS[0], "h100_sxm", 1)
