"""A fake trainer: its "weights" are a digest of everything that it consumed, so equal histories give equal states."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pearl.errors import CheckpointError, TrainingError
from pearl.records.ids import GpuId, GroupId, TrajectoryId, WeightVersion
from pearl.records.training import LendReport, TrainingBatch, TrainingSample, TrainReport
from pearl.testing.weights import FAKE_MODEL_HASH

_FILE = "fake_trainer.json"
_FREED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Consumed:
    """One sample that went into a training step."""

    step: int
    """Version at consumption."""
    trajectory: TrajectoryId
    group: GroupId
    trained: tuple[tuple[int, int], ...]
    """Half-open token ranges, as in `TrainingSample.trained`."""
    versions: tuple[tuple[int, int], ...]
    """`(version, tokens)` runs of the trained tokens."""
    reward: float


class FakeTrainer:
    """A `Trainer` in this process, with a ledger of what it consumed."""

    def __init__(
        self,
        train_s: float | Callable[[TrainingBatch], float] = 0.0,
        *,
        version: int = 0,
        lend_s: float = 0.0,
    ) -> None:
        self._train_s = train_s
        self._lend_s = lend_s
        self._failures: list[Exception] = []
        self._training = False
        self.version = WeightVersion(version)
        self.state = hashlib.blake2b(FAKE_MODEL_HASH.encode(), digest_size=8).digest()
        """The "weights": changes with each step."""
        self.consumed: list[Consumed] = []
        self.batches: list[TrainingBatch] = []
        """In order of training; a restored trainer begins with none."""
        self.lent: set[GpuId] = set()
        self.loans: list[tuple[str, tuple[GpuId, ...]]] = []
        """`("lend" | "reclaim", gpus)` in order."""

    async def train(self, batch: TrainingBatch) -> TrainReport:
        """One training step."""
        self._check(batch)
        train_s = self._train_s(batch) if callable(self._train_s) else self._train_s
        self._training = True
        try:
            await asyncio.sleep(train_s)
        finally:
            self._training = False
        if self._failures:
            raise self._failures.pop(0)
        digest = hashlib.blake2b(self.state, digest_size=8)
        for sample in batch.samples:
            digest.update(_fingerprint(sample))
            self.consumed.append(
                Consumed(
                    step=batch.version,
                    trajectory=sample.trajectory,
                    group=sample.group,
                    trained=sample.trained,
                    versions=tuple((run.version, run.tokens) for run in sample.versions.runs),
                    reward=sample.reward,
                )
            )
        self.batches.append(batch)
        self.state = digest.digest()
        self.version = WeightVersion(self.version + 1)
        rewards = [sample.reward for sample in batch.samples]
        return TrainReport(
            version=self.version,
            train_s=train_s,
            samples=len(batch.samples),
            trained_tokens=sum(len(sample.logprobs) for sample in batch.samples),
            metrics={
                "loss": int.from_bytes(self.state, "big") / 2**64,
                "reward": sum(rewards) / max(len(rewards), 1),
            },
        )

    async def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Hand GPUs to rollout; the trainer does not train until they are back."""
        if self._training or (again := self.lent.intersection(gpus)):
            what = "a training step is under way" if self._training else f"{sorted(again)} are lent already"
            raise TrainingError(f"trainer: lend of {list(gpus)}: {what}")
        await asyncio.sleep(self._lend_s)
        self.lent.update(gpus)
        self.loans.append(("lend", tuple(gpus)))
        return LendReport(seconds=self._lend_s, freed_bytes=_FREED_BYTES * len(gpus))

    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Take GPUs back."""
        if missing := set(gpus) - self.lent:
            raise TrainingError(
                f"trainer: reclaim: got {sorted(missing)}, want GPUs that are lent: {sorted(self.lent)}"
            )
        await asyncio.sleep(self._lend_s)
        self.lent.difference_update(gpus)
        self.loans.append(("reclaim", tuple(gpus)))
        return LendReport(seconds=self._lend_s, freed_bytes=_FREED_BYTES * len(gpus))

    async def save(self, folder: Path) -> None:
        """Write the state as JSON, atomically."""
        content = {
            "model_hash": FAKE_MODEL_HASH,
            "version": self.version,
            "state": self.state.hex(),
            "consumed": [asdict(entry) for entry in self.consumed],
        }
        _write(folder / _FILE, json.dumps(content))

    async def restore(self, folder: Path) -> WeightVersion:
        """Read the state back, its ledger included."""
        path = folder / _FILE
        try:
            content = json.loads(_read(path))
            if content["model_hash"] != FAKE_MODEL_HASH:
                raise CheckpointError(f"{path}: got model {content['model_hash']}, want {FAKE_MODEL_HASH}")
            version, state = WeightVersion(int(content["version"])), bytes.fromhex(content["state"])
            consumed = [_consumed(entry) for entry in content["consumed"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path}: not a checkpoint of the fake trainer ({error!r}); choose another"
            ) from error
        self.version, self.state, self.consumed, self.batches = version, state, consumed, []
        return version

    def fail_next(self, error: Exception | None = None) -> None:
        """Make the next training step raise; each call adds one failure."""
        self._failures.append(error or TrainingError("trainer: made to fail"))

    def _check(self, batch: TrainingBatch) -> None:
        if batch.version != self.version:
            raise TrainingError(f"trainer: got a batch for version {batch.version}, want {self.version}")
        if self.lent:
            raise TrainingError(f"trainer: GPUs {sorted(self.lent)} are lent; reclaim them before training")
        for sample in batch.samples:
            where = f"trainer: sample {sample.trajectory}"
            trained = sum(stop - start for start, stop in sample.trained)
            if not trained == len(sample.logprobs) == len(sample.versions):
                raise TrainingError(
                    f"{where}: got {trained} trained tokens, {len(sample.logprobs)} log-probabilities and "
                    f"{len(sample.versions)} versions, want as many of each"
                )
            edges = [edge for span in sample.trained for edge in span]
            if edges != sorted(edges) or (edges and not 0 <= edges[0] <= edges[-1] <= len(sample.token_ids)):
                raise TrainingError(
                    f"{where}: got ranges {sample.trained}, want ascending within {len(sample.token_ids)}"
                )


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _fingerprint(sample: TrainingSample) -> bytes:
    ids = sample.ids.array.tobytes() + sample.logprobs.array.tobytes()
    return f"{sample.trajectory}|{sample.group}|{sample.trained}|{sample.versions}|{sample.reward}|".encode() + ids


def _consumed(entry: dict[str, object]) -> Consumed:
    def pairs(value: object) -> tuple[tuple[int, int], ...]:
        if not isinstance(value, list):
            raise TypeError(f"got {value!r}, want a list of pairs")
        return tuple((int(first), int(second)) for first, second in value)

    return Consumed(
        step=int(str(entry["step"])),
        trajectory=TrajectoryId(str(entry["trajectory"])),
        group=GroupId(str(entry["group"])),
        trained=pairs(entry["trained"]),
        versions=pairs(entry["versions"]),
        reward=float(str(entry["reward"])),
    )
