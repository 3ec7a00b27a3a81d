"""Ten minutes of everything at once: conversations, interruptions, loads, role changes. Memory, handles and slots stay flat.

`PEARL_SOAK_S` makes it shorter or longer.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from safetensors.torch import load_file

from pearl.config.engine import EngineConfig
from pearl.core.state import Role
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.pipeline.turns import TurnJob
from pearl.records.ids import TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, Sampling
from pearl.units import MIB
from tests.models import make_folder, publish, tokens

SOAK_S = float(os.environ.get("PEARL_SOAK_S", "600"))
WORKERS, CONVERSATIONS = 3, 24
GROWTH_MIB = 24
"""Of the process over the last three quarters: what the C library's heap moves by, no more than a few conversations' KV."""
ENGINE = EngineConfig(
    max_sequences=12,
    max_context_tokens=384,
    kv_budget_tokens=20 * 384,
    prefill_chunk_tokens=48,
    progress_interval_s=0.005,
)


@dataclass
class Held:
    """What three engines and their router hold."""

    rss_mib: float
    handles: int
    slots: int
    running: int
    trails: int


@dataclass
class Soak:
    engines: Sequence[ThreadedEngine]
    router: Router
    rng: random.Random
    folder: Path
    scratch: Path
    samples: list[Held] = field(default_factory=list)
    turns: int = 0
    cancelled: int = 0
    changes: int = 0
    loads: int = 0

    async def hold(self) -> Held:
        """Count, inside the engines' own threads."""
        counts = [await engine._ask(_count) for engine in self.engines]
        handles, slots, running = (sum(column) for column in zip(*counts, strict=True))
        rss_mib = psutil.Process().memory_info().rss / MIB
        return Held(rss_mib, handles, slots, running, len(self.router._trails))

    async def converse(self, number: int) -> None:
        trajectory, context = TrajectoryId(f"c{number}"), TokenIds()
        rng = random.Random(number)
        try:
            for turn in range(rng.randint(2, 6)):
                context = context + TokenIds(tokens(1000 * number + turn, rng.randint(2, 50)))
                job = TurnJob(
                    trajectory=trajectory,
                    turn=turn,
                    context=context,
                    sampling=Sampling(seed=number),
                    max_new_tokens=rng.randint(1, 12),
                    min_version=WeightVersion(0),
                )
                said = await self.router.generate(job)
                assert said.end in (EndReason.STOP, EndReason.LENGTH)
                assert isinstance(said.token_ids, TokenIds)
                context = context + said.token_ids
                self.turns += 1
        finally:
            self.router.release(trajectory)

    async def talk(self, numbers: itertools.count[int]) -> None:
        """One conversation after the other; some are given up on the way."""
        while True:
            conversation = asyncio.create_task(self.converse(next(numbers)))
            given_up = self.rng.random() < 0.1
            try:
                if given_up:
                    await asyncio.sleep(self.rng.random() * 0.2)
                    conversation.cancel()
                    self.cancelled += 1
                (ended,) = await asyncio.gather(conversation, return_exceptions=True)
            finally:
                conversation.cancel()
            if isinstance(ended, BaseException) and not given_up:
                raise ended

    async def change_roles(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            worker = WorkerId(self.rng.randrange(WORKERS))
            assert await self.router.drain(worker)
            self.router.set_role(worker, self.rng.choice((Role.PREFILL, Role.DECODE, Role.COLOCATED)))
            self.changes += 1

    async def load_weights(self) -> None:
        tensors = load_file(self.folder / "model.safetensors")
        for version in itertools.count(1):
            await asyncio.sleep(1.0)
            manifest = publish(self.scratch / "weights.safetensors", tensors, version=version)
            await self.router.load(manifest, self.rng.choice(list(LoadMode)))
            self.loads += 1


def _count(engine: EmbeddedEngine) -> tuple[int, int, int]:
    table = engine._table
    return len(engine._exports), sum(owner is not None for owner in table._owners), table.running_count


@pytest.mark.chaos
@pytest.mark.timeout(SOAK_S + 300)
def test_memory_handles_and_slots_stay_flat(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", seed=1)

    async def work() -> Soak:
        engines = [await ThreadedEngine.create(folder, ENGINE, worker=WorkerId(n)) for n in range(WORKERS)]
        lost: list[str] = []
        async with Nursery() as nursery:
            router = Router(nursery, 64, lambda worker, detail: lost.append(f"{worker}: {detail}"))
            for number, (engine, role) in enumerate(
                zip(engines, (Role.PREFILL, Role.DECODE, Role.COLOCATED), strict=True)
            ):
                router.admit(WorkerId(number), engine, WeightVersion(0), role)
            soak = Soak(engines, router, random.Random(0), folder, tmp_path)
            numbers = itertools.count()
            talks = [nursery.spawn(soak.talk(numbers), f"talk {n}") for n in range(CONVERSATIONS)]
            changes = [nursery.spawn(soak.change_roles(), "roles"), nursery.spawn(soak.load_weights(), "weights")]
            for _ in range(40):
                await asyncio.sleep(SOAK_S / 40)
                soak.samples.append(await soak.hold())
            for task in (*talks, *changes):
                task.cancel()
            await asyncio.gather(*talks, *changes, return_exceptions=True)
            await asyncio.sleep(1.0)
            soak.samples.append(await soak.hold())
            router.close()
        for engine in engines:
            await engine.close()
        assert lost == []
        return soak

    soak = asyncio.run(work())
    print(
        f"{soak.turns} turns, {soak.cancelled} given up, {soak.changes} role changes, {soak.loads} loads",
        soak.router.counts,
    )
    print(*soak.samples[::8], soak.samples[-1], sep="\n")
    assert soak.turns > SOAK_S
    assert soak.router.counts.handoffs > 0
    assert soak.router.counts.readbacks > 0
    assert soak.router.counts.appended_turns > 0
    early, late = soak.samples[10:15], soak.samples[35:40]
    assert max(s.rss_mib for s in late) < max(s.rss_mib for s in early) + GROWTH_MIB
    assert max(s.handles for s in soak.samples) <= 2 * CONVERSATIONS
    assert max(s.slots for s in soak.samples) <= WORKERS * 20
    end = soak.samples[-1]
    assert (end.handles, end.slots, end.running, end.trails) == (0, 0, 0, 0)
