"""The engine in its thread keeps the contract of the `Engine` port."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.records.ids import WorkerId
from pearl.records.training import Manifest
from pearl.records.turn import KvHandle
from pearl.testing.contracts.engine import EngineContract, EngineSubject


def _die(_: EmbeddedEngine) -> None:
    raise RuntimeError("killed by the test")


class TestThreadedEngine(EngineContract):
    long_tokens = 300
    logprob_tolerance = 1e-5

    @pytest.fixture(autouse=True)
    def _model(self, folder: Path, tmp_path: Path, kit: Any) -> None:
        self.folder, self.scratch, self.kit = folder, tmp_path, kit

    @asynccontextmanager
    async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
        config = EngineConfig(max_sequences=16, max_context_tokens=512, progress_interval_s=0.001)
        engines = [await ThreadedEngine.create(self.folder, config, worker=WorkerId(i)) for i in range(count)]
        try:
            yield [self._subject(engine) for engine in engines]
        finally:
            for engine in engines:
                await engine.close()

    def _subject(self, engine: ThreadedEngine) -> EngineSubject:
        async def manifest(version: int) -> Manifest:
            tensors = load_file(self.folder / "model.safetensors")
            return self.kit.publish(self.scratch / f"{version}.safetensors", tensors, version=version)

        async def foreign(version: int) -> Manifest:
            return dataclasses.replace(await manifest(version), model_hash="0123456789abcdef")

        async def kill() -> None:
            engine._commands.put(_die)
            await engine._ended

        def foreign_handle(handle: KvHandle) -> KvHandle:
            return dataclasses.replace(
                handle, payload=dataclasses.replace(handle.payload, model_hash="0123456789abcdef")
            )

        return EngineSubject(
            engine=engine,
            vocab=self.kit.vocabulary,
            manifest=manifest,
            foreign_manifest=foreign,
            kill=kill,
            sleep=engine.sleep,
            wake=engine.wake,
            foreign_handle=foreign_handle,
        )
