"""The compiled loops, each against a few lines of numpy in float64; and a machine on which nothing can be kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest

from pearl.engine.embedded import kernels

HEADS, KV_HEADS, WIDTH, SLOTS, POSITIONS = 4, 2, 6, 3, 9
EPSILON = np.float32(1e-3)


def numbers(*shape: int) -> kernels.Floats:
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def normed(rows: Any) -> Any:
    exact = rows.astype(np.float64)
    return exact / np.sqrt((exact**2).mean(-1, keepdims=True) + float(EPSILON))


def test_norm() -> None:
    rows, out = numbers(5, 7), np.empty((5, 7), dtype=np.float32)

    kernels.norm(rows, EPSILON, out)

    np.testing.assert_allclose(out, normed(rows), rtol=1e-6)


@pytest.mark.parametrize("has_gains", [True, False])
def test_turn(has_gains: bool) -> None:
    """As complex numbers: a pair of neighbours times a number of length one."""
    heads, gains = numbers(2, HEADS + 2 * KV_HEADS, WIDTH), numbers(HEADS + KV_HEADS, WIDTH)
    angles = np.random.default_rng(0).uniform(0, 6, (POSITIONS, WIDTH // 2))
    rotation = np.stack((np.cos(angles), np.sin(angles)), -1).astype(np.float32)
    slots, positions = np.array([2, 0]), np.array([4, 8])
    blocks = np.zeros((2, SLOTS, KV_HEADS, POSITIONS, WIDTH), dtype=np.float32)
    given = heads.copy()

    kernels.turn(
        heads,
        gains if has_gains else gains[:0],
        rotation,
        slots,
        positions,
        blocks,
        HEADS,
        EPSILON,
        np.empty(WIDTH, dtype=np.float32),
    )

    split = HEADS + KV_HEADS
    before = normed(given[:, :split]) * gains if has_gains else given[:, :split].astype(np.float64)
    pairs = before.reshape(2, split, -1, 2) @ [1, 1j] * np.exp(1j * angles[positions])[:, None]
    np.testing.assert_allclose(heads[:, :split].reshape(2, split, -1, 2) @ [1, 1j], pairs, rtol=0, atol=1e-5)
    for token, (slot, position) in enumerate(zip(slots, positions, strict=True)):
        np.testing.assert_array_equal(blocks[0, slot, :, position], heads[token, HEADS:split])
        np.testing.assert_array_equal(blocks[1, slot, :, position], given[token, split:])
        blocks[:, slot, :, position] = 0
    assert not blocks.any(), "something else was written to"


@pytest.fixture
def scene() -> dict[str, Any]:
    return {
        "heads": 3 * numbers(3, HEADS + 2 * KV_HEADS, WIDTH),
        "slots": np.array([2, 0, 1]),
        "positions": np.array([0, 8, 3]),
        "blocks": numbers(2, SLOTS, KV_HEADS, POSITIONS, WIDTH),
        "out": np.full((3, HEADS * WIDTH), 7, dtype=np.float32),
        "scores": np.empty((HEADS // KV_HEADS, POSITIONS), dtype=np.float32),
    }


def attend(scene: dict[str, Any], count: int) -> kernels.Floats:
    kernels.attend(
        scene["heads"],
        scene["slots"],
        scene["positions"],
        count,
        scene["blocks"],
        HEADS,
        scene["out"],
        scene["scores"],
    )
    out: kernels.Floats = scene["out"]
    return out


def test_attend(scene: dict[str, Any]) -> None:
    """Positions behind a token's own are not looked at, nor tokens behind the count."""
    scene["blocks"][:, 1, :, 4:] = np.nan
    scene["slots"][1] = 1
    scene["positions"][1] = 3

    out = attend(scene, 2)

    for token in range(2):
        slot, reach = scene["slots"][token], scene["positions"][token] + 1
        for head in range(HEADS):
            keys, values = scene["blocks"][:, slot, head // 2, :reach].astype(np.float64)
            odds = np.exp(keys @ scene["heads"][token, head])
            want = odds @ values / odds.sum()
            np.testing.assert_allclose(out[token, head * WIDTH : (head + 1) * WIDTH], want, rtol=1e-4, atol=1e-5)
    assert (out[2] == 7).all()


def test_large_scores_do_not_overflow_and_nan_stays_nan(scene: dict[str, Any]) -> None:
    scene["heads"][:, :HEADS] *= 1e4
    assert np.isfinite(attend(scene, 3)).all()
    scene["blocks"][0, 0, 1, 5] = np.nan
    out = attend(scene, 3)
    assert np.isnan(out[1, 2 * WIDTH :]).all()
    assert np.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize(
    "fault", [RuntimeError("no locator"), OSError(28, "No space left"), EOFError("Ran out of input")]
)
def test_where_nothing_can_be_kept_it_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    njit = numba.njit

    def nowhere(*arguments: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise fault
        return njit(*arguments, **options)

    monkeypatch.setattr(numba, "njit", nowhere)

    @kernels._compiled("void(f4[::1])")
    def double(row: kernels.Floats) -> None:
        for i in range(len(row)):
            row[i] *= 2

    row = np.ones(2, dtype=np.float32)
    double(row)
    assert row.tolist() == [2, 2]


@pytest.mark.parametrize("keep", [0, 100])
def test_damaged_files_are_not_used(tmp_path: Path, keep: int) -> None:
    """In processes of their own, as engines are; the loops must work, whatever is found."""
    work = (
        "import numpy as np; from pearl.engine.embedded import kernels; out = np.ones(3, dtype=np.float32);"
        "kernels.softmax(out); print(out.sum())"
    )

    def engine() -> str:
        done = subprocess.run(
            [sys.executable, "-c", work],
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert engine() == "1.0"
    files = list(tmp_path.rglob("*.nb?"))
    assert len(files) >= 8
    for path in files:
        path.write_bytes(path.read_bytes()[:keep])
    assert engine() == "1.0"
