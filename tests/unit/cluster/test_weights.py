"""Shared memory of runs that are over is cleared, that of others is not. The store itself: tests/contract/test_real.py."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.cluster import weights
from pearl.cluster.weights import SharedMemoryWeights, remove_stale
from pearl.errors import WeightsError
from pearl.file_lock import FileLock
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest


class Exporter:
    """Must not be asked for anything but a size, 600 MiB."""

    async def weight_bytes(self) -> int:
        return 600 * 2**20

    async def export(self, path: Path, version: WeightVersion) -> Manifest:
        raise AssertionError("must not be asked")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for /dev/shm."""
    monkeypatch.setattr(weights, "shared_memory_root", lambda: tmp_path)
    return tmp_path


def test_only_what_nobody_holds_is_removed(root: Path) -> None:
    live = SharedMemoryWeights(Exporter(), budget_gib=1.0)
    (live.folder / "v1.safetensors").touch()
    for name in ("pearl-weights-dead", "pearl-weights-4194304-dead", "other-dead"):
        (root / name).mkdir()
        (root / name / "v1.safetensors").touch()
    (root / "pearl-weights-dead" / "lock").write_text("1\n")
    (root / "pearl-weights-file").touch()
    remove_stale(root)
    assert {path.name for path in root.iterdir()} == {live.folder.name, "other-dead", "pearl-weights-file"}
    assert sorted(path.name for path in live.folder.iterdir()) == ["lock", "v1.safetensors"]
    live.close()


def test_runs_do_not_remove_each_other_whatever_their_process_ids(root: Path) -> None:
    # Another container's process: here there is none of its number.
    stores = [SharedMemoryWeights(Exporter(), budget_gib=1.0) for _ in range(2)]
    for store in stores:
        (store.folder / "lock").write_text("4194304\n")
    remove_stale(root)
    assert sorted(root.iterdir()) == sorted(store.folder for store in stores)
    for store in stores:
        store.close()
        store.close()
    assert list(root.iterdir()) == []


def test_what_a_killed_run_left_is_removed(root: Path) -> None:
    code = (
        "import sys, pathlib; from pearl.cluster import weights; "
        "weights.shared_memory_root = lambda: pathlib.Path(sys.argv[1]); "
        "store = weights.SharedMemoryWeights(None, 1.0); print('held', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(root)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        remove_stale(root)
        assert len(list(root.iterdir())) == 1
        other.kill()
        other.communicate()
    remove_stale(root)
    assert list(root.iterdir()) == []


def test_where_nothing_can_be_locked_nothing_is_removed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    store = SharedMemoryWeights(Exporter(), budget_gib=1.0)
    remove_stale(root)
    assert store.folder.is_dir()
    store.close()
    assert list(root.iterdir()) == []


def test_a_folder_is_never_seen_without_its_lock(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FileLock.take

    def take(path: Path) -> FileLock | None:
        # Another run looks around at the worst moment.
        monkeypatch.setattr(FileLock, "take", real)
        remove_stale(root)
        assert path.parent.is_dir()
        return real(path)

    monkeypatch.setattr(FileLock, "take", take)
    store = SharedMemoryWeights(Exporter(), budget_gib=1.0)
    remove_stale(root)
    assert store.folder.is_dir()
    store.close()


def test_a_version_that_does_not_fit_the_budget_is_refused(root: Path) -> None:
    store = SharedMemoryWeights(Exporter(), budget_gib=1.0)
    with pytest.raises(WeightsError, match=r"host_budget_gib: 2 versions need 1.2 GiB, allowed are 1.0 GiB"):
        asyncio.run(store.publish(WeightVersion(0)))
    store.close()
    assert list(root.iterdir()) == []
