"""GPUs that the trainer lends: a loan and a return take 1 s each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from pearl.errors import TrainingError
from pearl.records.ids import GpuId
from pearl.records.training import LendReport
from tests.unit.elastic._stage import LEND_S, TIMEOUT_S, Stage, g, now_s, on_stage


def test_what_is_lent_comes_back() -> None:
    async def test(stage: Stage) -> None:
        assert await stage.loans.lend(g("t0")) is None
        assert (list(stage.loans.lent), now_s()) == (["t0"], LEND_S)
        assert await stage.loans.lend(g("t0", "t1")) is None  # t0 is lent already
        assert stage.trainer.loans == [("lend", ("t0",)), ("lend", ("t1",))]
        assert await stage.loans.reclaim(g("t1", "t0", "r0")) is None
        assert (stage.loans.lent, stage.trainer.lent) == ({}, set())

    on_stage(test)


def test_a_gpu_is_reclaimed_once_whoever_asks() -> None:
    async def test(stage: Stage) -> None:
        await stage.loans.lend(g("t0", "t1"))
        answers = await asyncio.gather(stage.loans.reclaim(g("t0", "t1")), stage.loans.reclaim(g("t0")))
        assert answers == [None, None]
        assert stage.trainer.loans[1:] == [("reclaim", ("t0", "t1"))]

    on_stage(test)


def test_a_loan_that_nobody_waits_for_any_more_ends_and_can_be_reclaimed() -> None:
    async def test(stage: Stage) -> None:
        asking = asyncio.ensure_future(stage.loans.lend(g("t0")))
        await asyncio.sleep(LEND_S / 2)
        asking.cancel()
        assert await stage.loans.reclaim(g("t0")) is None
        assert now_s() == 2 * LEND_S  # behind the loan
        assert (stage.loans.lent, stage.trainer.lent) == ({}, set())
        assert [what for what, _ in stage.trainer.loans] == ["lend", "reclaim"]

    on_stage(test)


def test_nothing_is_lent_while_training_needs_it() -> None:
    async def test(stage: Stage) -> None:
        stage.loans.is_open = False
        assert await stage.loans.lend(g("t0")) == "training needs its GPUs"
        assert stage.trainer.loans == []

    on_stage(test)


def test_a_loan_in_turn_behind_another_heeds_that_training_has_begun() -> None:
    async def test(stage: Stage) -> None:
        asking = asyncio.gather(stage.loans.lend(g("t0")), stage.loans.lend(g("t1")))
        await asyncio.sleep(LEND_S / 2)
        stage.loans.is_open = False
        assert await asking == [None, "training needs its GPUs"]

    on_stage(test)


def test_refusals_and_silence_are_answers() -> None:
    async def test(stage: Stage) -> None:
        async def refuse(gpus: Sequence[GpuId]) -> LendReport:
            raise TrainingError("not now")

        async def hang(gpus: Sequence[GpuId]) -> LendReport:
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        stage.trainer.lend_gpus = refuse  # type: ignore[method-assign]
        assert await stage.loans.lend(g("t0")) == "not now"
        assert stage.loans.lent == {}
        stage.trainer.lend_gpus = hang  # type: ignore[method-assign]
        assert await stage.loans.lend(g("t0", "t1")) == f"trainer: lending 2 GPUs: no answer within {TIMEOUT_S:g} s"
        assert list(stage.loans.lent) == ["t0", "t1"]  # nobody knows: to be reclaimed
        stage.trainer.reclaim_gpus = refuse  # type: ignore[method-assign]
        assert await stage.loans.reclaim(g("t0")) == "not now"
        assert list(stage.loans.lent) == ["t0", "t1"]
        stage.trainer.reclaim_gpus = hang  # type: ignore[method-assign]
        assert await stage.loans.reclaim(g("t0")) == f"trainer: reclaiming 1 GPUs: no answer within {TIMEOUT_S:g} s"

    on_stage(test)
