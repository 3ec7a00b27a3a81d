"""The engine in its thread: same tokens as without, order, wake-up, death and close."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.errors import ConfigError, EngineError, ModelError, WeightsError, WorkerLost
from pearl.records.ids import WorkerId
from pearl.records.training import LoadMode
from pearl.records.turn import Chunk, EndReason

GUARD_S = 60.0
CONFIG = EngineConfig(max_sequences=8, max_context_tokens=96, progress_interval_s=0.0)


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, GUARD_S))


async def start(folder: Path, **arguments: Any) -> ThreadedEngine:
    return await ThreadedEngine.create(folder, CONFIG, worker=WorkerId(3), epoch=2, **arguments)


async def read_until(engine: ThreadedEngine, names: set[str], kit: Any, into: dict[str, Any] | None = None) -> Any:
    """Read the stream until these requests have ended."""
    results = {} if into is None else into
    async for chunks in engine.events():
        assert chunks
        kit.collect(chunks, results)
        if names <= {name for name, result in results.items() if result.end is not None}:
            return results
    raise AssertionError("the stream ended early")


def test_same_tokens_as_the_engine_without_a_thread(
    folder: Path, make_engine: Callable[..., EmbeddedEngine], kit: Any
) -> None:
    requests = [kit.request(f"r{i}", kit.tokens(i, 5 + i), seed=i, new=20) for i in range(20)]
    want = kit.generate(make_engine(), *requests)

    async def main() -> None:
        engine = await start(folder)
        info = await engine.info()
        assert (info.epoch, info.max_context_tokens, info.kv_capacity_tokens) == (2, 96, 8 * 96)
        for request in requests:
            await engine.submit([request])
        got = await read_until(engine, {request.id for request in requests}, kit)
        assert {name: result.ids for name, result in got.items()} == {name: r.ids for name, r in want.items()}
        stats = await engine.stats()
        assert (stats.generated_tokens, stats.running, stats.waiting) == (400, 0, 0)
        await engine.close()

    run(main())


def test_an_idle_engine_wakes_up(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder)
        for turn in range(5):
            await asyncio.sleep(0.02)
            assert (await engine.stats()).running == 0
            await engine.submit([kit.request(f"r{turn}", [5], new=2)])
            await read_until(engine, {f"r{turn}"}, kit)
        await engine.close()

    run(main())


def test_interrupt_loses_nothing_and_release_forgets(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder)
        await engine.submit([kit.request("a", kit.tokens(1, 10), trajectory="t", new=80)])
        results: dict[str, Any] = {}
        async for chunks in engine.events():
            kit.collect(chunks, results)
            break
        await engine.interrupt(["a", "nobody"])
        await read_until(engine, {"a"}, kit, results)
        result = results["a"]
        assert result.end in (EndReason.INTERRUPTED, EndReason.LENGTH)
        assert (await engine.stats()).generated_tokens == len(result.ids)
        assert (await engine.stats()).kv_used_tokens > 0
        await engine.release("t")
        assert (await engine.stats()).kv_used_tokens == 0
        await engine.close()

    run(main())


def test_a_refused_request_ends_as_failed(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder)
        await engine.submit([kit.request("a", [5], new=0), kit.request("b", [5])])
        results = await read_until(engine, {"a", "b"}, kit)
        assert results["a"].end is EndReason.FAILED
        assert "worker 3" in results["a"].error
        assert results["b"].end is EndReason.LENGTH
        await engine.close()

    run(main())


def test_an_id_in_use_is_refused_at_once_and_may_be_used_again_later(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder)
        request = kit.request("a", [5], new=60)
        await engine.submit([request])
        with pytest.raises(EngineError, match="request a: this id is in use"):
            await engine.submit([kit.request("new", [5]), request])
        with pytest.raises(EngineError, match="request twice: this id is in use"):
            await engine.submit([kit.request("twice", [5])] * 2)
        await read_until(engine, {"a"}, kit)
        await engine.submit([request])
        await read_until(engine, {"a"}, kit)
        await engine.close()

    run(main())


def test_load_reports_and_refuses(folder: Path, tmp_path: Path, kit: Any) -> None:
    manifest = kit.publish(tmp_path / "v.safetensors", load_file(folder / "model.safetensors"), version=4)
    shards = (dataclasses.replace(manifest.shards[0], checksum="crc32:00000000"), *manifest.shards[1:])

    async def main() -> None:
        engine = await start(folder)
        with pytest.raises(WeightsError, match="checksum"):
            await engine.load(dataclasses.replace(manifest, shards=shards), LoadMode.KEEP_KV)
        assert (await engine.stats()).version == 0
        report = await engine.load(manifest, LoadMode.RECOMPUTE)
        assert (report.version, report.loaded_bytes) == (4, manifest.size_bytes)
        await engine.submit([kit.request("a", [5], new=3, min_version=4)])
        assert (await read_until(engine, {"a"}, kit))["a"].versions == [4, 4, 4]
        await engine.close()

    run(main())


def test_a_slow_reader_gets_everything_in_one_batch(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder)
        await engine.submit([kit.request(f"r{i}", [5], new=10) for i in range(4)])
        while (await engine.stats()).running or (await engine.stats()).generated_tokens < 40:
            await asyncio.sleep(0.01)
        chunks = await anext(engine.events())
        results = kit.collect(chunks)
        assert [len(results[f"r{i}"].ids) for i in range(4)] == [10] * 4
        await engine.close()

    run(main())


# -- start, death, close ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "error"), [(CONFIG, ModelError), (EngineConfig(max_context_tokens=1000), ConfigError)]
)
def test_a_model_that_cannot_be_loaded(folder: Path, tmp_path: Path, config: EngineConfig, error: type) -> None:
    path = tmp_path / "nowhere" if error is ModelError else folder

    async def main() -> None:
        with pytest.raises(error):
            await ThreadedEngine.create(path, config)

    before = threading.active_count()
    run(main())
    for thread in threading.enumerate():
        if thread.name.startswith("pearl-engine"):
            thread.join(GUARD_S)
    assert threading.active_count() == before


class Mortal(EmbeddedEngine):
    """Dies in the third iteration."""

    def step(self) -> bool:
        if self.stats().iterations == 2:
            raise RuntimeError("cosmic ray")
        return super().step()


def test_a_dead_thread_delivers_what_it_has_and_then_raises_everywhere(folder: Path, kit: Any) -> None:
    async def main() -> None:
        engine = await start(folder, make=lambda: Mortal(folder, CONFIG))
        await engine.submit([kit.request("a", [5], new=50)])
        seen: list[Chunk] = []
        with pytest.raises(WorkerLost, match=r"worker 3: the engine's thread died: RuntimeError\('cosmic ray'\)"):
            await _read_all(engine, seen)
        assert len(kit.collect(seen)["a"].ids) == 2
        calls: list[Callable[[], Coroutine[Any, Any, Any]]] = [
            engine.info,
            engine.stats,
            lambda: engine.submit([kit.request("b", [5])]),
            lambda: engine.interrupt(["a"]),
            lambda: engine.release("t"),
            lambda: engine.load(None, LoadMode.KEEP_KV),
            lambda: anext(engine.events()),
        ]
        for call in calls:
            with pytest.raises(WorkerLost, match="cosmic ray"):
                await call()
        await engine.close()

    run(main())


class DiesAnswering(EmbeddedEngine):
    """Dies when it is asked."""

    def stats(self) -> Any:
        raise RuntimeError("bad question")


def test_a_call_that_waits_when_the_thread_dies_raises(folder: Path) -> None:
    async def main() -> None:
        engine = await start(folder, make=lambda: DiesAnswering(folder, CONFIG))
        with pytest.raises(WorkerLost, match="bad question"):
            await engine.stats()
        await engine.close()

    run(main())


def test_close_ends_the_stream_the_thread_and_further_calls(folder: Path, kit: Any) -> None:
    async def main() -> None:
        before = threading.active_count()
        engine = await start(folder)
        await engine.submit([kit.request("a", [5], new=90)])
        reader = asyncio.create_task(_read_all(engine, []))
        await asyncio.sleep(0.01)
        await engine.close()
        await reader
        await engine.close()
        assert threading.active_count() == before
        with pytest.raises(WorkerLost, match="worker 3: the engine was closed"):
            await engine.stats()
        assert [chunks async for chunks in engine.events()] == []

    run(main())


async def _read_all(engine: ThreadedEngine, into: list[Chunk]) -> None:
    async for chunks in engine.events():
        into += chunks


def test_a_process_that_forgets_to_close_still_ends_cleanly(folder: Path) -> None:
    code = f"""
import asyncio
from pathlib import Path
from pearl.config.engine import EngineConfig
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.records.tokens import TokenIds
from pearl.records.turn import Sampling, TurnRequest

async def main():
    engine = await ThreadedEngine.create(Path({str(folder)!r}), EngineConfig())
    await engine.submit([
        TurnRequest(id=f"r{{i}}", trajectory=f"t{{i}}", turn=0, context=TokenIds([5]), sampling=Sampling(seed=i),
                    max_new_tokens=200, min_version=0)
        for i in range(200)
    ])
    await asyncio.sleep(0.1)

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=GUARD_S)
    assert (done.returncode, done.stderr) == (0, "")
