"""Real runs for benchmarks: `pearl train` in a process of its own, with the memory of its whole process tree sampled."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from pearl.units import GIB, MIB

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "demo" / "guess_number.toml"
OBJECT_STORE_MIB = 80
RUN_TIMEOUT_S = 1800


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A run, ended."""

    summary: dict[str, float | int | str | None]
    """`summary.json` of the run folder."""
    steps: list[dict[str, object]]
    """The `steps` stream of its journal."""
    peak_pss_gib: float
    """Largest sum of proportional set sizes over the process tree, plus the whole object store."""

    def total(self, field: str) -> float:
        """Sum of a field over steps."""
        return sum(float(str(step[field])) for step in self.steps)


class MemorySampler(threading.Thread):
    """Samples the process tree of a process each second."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._over = threading.Event()
        self.peak_bytes = 0

    def run(self) -> None:
        while not self._over.wait(1.0):
            with contextlib.suppress(psutil.NoSuchProcess):
                tree = [self._root, *self._root.children(recursive=True)]
                self.peak_bytes = max(self.peak_bytes, sum(map(_pss_bytes, tree)))

    def stop(self) -> None:
        self._over.set()
        self.join()


def _pss_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0


def train(overrides: Sequence[str]) -> RunRecord:
    """Run the demo recipe to its end.

    Raises:
        RuntimeError: it did not end well.
    """
    with _model() as model, tempfile.TemporaryDirectory(prefix="pearl-bench-") as root:
        arguments = [f"model.path={model}", f"run.root={root}", f"cluster.object_store_mib={OBJECT_STORE_MIB}"]
        command = [sys.executable, "-m", "pearl.cli.main", "train", str(RECIPE), *arguments, *overrides]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        sampler = MemorySampler(process.pid)
        sampler.start()
        try:
            output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        finally:
            sampler.stop()
            process.kill()
        if process.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {process.returncode}:\n{output[-3000:]}")
        (folder,) = (path for path in Path(root).iterdir() if path.is_dir())
        lines = (folder / "journal" / "steps.jsonl").read_text().splitlines()[1:]
        return RunRecord(
            summary=json.loads((folder / "summary.json").read_text()),
            steps=[json.loads(line) for line in lines],
            peak_pss_gib=(sampler.peak_bytes + OBJECT_STORE_MIB * MIB) / GIB,
        )


@contextlib.contextmanager
def _model() -> Iterator[Path]:
    """The demo's model, made anew: the same bytes each time."""
    with tempfile.TemporaryDirectory(prefix="pearl-model-") as folder:
        path = Path(folder) / "tiny-qwen3"
        subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "make_tiny_qwen3.py"), "--out", str(path)],
            check=True,
            capture_output=True,
        )
        yield path
