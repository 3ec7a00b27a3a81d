"""What the hot path itself costs: turns per second when engine, environment and trainer take no time.

The pipeline and the journal on disk are the real ones, on a real event loop in one thread of one process. Engine,
environments and trainer answer at once and keep no books. Absolute times: run it on an idle core.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks._report import Check, report
from pearl.config.recipe import Recipe
from pearl.pipeline.run import RunObserver, RunPorts, RunStart, run
from pearl.ports import EngineInfo, EngineStats, WorkerSpec
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.journal import TurnEntry
from pearl.records.tokens import Floats, TokenIds, Tokens
from pearl.records.training import LoadMode, LoadReport, Manifest, TrainingBatch, TrainReport
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest, Versions
from pearl.report.journal import JournalWriter
from pearl.testing.engine import FakeEngine
from pearl.testing.fleet import FakeFleet
from pearl.testing.mailbox import Mailbox
from pearl.testing.weights import FAKE_MODEL_HASH, FakeWeightStore
from pearl.testing.world import ListCheckpointer, fake_gpus

TURNS = 8
"""Per trajectory, as the demo recipe allows."""
TURN_TOKENS = 16
WORKERS = 2
STOP = 0

PARTS = {
    "router": (
        "pipeline/router.py",
        "pipeline/placement.py",
        "pipeline/seat.py",
        "pipeline/trails.py",
        "pipeline/turns.py",
    ),
    "agent_loop": ("pipeline/agent_loop.py",),
    "groups": ("pipeline/group.py", "pipeline/rollout.py", "core/admission.py", "pipeline/tasks.py"),
    "training_loop": ("pipeline/training_loop.py", "pipeline/batch.py"),
    "guards": ("pipeline/concurrency.py",),
    "records": ("pearl/records/",),
    "journal": ("report/journal.py", "report/lines.py"),
    "asyncio": ("/asyncio/",),
    "null_ports": ("benchmarks/overhead.py", "pearl/testing/"),
}
"""Part of the overhead -> what its files' paths contain; the first that fits counts, built-in functions are `other`."""


class NullEngine(FakeEngine):
    """Answers a request with the same tokens at once and keeps no ledger."""

    def __init__(self, spec: WorkerSpec) -> None:
        super().__init__(worker=spec.worker)
        self._chunks: Mailbox[Chunk] = Mailbox()
        self._serving = WeightVersion(0)
        self._token_ids = TokenIds([*range(1, TURN_TOKENS), STOP])
        self._logprobs = Floats([-1.0] * TURN_TOKENS)
        self._versions = Versions.of([(0, TURN_TOKENS)])

    async def info(self) -> EngineInfo:
        return EngineInfo(model_hash=FAKE_MODEL_HASH, epoch=0, max_context_tokens=1 << 20, kv_capacity_tokens=1 << 30)

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        for request in requests:
            self._chunks.put(
                Chunk(
                    request=request.id,
                    start=len(request.context),
                    token_ids=self._token_ids,
                    logprobs=self._logprobs,
                    versions=self._versions,
                    end=EndReason.STOP,
                )
            )

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        del ids

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        del trajectory, kv

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        del mode
        self._serving = manifest.version
        self._versions = Versions.of([(manifest.version, TURN_TOKENS)])
        return LoadReport(version=manifest.version, load_s=0.0, loaded_bytes=0, recomputed_tokens=0)

    async def stats(self) -> EngineStats:
        return EngineStats(
            version=self._serving,
            running=0,
            waiting=0,
            kv_used_tokens=0,
            generated_tokens=0,
            computed_prompt_tokens=0,
            iterations=0,
            busy_s=0.0,
        )

    async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        while True:
            yield await self._chunks.take()


class NullCodec:
    """Prompts and actions of fixed content."""

    _prompt = TokenIds([1] * 24)
    _between = TokenIds([2] * 12)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (STOP,)

    def first_prompt(self, observation: str) -> TokenIds:
        del observation
        return self._prompt

    def append(self, observation: str, *, closed: bool) -> TokenIds:
        del observation, closed
        return self._between

    def action(self, token_ids: Tokens) -> str:
        del token_ids
        return "act"


class NullEnvironment:
    """Ends at its last turn."""

    _on = EnvironmentReply(observation="obs", reward=0.0, done=False)
    _end = EnvironmentReply(observation="obs", reward=1.0, done=True, success=True)

    def __init__(self) -> None:
        self._turn = 0

    async def reset(self, seed: int) -> str:
        del seed
        return "obs"

    async def step(self, action: str) -> EnvironmentReply:
        del action
        self._turn += 1
        return self._end if self._turn == TURNS else self._on

    async def close(self) -> None:
        return


@dataclass(frozen=True, slots=True)
class NullPool:
    """As many environments as slots, admitted by the pipeline itself."""

    slots: int

    async def open(self, task: Task) -> NullEnvironment:
        del task
        return NullEnvironment()


class NullTrainer:
    """Takes no time to learn nothing."""

    version = WeightVersion(0)
    state = b""

    async def train(self, batch: TrainingBatch) -> TrainReport:
        self.version = WeightVersion(batch.version + 1)
        tokens = sum(len(sample.logprobs) for sample in batch.samples)
        return TrainReport(
            version=self.version, train_s=0.0, samples=len(batch.samples), trained_tokens=tokens, metrics={"loss": 0.0}
        )

    async def lend_gpus(self, gpus: Sequence[str]) -> None: ...

    async def reclaim_gpus(self, gpus: Sequence[str]) -> None: ...

    async def save(self, folder: Path) -> None: ...

    async def restore(self, folder: Path) -> WeightVersion:
        del folder
        return self.version


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run."""

    turns: int
    wall_s: float
    cpu_s: float
    """Of the process, the journal's thread included."""
    turn_bytes: int


def recipe_of(steps: int) -> Recipe:
    """Batches of 16 groups of 8: 128 trajectories, 1,024 turns per step."""
    return Recipe.model_validate(
        {
            "run": {"steps": steps},
            "model": {"path": "null"},
            "environment": {"kind": "null", "slots": 256},
            "rollout": {"groups_per_batch": 16, "group_size": 8, "max_turns": TURNS, "max_context_tokens": 4096},
            "engine": {"shape": f"{WORKERS}C", "max_context_tokens": 4096},
            "sampling": {"max_new_tokens": TURN_TOKENS},
        }
    )


def measure(recipe: Recipe, profile: cProfile.Profile | None = None) -> Measured:
    """Run the pipeline once, journal on disk included."""
    with tempfile.TemporaryDirectory(prefix="pearl-overhead-") as name:
        folder = Path(name)
        journal = JournalWriter(folder)
        trainer = NullTrainer()
        ports = RunPorts(
            fleet=FakeFleet(NullEngine),
            weights=FakeWeightStore(trainer),
            trainer=trainer,  # type: ignore[arg-type]  # lends no GPU
            environments=NullPool(recipe.environment.slots),
            codec=NullCodec(),
            journal=journal,
            checkpointer=ListCheckpointer(),
        )
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        if profile is not None:
            profile.enable()
        result = asyncio.run(run(recipe, ports, RunStart(gpus=fake_gpus(WORKERS)), RunObserver()))
        if profile is not None:
            profile.disable()
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        journal.close()
        if journal.dropped:
            raise RuntimeError(f"journal: entries were dropped: {dict(journal.dropped)}; the writer does not keep up")
        size_bytes = (folder / "turns.jsonl").stat().st_size
        return Measured(turns=result.turns, wall_s=wall_s, cpu_s=cpu_s, turn_bytes=size_bytes)


def journal_us(entries: int) -> float:
    """Microseconds per turn entry, from `write` until it is on disk."""
    entry = TurnEntry(
        at_s=123.456789,
        trajectory="g1234.5",
        turn=3,
        prompt=12,
        generated=TURN_TOKENS,
        computed=28,
        end="stop",
        versions=[[12, TURN_TOKENS]],
        workers=[1],
        generate_s=0.123456,
        env_s=0.012345,
    )
    with tempfile.TemporaryDirectory(prefix="pearl-overhead-") as name:
        journal = JournalWriter(Path(name), capacity=entries)
        began_s = time.perf_counter()
        for _ in range(entries):
            journal.write(entry)
        journal.close()
        return (time.perf_counter() - began_s) / entries * 1e6


def parts_us(recipe: Recipe, us_per_turn: float) -> dict[str, float]:
    """Microseconds per turn by part: shares under the profiler of the time that a turn takes without it."""
    profile = cProfile.Profile()
    measure(recipe, profile)
    seconds = dict.fromkeys((*PARTS, "other"), 0.0)
    for (path, _, _), (_, _, own_s, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        if "select" in path or path.endswith("selectors.py"):
            continue
        found = (part for part, patterns in PARTS.items() if any(pattern in path for pattern in patterns))
        seconds[next(found, "other")] += own_s
    total_s = sum(seconds.values())
    return {part: own_s / total_s * us_per_turn for part, own_s in seconds.items()}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few seconds instead of half a minute")
    quick = parser.parse_args(arguments).quick
    steps, repeats = (4, 2) if quick else (20, 3)
    recipe = recipe_of(steps)
    measure(recipe_of(1))  # imports, allocator, caches
    runs = [measure(recipe) for _ in range(repeats)]
    best = max(runs, key=lambda one: one.turns / one.wall_s)
    checks = [
        Check(name="turns_per_s_null", value=best.turns / best.wall_s, target=">= 2000"),
        Check(name="journal_bytes_per_turn", value=best.turn_bytes / best.turns, target="<= 300"),
        Check(name="us_per_turn", value=best.wall_s / best.turns * 1e6),
        Check(name="cpu_us_per_turn", value=min(one.cpu_s / one.turns for one in runs) * 1e6),
        Check(name="journal_writer_us_per_turn", value=journal_us(4_000 if quick else 40_000)),
    ]
    parts = parts_us(recipe_of(2 if quick else 5), best.wall_s / best.turns * 1e6)
    checks += [Check(name=f"part_{part}_us_per_turn", value=value) for part, value in parts.items()]
    settings = {"quick": quick, "turns": best.turns, "turns_per_trajectory": TURNS, "workers": WORKERS}
    return report("overhead", checks, settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
