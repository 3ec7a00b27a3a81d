"""The `WeightStore` port in shared memory of the host: one safetensors file per version, the newest two kept.

The folder belongs to the driver, so it outlives a restart of the trainer. The driver holds a lock in it; a folder that
nobody holds is removed by the next run on the host. A process id would not do: containers may share the memory and number
their processes each for itself.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from safetensors import safe_open

from pearl.errors import WeightsError
from pearl.file_lock import FileLock
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest
from pearl.units import GIB, format_bytes

KEPT_VERSIONS = 2
_PREFIX = "pearl-weights-"
_LOCK = "lock"


class Exporter(Protocol):
    """The part of a trainer that a store needs."""

    async def weight_bytes(self) -> int:
        """Size of one version."""

    async def export(self, path: Path, version: WeightVersion) -> Manifest:
        """Write the weights to a file."""


class SharedMemoryWeights:
    """Publishes what the trainer holds; `close` removes everything."""

    def __init__(self, trainer: Exporter, budget_gib: float) -> None:
        self._trainer = trainer
        self._budget_bytes = int(budget_gib * GIB)
        root = shared_memory_root()
        remove_stale(root)
        self.folder, self._lock = _locked_folder(root)
        self._kept: list[Manifest] = []

    async def publish(self, version: WeightVersion) -> Manifest:
        """Write the trainer's weights as a version."""
        newest = self._kept[-1].version if self._kept else None
        if newest is not None and version <= newest:
            raise WeightsError(f"weight version: got {version}, want more than {newest}, which is published")
        needed = await self._trainer.weight_bytes() * KEPT_VERSIONS
        if needed > self._budget_bytes:
            raise WeightsError(
                f"weights.host_budget_gib: {KEPT_VERSIONS} versions need {format_bytes(needed)}, "
                f"allowed are {format_bytes(self._budget_bytes)}"
            )
        while len(self._kept) >= KEPT_VERSIONS:
            self._path(self._kept.pop(0).version).unlink(missing_ok=True)
        manifest = await self._trainer.export(self._path(version), version)
        self._kept.append(manifest)
        return manifest

    async def newest(self) -> Manifest | None:
        """The version published last."""
        return self._kept[-1] if self._kept else None

    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        """Raw bytes of some shards."""
        if manifest not in self._kept:
            kept = [one.version for one in self._kept]
            raise WeightsError(f"weight version {manifest.version}: no longer kept; kept are {kept}")
        checksums = {shard.name: shard.checksum for shard in manifest.shards}
        fetched: dict[str, bytes] = {}
        with safe_open(self._path(manifest.version), framework="np") as file:
            for name in names:
                if name not in checksums:
                    raise WeightsError(f"weight version {manifest.version}: no shard {name!r}")
                fetched[name] = file.get_tensor(name).tobytes()
                if f"crc32:{zlib.crc32(fetched[name]):08x}" != checksums[name]:
                    raise WeightsError(f"weight version {manifest.version}: shard {name!r} is damaged")
        return fetched

    def close(self) -> None:
        """Remove every version; harmless when repeated."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
            self._lock = None

    def _path(self, version: WeightVersion) -> Path:
        return self.folder / f"v{version}.safetensors"


def shared_memory_root() -> Path:
    """Where shared memory is mounted; the temporary folder where there is none."""
    root = Path("/dev/shm")  # noqa: S108 - run folders in it have unguessable names and mode 700
    return root if root.is_dir() and os.access(root, os.W_OK) else Path(tempfile.gettempdir())


def _locked_folder(root: Path) -> tuple[Path, FileLock | None]:
    """A new folder in `root`, locked from the moment on that `remove_stale` sees it."""
    unseen = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=root))
    try:
        lock = FileLock.take(unseen / _LOCK)
        return unseen.rename(root / unseen.name.removeprefix(".")), lock
    except BaseException:
        shutil.rmtree(unseen, ignore_errors=True)
        raise


def remove_stale(root: Path) -> None:
    """Remove what runs left behind that could not clean up after themselves: folders that nobody holds."""
    for folder in root.glob(f"{_PREFIX}*"):
        # Another user's, or one that goes away just now: not ours to remove.
        with contextlib.suppress(OSError):
            lock = FileLock.take(folder / _LOCK)
            if lock is not None:
                if lock.is_exclusive:
                    shutil.rmtree(folder, ignore_errors=True)
                lock.close()
