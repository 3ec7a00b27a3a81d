"""The same seed is the same simulated run, byte for byte of its journal, whatever strings hash to; another one is not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TRACE = "time_s,gpus\n0,8\n150,4\n400,8\n700,2\n1000,8\n3000,8\n"
OVERRIDES = (
    *("rollout.groups_per_batch=2", "rollout.group_size=4", "rollout.max_turns=6", "run.steps=3"),
    *("fleet.external_gpus=8", "fleet.tp=[1,2]", "fleet.hybrid=true", "workload.prior=tau", "platform.start_s=20"),
    *("faults.kills_per_h=20", "faults.hangs_per_h=10", "faults.slow_per_h=20", "faults.failed_starts_per_h=10"),
    *(
        "faults.environment_faults_per_h=20",
        "faults.mean_s=60",
        "rollout.max_failed_groups=1000",
        "cluster.max_worker_restarts=1000",
    ),
)
STREAMS = ("changes", "choices", "decisions", "groups", "steps", "trajectories", "turns")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trace") / "trace.csv"
    path.write_text(TRACE)
    return path


def journal(root: Path, trace: Path, *, hash_seed: int, seed: int, policy: str) -> dict[str, bytes]:
    """Stream -> its bytes, of a run in a process of its own."""
    recipe = root / "trace.toml"
    recipe.write_text(_without_random_availability())
    command = [
        *(sys.executable, "-m", "pearl.cli.main", "simulate", str(recipe), *OVERRIDES, *policy.split()),
        *(f"simulation.availability={trace}", f"run.seed={seed}", f"run.root={root / 'runs'}", "--json"),
    ]
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = (root / "runs").iterdir()
    return {path.stem: path.read_bytes() for path in (folder / "journal").iterdir()}


def _without_random_availability() -> str:
    spot = (ROOT / "recipes" / "sim" / "qwen3_8b_spot.toml").read_text()
    kept = [line for line in spot.splitlines() if not line.startswith(("mean_external_gpus", "change_gpus"))]
    assert len(kept) == len(spot.splitlines()) - 2
    return "\n".join(kept)


@pytest.mark.parametrize(
    "policy", ["elastic.policy=borrow_all", "elastic.policy=static elastic.shape=1P2D@tp2"], ids=["borrowing", "PD"]
)
def test_the_same_seed_gives_the_same_journal_in_every_process(tmp_path: Path, trace: Path, policy: str) -> None:
    """GPUs come and go by a trace, training GPUs are borrowed, or KV is handed over; workers and environments fail."""
    runs = []
    for number, (hash_seed, seed) in enumerate(((1, 3), (4242, 3), (1, 4))):
        root = tmp_path / str(number)
        root.mkdir()
        runs.append(journal(root, trace, hash_seed=hash_seed, seed=seed, policy=policy))
    one, again, other = runs
    assert set(one) == set(STREAMS)
    for stream in STREAMS:
        assert one[stream] == again[stream], stream
    assert one["turns"] != other["turns"]
    assert one["trajectories"].count(b"\n") > 24
    # It was about something: workers were lost, and GPUs came and went.
    assert b"WorkerRemoved" in one["decisions"]
    assert b"GpusLeft" in one["decisions"] or b"LeaseBegan" in one["decisions"]
