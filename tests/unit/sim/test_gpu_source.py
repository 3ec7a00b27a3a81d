"""A simulated GPU source: events at their times, whoever reads them, and what the job holds."""

from __future__ import annotations

import asyncio

import pytest

from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId
from pearl.sim.gpu_source import SimGpuSource
from pearl.sim.leases import SourceSettings
from pearl.virtual_time import run_virtual


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def take(source: SimGpuSource, count: int) -> list[tuple[float, GpuSourceEvent]]:
    events, found = source.events(), []
    for _ in range(count):
        found.append((now_s(), await anext(events)))
        found[-1] = (now_s(), found[-1][1])
    return found


def test_events_come_at_their_times_counted_from_the_first_use() -> None:
    async def check() -> None:
        source = SimGpuSource([(10.0, 2), (60.0, 1)], SourceSettings(notice_s=20.0, ends_known=True))
        await asyncio.sleep(1000)
        found = await take(source, 4)
        assert [at_s for at_s, _ in found] == [1010.0, 1010.0, 1040.0, 1060.0]
        _, second, notice, gone = (event for _, event in found)
        assert isinstance(second, Offered)
        assert second.end_s == 1060.0
        assert notice == Notice(gpus=(GpuId("external0001"),), deadline_s=1060.0)
        assert gone == Withdrawn(gpus=(GpuId("external0001"),))

    run_virtual(check())


def test_gpus_go_whether_or_not_anybody_reads() -> None:
    async def check() -> None:
        told: list[tuple[float, tuple[GpuId, ...]]] = []
        source = SimGpuSource(
            [(0.0, 3), (60.0, 1)], SourceSettings(), on_withdrawn=lambda gpus: told.append((now_s(), gpus))
        )
        source.begin()
        await asyncio.sleep(1)
        ids = [GpuId(f"external000{n}") for n in range(3)]
        assert list(source.available) == ids
        assert await source.accept(LeaseId("external-lease0"), ids[:2])
        await asyncio.sleep(100)
        assert told == [(60.0, (ids[1],))]
        assert source.withdrawn_held == [ids[1]]
        assert list(source.held) == list(source.available) == ids[:1]
        # Given back, it can be had again while the offer stands.
        await source.give_back(ids)
        assert await source.accept(LeaseId("external-lease0"), ids[:1])

    run_virtual(check())


def test_more_can_be_offered_and_taken_away() -> None:
    async def check() -> None:
        source = SimGpuSource((), SourceSettings(unit_gpus=2, notice_s=30.0))
        source.offer(3)
        assert source.notice(1) == 1
        assert source.notice(5, 10.0) == 2  # one is under notice already
        assert source.notice(1) == 0
        found = await take(source, 5)
        offer = found[0][1]
        assert isinstance(offer, Offered)
        assert [gpu.id for gpu in offer.gpus] == [f"external+000{n}" for n in range(6)]
        assert [(at_s, type(event).__name__, len(event.gpus)) for at_s, event in found[1:]] == [
            (0.0, "Notice", 2),
            (0.0, "Notice", 4),
            (10.0, "Withdrawn", 4),
            (30.0, "Withdrawn", 2),
        ]
        assert source.available == ()
        source.offer(1)
        assert source.available == ("external+0000", "external+0001")
        assert source.notice(1, 0.0) == 1
        assert source.available == ()
        with pytest.raises(ValueError, match=r"GPU source external: offer: got 0 units, want >= 1"):
            source.offer(0)

    run_virtual(check())
