import asyncio
from dataclasses import replace

from pearl.core.state import Gpu, GpuOwner
from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId, NodeId
from pearl.testing.gpu_source import FakeGpuSource
from pearl.testing.virtual_time import run_virtual

A, B = GpuId("a"), GpuId("b")
ONE, TWO = LeaseId("one"), LeaseId("two")


def offer(lease: LeaseId, *gpus: GpuId, end_s: float | None = None) -> Offered:
    offered = tuple(Gpu(id=gpu, node=NodeId("n"), owner=GpuOwner.EXTERNAL) for gpu in gpus)
    return Offered(lease=lease, gpus=offered, end_s=end_s)


def test_a_script_is_played_in_time_and_its_times_count_from_the_start() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        source = FakeGpuSource(
            [
                (9.0, Withdrawn(gpus=(A,))),
                (2.0, offer(ONE, A, end_s=9.0)),
                (2.0, offer(TWO, B)),
                (5.0, Notice(gpus=(A,), deadline_s=9.0)),
            ]
        )
        await asyncio.sleep(100)
        got: list[tuple[float, GpuSourceEvent]] = []
        events = source.events()
        for _ in range(4):
            event = await anext(events)
            got.append((loop.time() - 100, event))
        assert got == [
            (2.0, offer(ONE, A, end_s=109.0)),
            (2.0, offer(TWO, B)),
            (5.0, Notice(gpus=(A,), deadline_s=109.0)),
            (9.0, Withdrawn(gpus=(A,))),
        ]

    run_virtual(check())


def test_gpus_go_in_time_even_when_nobody_reads() -> None:
    async def check() -> None:
        source = FakeGpuSource([(1, offer(ONE, A, B, end_s=8)), (5, Withdrawn(gpus=(A,)))])
        assert not await source.accept(ONE, [A])
        await asyncio.sleep(2)
        assert await source.accept(ONE, [A])
        assert source.held == {A: ONE}
        await asyncio.sleep(4)
        assert not await source.accept(ONE, [A])
        assert await source.accept(ONE, [B])
        assert (source.held, source.withdrawn_held) == ({B: ONE}, [A])
        assert source.accepted == [(ONE, (A,)), (ONE, (B,))]
        await source.give_back([B, A, B])
        assert (source.held, source.given_back) == ({}, [B])
        await asyncio.sleep(2)
        assert not await source.accept(ONE, [B])

    run_virtual(check())


def test_nothing_is_accepted_twice_or_in_vain() -> None:
    async def check() -> None:
        source = FakeGpuSource()
        source.push(offer(ONE, A, B))
        assert not await source.accept(ONE, [])
        assert not await source.accept(ONE, [A, A])
        assert await source.accept(ONE, [A])
        assert not await source.accept(ONE, [A])
        assert not await source.accept(ONE, [B, A])
        assert await source.accept(ONE, [B])

    run_virtual(check())


def test_what_is_pushed_wakes_the_reader_between_scripted_events() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        source = FakeGpuSource([(10, Withdrawn(gpus=(B,)))])
        events = source.events()
        loop.call_later(3, source.push, offer(ONE, A, end_s=50))
        assert await anext(events) == offer(ONE, A, end_s=50)
        assert loop.time() == 3
        assert await anext(events) == Withdrawn(gpus=(B,))
        assert loop.time() == 10

    run_virtual(check())


def test_a_withdrawal_touches_every_offer_of_a_gpu() -> None:
    async def check() -> None:
        source = FakeGpuSource()
        for event in (offer(ONE, A, B), offer(TWO, A), Withdrawn(gpus=(A,))):
            source.push(event)
        assert not await source.accept(TWO, [A])
        source.push(replace(offer(TWO, A)))
        assert await source.accept(TWO, [A])

    run_virtual(check())


def test_what_is_gone_cannot_be_given_back() -> None:
    async def check() -> None:
        source = FakeGpuSource([(0, offer(ONE, A)), (5, Withdrawn(gpus=(A,)))])
        assert await source.accept(ONE, [A])
        await asyncio.sleep(6)
        await source.give_back([A])
        assert (source.given_back, source.withdrawn_held) == ([], [A])

    run_virtual(check())
