"""A simulated trainer: updates take what their tokens take, and a ledger says what was trained.

Law of time: `step_s + gpu_s_per_token * tokens / gpus`, tokens being all that go through the forward pass (prompts and
outputs). Its "weights" are a digest of everything it consumed, so equal histories give equal steps, and loans change nothing.
Checkpoints are kept in memory, under their folders' names.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pearl.errors import CheckpointError, TrainingError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.training import LendReport, TrainingBatch, TrainingSample, TrainReport

PAPER_STEP_S = 163.8
"""One training step of Qwen3-8B. Source: the paper, §3, Fig. 2a; batch and tokens are not stated."""
PAPER_STEP_GPUS = 8
"""On which it was measured. Source: as `PAPER_STEP_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainTimes:
    """What training takes."""

    gpus: int
    """>= 1, that share an update."""
    gpu_s_per_token: float
    """>= 0."""
    step_s: float = 0.0
    """Of every step, whatever its batch; >= 0."""
    lend_s: float = 0.0
    """Moving training state off lent GPUs; >= 0."""
    reclaim_s: float = 0.0
    """Bringing it back; >= 0."""
    lent_bytes_per_gpu: int = 0
    """Device memory that a loan frees; >= 0."""

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ValueError(f"trainer: gpus: got {self.gpus}, want >= 1")
        for name in ("gpu_s_per_token", "step_s", "lend_s", "reclaim_s", "lent_bytes_per_gpu"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ValueError(f"trainer: {name}: got {value}, want a finite number >= 0")

    def seconds(self, tokens: int) -> float:
        """Of a step over so many tokens."""
        return self.step_s + self.gpu_s_per_token * tokens / self.gpus


def gpu_s_per_token(step_s: float, gpus: int, tokens: float) -> float:
    """The rate by which a step of so many tokens takes so long on so many GPUs.

    With `PAPER_STEP_S` and `PAPER_STEP_GPUS` the tokens are an assumption: those of a mean batch of the workload.
    """
    if not (step_s >= 0 and gpus >= 1 and tokens > 0):
        raise ValueError(f"trainer: got a step of {step_s} s on {gpus} GPUs over {tokens} tokens, want >= 0, >= 1, > 0")
    return step_s * gpus / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One sample that went into a training step."""

    step: int
    """Version at consumption."""
    trajectory: TrajectoryId
    group: GroupId
    trained: tuple[tuple[int, int], ...]
    """Half-open token ranges, as in `TrainingSample.trained`."""
    oldest: int | None
    """The oldest weights among its tokens; None without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    model: str
    version: WeightVersion
    state: bytes
    consumed: tuple[Consumed, ...]


class SimCheckpoints:
    """Folders that were saved to; trainers that share it read each other's."""

    def __init__(self) -> None:
        self._saved: dict[Path, _Saved] = {}

    def put(self, folder: Path, saved: _Saved) -> None:
        """Replace what a folder has."""
        self._saved[folder] = saved

    def get(self, folder: Path) -> _Saved | None:
        """What a folder has."""
        return self._saved.get(folder)


class SimTrainer:
    """A `Trainer` whose updates only take time."""

    def __init__(
        self,
        times: TrainTimes,
        *,
        model: str = "simulated",
        version: int = 0,
        checkpoints: SimCheckpoints | None = None,
    ) -> None:
        self.times = times
        self.version = WeightVersion(version)
        self.consumed: list[Consumed] = []
        """In order of training."""
        self.busy_s = 0.0
        """Spent in steps that ended."""
        self.lent: dict[GpuId, None] = {}
        """GPUs that rollout has, in order of lending."""
        self.loans: list[tuple[float, str, tuple[GpuId, ...]]] = []
        """`(end at, "lend" | "reclaim", GPUs)`, in order."""
        self._model = model
        self._state = hashlib.blake2b(model.encode(), digest_size=8).digest()
        self._checkpoints = checkpoints or SimCheckpoints()
        self._failures: list[Exception] = []
        self._training = False

    async def train(self, batch: TrainingBatch) -> TrainReport:
        """One training step, after the time that it takes."""
        self._check(batch)
        train_s = self.times.seconds(sum(len(sample.token_ids) for sample in batch.samples))
        self._training = True
        try:
            await asyncio.sleep(train_s)
        finally:
            self._training = False
        if self._failures:
            raise self._failures.pop(0)
        digest = hashlib.blake2b(self._state, digest_size=8)
        for sample in batch.samples:
            digest.update(_fingerprint(sample))
            self.consumed.append(
                Consumed(
                    step=batch.version,
                    trajectory=sample.trajectory,
                    group=sample.group,
                    trained=sample.trained,
                    oldest=sample.versions.oldest,
                )
            )
        self._state = digest.digest()
        self.version = WeightVersion(self.version + 1)
        self.busy_s += train_s
        return TrainReport(
            version=self.version,
            train_s=train_s,
            samples=len(batch.samples),
            trained_tokens=sum(len(sample.logprobs) for sample in batch.samples),
            metrics={
                "loss": int.from_bytes(self._state, "big") / 2**64,
                "reward": sum(sample.reward for sample in batch.samples) / max(len(batch.samples), 1),
            },
        )

    async def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Hand GPUs to rollout; the trainer does not train until they are back."""
        again = [gpu for gpu in gpus if gpu in self.lent]
        if self._training or again or len(set(gpus)) != len(gpus):
            what = "a training step is under way" if self._training else f"{again or 'some'} twice"
            raise TrainingError(f"trainer: lend of {list(gpus)}: {what}")
        # Taken at once: nothing may train, or lend them again, while their state moves.
        self.lent.update(dict.fromkeys(gpus))
        await asyncio.sleep(self.times.lend_s)
        return self._loan("lend", gpus, self.times.lend_s)

    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Take GPUs back."""
        missing = [gpu for gpu in gpus if gpu not in self.lent]
        if missing:
            raise TrainingError(f"trainer: reclaim: got {missing}, want GPUs that are lent: {list(self.lent)}")
        await asyncio.sleep(self.times.reclaim_s)
        for gpu in gpus:
            self.lent.pop(gpu, None)
        return self._loan("reclaim", gpus, self.times.reclaim_s)

    async def save(self, folder: Path) -> None:
        """Keep the state."""
        saved = _Saved(model=self._model, version=self.version, state=self._state, consumed=tuple(self.consumed))
        self._checkpoints.put(folder, saved)

    async def restore(self, folder: Path) -> WeightVersion:
        """Go back to a state, its ledger included."""
        saved = self._checkpoints.get(folder)
        if saved is None:
            raise CheckpointError(f"{folder}: no simulated checkpoint was saved there; choose another")
        if saved.model != self._model:
            raise CheckpointError(f"{folder}: got model {saved.model}, want {self._model}")
        self.version, self._state, self.consumed = saved.version, saved.state, list(saved.consumed)
        return saved.version

    def fail_next(self, error: Exception | None = None) -> None:
        """Make the next training step raise at its end; each call adds one failure."""
        self._failures.append(error or TrainingError("trainer: made to fail"))

    def trained_twice(self) -> tuple[TrajectoryId, ...]:
        """Trajectories of which a token was trained more than once, in order; there must be none."""
        spans: dict[TrajectoryId, list[tuple[int, int]]] = {}
        for entry in self.consumed:
            spans.setdefault(entry.trajectory, []).extend(entry.trained)
        return tuple(
            trajectory
            for trajectory, found in spans.items()
            if any(stop > start for (_, stop), (start, _) in pairwise(sorted(found)))
        )

    @property
    def staleness_max(self) -> int:
        """Versions between the oldest token of any sample and the step that trained it; 0 before the first."""
        return max((entry.step - entry.oldest for entry in self.consumed if entry.oldest is not None), default=0)

    def _loan(self, what: str, gpus: Sequence[GpuId], seconds: float) -> LendReport:
        self.loans.append((asyncio.get_running_loop().time(), what, tuple(gpus)))
        return LendReport(seconds=seconds, freed_bytes=self.times.lent_bytes_per_gpu * len(gpus))

    def _check(self, batch: TrainingBatch) -> None:
        if batch.version != self.version:
            raise TrainingError(f"trainer: got a batch for version {batch.version}, want {self.version}")
        if self._training:
            raise TrainingError("trainer: a training step is under way, want one at a time")
        if self.lent:
            raise TrainingError(f"trainer: GPUs {list(self.lent)} are lent; reclaim them before training")
        for sample in batch.samples:
            trained = sum(stop - start for start, stop in sample.trained)
            if not trained == len(sample.logprobs) == len(sample.versions):
                raise TrainingError(
                    f"trainer: sample {sample.trajectory}: got {trained} trained tokens, {len(sample.logprobs)} "
                    f"log-probabilities and {len(sample.versions)} versions, want as many of each"
                )


def _fingerprint(sample: TrainingSample) -> bytes:
    counts = f"{len(sample.token_ids)}|{sample.trained}|{sample.versions.runs}|{sample.reward}"
    return f"{sample.trajectory}|{sample.group}|{counts}\n".encode()
