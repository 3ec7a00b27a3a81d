"""One prefill and two decode workers in processes of their own say what one colocated worker says, token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pearl.cluster.fleet import RayFleet
from pearl.config.engine import EngineConfig
from pearl.core.state import Role
from pearl.errors import EngineError
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.pipeline.turns import TurnJob
from pearl.ports import WorkerSpec
from pearl.records.ids import GpuId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import Completion, Sampling
from tests.models import make_folder, tokens

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(300)]

CONVERSATIONS, TURNS, NEW = 6, 5, 12
OBSERVATION = (40, 23, 5, 31, 7)
"""New context tokens by turn."""
ENGINE = EngineConfig(max_sequences=8, max_context_tokens=512, prefill_chunk_tokens=64, progress_interval_s=0.01)
ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE, Role.COLOCATED)
P, D1, D2, C = (WorkerId(n) for n in range(4))


async def converse(router: Router, number: int) -> list[Completion]:
    """One conversation of five turns, whose observations do not depend on what is said."""
    context = TokenIds()
    said: list[Completion] = []
    for turn in range(TURNS):
        context = context + TokenIds(tokens(100 * number + turn, OBSERVATION[turn] + number))
        job = TurnJob(
            trajectory=TrajectoryId(f"c{number}"),
            turn=turn,
            context=context,
            sampling=Sampling(seed=number),
            max_new_tokens=NEW,
            min_version=WeightVersion(0),
        )
        said.append(await router.generate(job))
        assert isinstance(said[-1].token_ids, TokenIds)
        context = context + said[-1].token_ids
    router.release(TrajectoryId(f"c{number}"))
    return said


def make_router(nursery: Nursery, fleet: RayFleet, workers: Sequence[WorkerId], append_prefill_tokens: int) -> Router:
    def lost(worker: WorkerId, detail: str) -> None:
        raise EngineError(f"worker {worker} was lost: {detail}")

    router = Router(nursery, 4, lost, append_prefill_tokens=append_prefill_tokens)
    for worker in workers:
        router.admit(worker, fleet.engine(worker), WeightVersion(0), ROLES[worker])
    return router


async def computed(fleet: RayFleet, *workers: WorkerId) -> int:
    stats = [await fleet.engine(worker).stats() for worker in workers]
    return sum(one.computed_prompt_tokens for one in stats)


@asynccontextmanager
async def routers(folder: Path, append_prefill_tokens: int) -> AsyncIterator[tuple[RayFleet, Router, Router]]:
    """Four workers; a router over the colocated one, and one over the others."""
    fleet = RayFleet(folder, ENGINE, health_timeout_s=60.0)
    specs = [WorkerSpec(worker=WorkerId(n), gpus=(GpuId(f"l/{n}"),), role=role) for n, role in enumerate(ROLES)]
    assert (await fleet.start(specs, 120.0)).failed == {}
    try:
        async with asyncio.timeout(120), Nursery() as nursery:
            yield (
                fleet,
                make_router(nursery, fleet, [C], 0),
                make_router(nursery, fleet, [P, D1, D2], append_prefill_tokens),
            )
    finally:
        await fleet.stop([spec.worker for spec in specs], 0.0)


async def converse_all(router: Router) -> list[list[Completion]]:
    return await asyncio.gather(*(converse(router, n) for n in range(CONVERSATIONS)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("disaggregation") / "m", seed=1)


def test_every_turn_handed_over(folder: Path) -> None:
    async def work() -> None:
        async with routers(folder, 0) as (fleet, whole, apart):
            want = await converse_all(whole)
            surprise = np.concatenate([turn.logprobs.array for said in want for turn in said])
            assert -surprise.mean() > 1, "a model without doubt tests nothing"
            same(want, await converse_all(apart))
            turns = CONVERSATIONS * TURNS
            assert (apart.counts.handoffs, apart.counts.readbacks) == (turns, turns - CONVERSATIONS)
            assert apart.counts.failed_requests == 0
            # One prompt token for each handed-over turn: the one that the prefill worker drew.
            assert await computed(fleet, D1, D2) == turns
            # With the KV read back, the prefill worker computes what is new, and the token that was drawn last.
            new = CONVERSATIONS * sum(OBSERVATION) + TURNS * sum(range(CONVERSATIONS))
            assert await computed(fleet, P) == new + turns - CONVERSATIONS
            for worker in (D1, D2):
                assert (await fleet.engine(worker).stats()).generated_tokens > 0

    asyncio.run(work())


@pytest.mark.chaos  # which way a turn goes is tested on fakes; here, that the tokens are the same
def test_short_observations_appended_by_the_decode_worker(folder: Path) -> None:
    async def work() -> None:
        async with routers(folder, 16) as (_, whole, apart):
            same(await converse_all(whole), await converse_all(apart))
            short = sum(new + n + 1 <= 16 for new in OBSERVATION for n in range(CONVERSATIONS))
            assert apart.counts.appended_turns == short
            assert apart.counts.handoffs == CONVERSATIONS * TURNS - short

    asyncio.run(work())


def same(want: Sequence[Sequence[Completion]], got: Sequence[Sequence[Completion]]) -> None:
    for number, (one, other) in enumerate(zip(want, got, strict=True)):
        for turn, (a, b) in enumerate(zip(one, other, strict=True)):
            where = f"conversation {number}, turn {turn}"
            assert a.token_ids == b.token_ids, where
            np.testing.assert_allclose(a.logprobs.array, b.logprobs.array, atol=1e-5, rtol=0, err_msg=where)
