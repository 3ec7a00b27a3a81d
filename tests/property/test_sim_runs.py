"""A simulated engine that jumps over iterations does what it does step by step: same chunks, order, counts, and times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pearl.core.profile import HandOff, IterationTimes
from pearl.errors import WorkerLost
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.training import LoadMode, Manifest
from pearl.records.turn import Chunk, KvHandle, Mode, Sampling, TurnRequest
from pearl.sim.engine import SimEngine
from pearl.sim.limits import Limits, Mixing
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of
from pearl.sim.settings import EngineSettings, EngineWorld
from pearl.testing.virtual_time import run_virtual
from tests.platforms import engine_profile

CAPACITY = 700
SCRIPTS = tuple(
    script_of(tuple(ScriptTurn(1 + (n * 37 + t * 11) % 90, 1 + (n * 53 + t * 29) % 120, 0.0) for t in range(3)))
    for n in range(6)
)


@dataclass(frozen=True)
class Action:
    wait: int
    """Hundredths, and an odd rest, of 0.1 s before it."""
    kind: str
    engine: int
    number: int
    turn: int
    mode: Mode
    ahead: int
    """Tokens that the turn has generated already."""
    limit: int


ACTIONS = st.builds(
    Action,
    wait=st.integers(0, 60),
    kind=st.sampled_from(
        ["submit"] * 9 + ["interrupt", "load", "void", "kill", "slow", "hang", "release", "import", "drop"]
    ),
    engine=st.integers(0, 1),
    number=st.integers(0, len(SCRIPTS) - 1),
    turn=st.integers(0, 2),
    mode=st.sampled_from([Mode.COLOCATED, Mode.COLOCATED, Mode.PREFILL]),
    ahead=st.integers(0, 20),
    limit=st.integers(1, 200),
)


def times() -> IterationTimes:
    """A level stretch, a steep one, and a falling one."""
    decoding = (0, 4, 16)
    context = (16, 100, 300)
    cells = tuple(
        tuple(
            tuple(0.00311 + 0.000173 * d * (1 + c / 211) + 0.0000717 * p - (0.0003 if c == 100 else 0) for c in context)
            for d in decoding
        )
        for p in (0, 64)
    )
    return IterationTimes(prefill_tokens=(0, 64), decoding=decoding, context_tokens=context, cells_s=cells)


class World:
    """Two engines, and everything that they tell."""

    def __init__(self, longest_run: int, mixing: Mixing, seats: int) -> None:
        profile = engine_profile(1, times(), capacity=CAPACITY, hand_off=HandOff(fixed_s=0.0123, s_per_byte=1e-5))
        settings = EngineSettings(
            profile=replace(profile, weight_load_s=0.0511),
            limits=Limits(
                max_sequences=seats, chunk_tokens=48, iteration_tokens=50, mixing=mixing, longest_run=longest_run
            ),
            progress_interval_s=0.0701,
            report_interval_s=0.3301,
            kv_ttl_s=0.4099,
        )
        self.engines = [SimEngine(WorkerId(n), settings, EngineWorld()) for n in range(2)]
        self.told: list[list[tuple[object, ...]]] = [[], []]
        self.times_s: list[list[float]] = [[], []]
        self.handles: list[list[tuple[KvHandle, int, int]]] = [[], []]
        self.requests: dict[RequestId, tuple[int, int, int]] = {}
        self.tasks: list[asyncio.Task[object]] = []
        self.version = 0

    async def read(self, n: int) -> None:
        stream: AsyncIterator[tuple[Chunk, ...]] = self.engines[n].events()
        try:
            async for chunks in stream:
                for chunk in chunks:
                    self._note(n, chunk)
        except WorkerLost:
            self.told[n].append((n, "lost"))
            self.times_s[n].append(asyncio.get_running_loop().time())

    def _note(self, n: int, chunk: Chunk) -> None:
        kv = None if chunk.kv is None else (chunk.kv.id, chunk.kv.start, chunk.kv.tokens, chunk.kv.version)
        versions = tuple((run.version, run.tokens) for run in chunk.versions.runs)
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        self.told[n].append(
            (n, chunk.request, chunk.start, len(chunk.token_ids), versions, chunk.end, kv, chunk.computed_prompt_tokens)
        )
        self.times_s[n].append(asyncio.get_running_loop().time())
        if chunk.kv is not None:
            self.handles[n].append((chunk.kv, *self.requests[chunk.request][1:]))

    async def submit(self, action: Action, kv: tuple[KvHandle, int, int] | None = None) -> None:
        number, turn, mode = action.number, action.turn, action.mode
        tokens = SCRIPTS[number].starts[turn] + min(action.ahead, SCRIPTS[number].turns[turn].output_tokens - 1)
        if kv is not None:
            handle, number, turn = kv
            mode, tokens = Mode.DECODE, handle.tokens + 1
        request = TurnRequest(
            id=RequestId(f"r{len(self.requests)}"),
            trajectory=TrajectoryId(f"t{number}"),
            turn=turn,
            context=ScriptedTokens(tokens, SCRIPTS[number]),
            sampling=Sampling(seed=0),
            max_new_tokens=action.limit,
            min_version=WeightVersion(0),
            mode=mode,
            kv=None if kv is None else kv[0],
            export_kv=action.ahead % 3 == 0,
            export_from=action.ahead % 2 * 7,
        )
        self.requests[request.id] = (action.engine, number, turn)
        await self.engines[action.engine].submit([request])

    async def act(self, action: Action) -> None:
        engine = self.engines[action.engine]
        match action.kind:
            case "submit":
                await self.submit(action)
            case "interrupt":
                await engine.interrupt([RequestId(f"r{action.number + n}") for n in range(3)])
            case "load" | "void":
                self.version += 1
                mode = LoadMode.KEEP_KV if action.kind == "load" else LoadMode.RECOMPUTE
                manifest = Manifest(version=WeightVersion(self.version), model_hash="h", shards=())
                self.tasks.append(asyncio.ensure_future(engine.load(manifest, mode)))
            case "kill" if action.limit > 140:
                engine.kill()
            case "slow":
                engine.slow(0.5 + action.limit / 97)
            case "hang":
                engine.hang()
                asyncio.get_running_loop().call_later(0.0917, engine.unhang)
            case "release":
                await engine.release(TrajectoryId(f"t{action.number}"))
            case "import" if self.handles[1 - action.engine]:
                await self.submit(action, self.handles[1 - action.engine][-1])
            case "drop" if self.handles[action.engine]:
                handle, number, _ = self.handles[action.engine].pop()
                await self.engines[handle.owner].release(TrajectoryId(f"t{number}"), handle)

    async def play(self, actions: list[Action]) -> dict[str, object]:
        readers = [asyncio.ensure_future(self.read(n)) for n in range(2)]
        for action in actions:
            if action.wait > 20:
                await asyncio.sleep(action.wait * 0.001 + 0.00001317)
            try:
                await self.act(action)
            except WorkerLost:
                continue
        await asyncio.sleep(200.0)
        counts = [engine._roster.counts for engine in self.engines]
        loads = await asyncio.gather(*self.tasks, return_exceptions=True)
        for reader in readers:
            reader.cancel()
        return {
            "loads": [getattr(load, "recomputed_tokens", type(load)) for load in loads],
            "counts": [
                (one.iterations, one.generated_tokens, one.computed_prompt_tokens, one.preemptions) for one in counts
            ],
            "lost": [engine.lost_tokens for engine in self.engines],
            "open": [list(engine._roster.requests) for engine in self.engines if not engine.is_gone],
            "held": [engine._cache.held_tokens for engine in self.engines if not engine.is_gone],
        }


@examples(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ACTIONS, max_size=30), st.sampled_from(list(Mixing)), st.integers(1, 5))
def test_jumping_is_stepping(actions: list[Action], mixing: Mixing, seats: int) -> None:
    stepping, jumping = World(1, mixing, seats), World(1 << 40, mixing, seats)
    ends = [run_virtual(world.play(actions)) for world in (stepping, jumping)]
    assert jumping.told == stepping.told
    assert ends[1] == ends[0]
    for n in range(2):
        assert jumping.times_s[n] == pytest.approx(stepping.times_s[n], rel=1e-9)
    # Whatever happens, every request that nobody lost has ended, and holds nothing.
    assert ends[1]["open"] == [[]] * len(ends[1]["open"])  # type: ignore[arg-type]
    assert ends[1]["held"] == [0] * len(ends[1]["held"])  # type: ignore[arg-type]
    told: dict[object, int] = {}
    for _, request, start, tokens, *_ in (entry for engine in jumping.told for entry in engine if len(entry) > 2):
        assert told.setdefault(request, start) == start  # type: ignore[arg-type]
        told[request] = start + tokens  # type: ignore[operator]
