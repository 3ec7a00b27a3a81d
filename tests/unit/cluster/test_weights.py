"""Shared memory of runs that are over is cleared, that of others is not. The store itself: tests/contract/test_real.py."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.cluster import weights
from pearl.cluster.weights import SharedMemoryWeights, remove_stale
from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest


def test_only_what_dead_runs_left_is_removed(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    names = [
        f"pearl-weights-{dead.pid}-a1",
        f"pearl-weights-{os.getpid()}-b2",
        "pearl-weights-x-c3",
        f"other-{dead.pid}",
    ]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "v1.safetensors").write_text("x")
    remove_stale(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])


def test_a_version_that_does_not_fit_the_budget_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Exporter:
        async def weight_bytes(self) -> int:
            return 600 * 2**20

        async def export(self, path: Path, version: WeightVersion) -> Manifest:
            raise AssertionError("must not be asked")

    monkeypatch.setattr(weights, "shared_memory_root", lambda: tmp_path)
    store = SharedMemoryWeights(Exporter(), budget_gib=1.0)
    with pytest.raises(WeightsError, match=r"host_budget_gib: 2 versions need 1.2 GiB, allowed are 1.0 GiB"):
        asyncio.run(store.publish(WeightVersion(0)))
    store.close()
    assert list(tmp_path.iterdir()) == []
