"""The trainer's process, and its client: the `Trainer` port on Ray."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import ray

from pearl.cluster.calls import answer, end_actor, start_actor
from pearl.config.recipe import Recipe
from pearl.env.bounded import BoundedGames
from pearl.env.codec import codec_of
from pearl.env.registry import player_factory
from pearl.errors import EnvironmentFault, RunFailed, WorkerLost
from pearl.records.ids import GpuId, WeightVersion
from pearl.records.training import LendReport, Manifest, TrainingBatch, TrainReport
from pearl.train.trainer import GrpoTrainer
from pearl.train.warmup import PlayLimits, WarmupReport, warm_up


class TrainerActor:
    """Runs in the trainer's process."""

    def __init__(self, recipe: Recipe, ledger: str) -> None:
        self._recipe = recipe
        self._ledger = Path(ledger)

    def start(self) -> int:
        """Load the model; returns the process id."""
        recipe = self._recipe
        self._trainer = GrpoTrainer(
            recipe.model.path,
            recipe.train,
            seed=recipe.run.seed,
            total_steps=recipe.run.steps,
            temperature=recipe.sampling.temperature,
        )
        return os.getpid()

    def warm_up(self) -> WarmupReport:
        """Supervised steps on scripted play; the user's code runs in this process, each call within rollout's bounds."""
        recipe = self._recipe
        kind, rollout = recipe.environment.kind, recipe.rollout
        games = BoundedGames(
            kind,
            recipe.environment.params,
            player_factory(kind, recipe.warmup.player),
            reset_timeout_s=rollout.env_reset_timeout_s,
            step_timeout_s=rollout.env_step_timeout_s,
        )
        try:
            return warm_up(
                self._trainer,
                recipe.warmup,
                codec_of(recipe),
                games.game,
                games.player,
                limits=PlayLimits(max_turns=rollout.max_turns, max_context_tokens=rollout.max_context_tokens),
                seed=recipe.run.seed,
                play=games.work,
            )
        except EnvironmentFault as error:
            raise RunFailed(f"warm-up: {error}") from error

    def train(self, batch: TrainingBatch) -> TrainReport:
        """One training step, noted in the ledger when it is done."""
        report = self._trainer.train(batch)
        with self._ledger.open("a") as file:
            file.write(_ledger_line(batch, report))
        return report

    def export(self, path: str, version: int) -> Manifest:
        """Write the weights."""
        return self._trainer.export(Path(path), WeightVersion(version))

    def weight_bytes(self) -> int:
        """Size of one version."""
        parameters = self._trainer.model.parameters.values()
        return sum(parameter.numel() * parameter.element_size() for parameter in parameters)

    def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Move training state off GPUs."""
        return self._trainer.lend_gpus(gpus)

    def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Move it back."""
        return self._trainer.reclaim_gpus(gpus)

    def save(self, folder: str) -> None:
        """Write trainer state."""
        self._trainer.save(Path(folder))

    def restore(self, folder: str) -> WeightVersion:
        """Read trainer state."""
        return self._trainer.restore(Path(folder))


def _ledger_line(batch: TrainingBatch, report: TrainReport) -> str:
    """What a step has consumed: per sample its trajectory, trained tokens and the checksum of its token ids."""
    samples = [
        [sample.trajectory, len(sample.logprobs), f"{zlib.crc32(sample.ids.array.tobytes()):08x}"]
        for sample in batch.samples
    ]
    return json.dumps({"version": report.version, "samples": samples}, separators=(",", ":")) + "\n"


class RayTrainer:
    """The trainer in another process; its death ends the run, which can be resumed from the last checkpoint."""

    def __init__(self, actor: Any) -> None:
        """`actor`: a handle of a `TrainerActor`."""
        self._actor = actor
        self.pid = 0

    @classmethod
    def spawn(cls, recipe: Recipe, ledger: Path) -> Self:
        """Begin a process for the trainer of a recipe."""
        actor = ray.remote(num_cpus=0, max_restarts=0)(TrainerActor)
        return cls(actor.remote(recipe, str(ledger.absolute())))

    async def start(self, timeout_s: float) -> None:
        """Load the model.

        Raises:
            RunFailed: it is not up within `timeout_s`.
            UserError: the model cannot be used.
        """
        try:
            self.pid = await start_actor(self._actor, "trainer", timeout_s)
        except WorkerLost as error:
            raise RunFailed(f"{error} (cluster.start_timeout_s)") from error

    async def warm_up(self) -> WarmupReport:
        """Supervised steps on scripted play."""
        report: WarmupReport = await self._call("warm_up")
        return report

    async def train(self, batch: TrainingBatch) -> TrainReport:
        """One training step."""
        report: TrainReport = await self._call("train", batch)
        return report

    async def export(self, path: Path, version: WeightVersion) -> Manifest:
        """Write the weights to a file."""
        manifest: Manifest = await self._call("export", str(path), version)
        return manifest

    async def weight_bytes(self) -> int:
        """Size of one version."""
        size_bytes: int = await self._call("weight_bytes")
        return size_bytes

    async def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Move training state off GPUs."""
        report: LendReport = await self._call("lend_gpus", list(gpus))
        return report

    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Move it back."""
        report: LendReport = await self._call("reclaim_gpus", list(gpus))
        return report

    async def save(self, folder: Path) -> None:
        """Write trainer state."""
        await self._call("save", str(folder))

    async def restore(self, folder: Path) -> WeightVersion:
        """Read trainer state."""
        version: WeightVersion = await self._call("restore", str(folder))
        return version

    def stop(self) -> None:
        """End the process."""
        end_actor(self._actor)

    async def _call(self, method: str, *arguments: Any) -> Any:
        try:
            return await answer(getattr(self._actor, method).remote(*arguments), "trainer")
        except WorkerLost as error:
            raise RunFailed(f"{error}; resume the run with `pearl train --resume RUN`") from error
