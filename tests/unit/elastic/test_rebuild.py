"""GPUs that come and go; the scheduler is the one of `_scheduling`, its moments show what it was told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from pearl.core.policy import Borrow
from pearl.core.state import Gpu, GpuOwner
from pearl.elastic.rebuild import ANSWER_TIMEOUT_S, Rebuilder
from pearl.errors import EngineError
from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId, NodeId
from tests.unit.elastic._scheduling import Scheduling, scheduling
from tests.unit.elastic._stage import EXTERNAL, LOAD_S, START_S, g, now_s

NEW = tuple(Gpu(id=GpuId(f"x{n}"), node=NodeId("x-node"), owner=GpuOwner.EXTERNAL) for n in range(2))
ALL = {f"{n}C": 4000.0 / n for n in range(1, 9)}


def offer(*gpus: Gpu, lease: str = "M", end_s: float | None = None) -> Offered:
    return Offered(lease=LeaseId(lease), gpus=gpus, end_s=end_s)


def follow(one: Scheduling) -> Rebuilder:
    rebuilder = Rebuilder(source=one.stage.source, scheduler=one.scheduler)
    one.stage.nursery.spawn(rebuilder.run(), name="GPU source")
    return rebuilder


def leases(one: Scheduling) -> dict[str, tuple[str, ...]]:
    return {lease.id: lease.gpus for lease in one.stage.workers.state.snapshot.leases.values()}


async def happen(one: Scheduling, *events: GpuSourceEvent) -> None:
    for event in events:
        one.stage.source.push(event)
    await asyncio.sleep(0.001)


def test_what_is_offered_is_taken_and_serves() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await one.begin()
        await happen(one, offer(*NEW, end_s=5000.0))
        assert one.stage.source.accepted == [("M", ("x0", "x1"))]
        assert leases(one)["M"] == ("x0", "x1")
        assert one.stage.workers.state.snapshot.leases[LeaseId("M")].end_s == 5000.0
        await asyncio.sleep(START_S + LOAD_S)
        assert len(one.stage.workers.router.workers) == 6

    scheduling(test, ALL, external=True)


def test_times_of_a_source_are_loop_time_and_those_of_the_state_the_runs() -> None:
    async def test(one: Scheduling) -> None:
        one.scheduler.start_s = now_s() + 0.0
        await asyncio.sleep(100)
        one.scheduler.start_s = 100.0
        follow(one)
        await happen(one, offer(*NEW, end_s=700.0), Notice(gpus=g("x0"), deadline_s=400.0))
        state = one.stage.workers.state.snapshot
        lease = state.leases[LeaseId("M")]
        assert (lease.end_s, state.notices[GpuId("x0")]) == (600.0, 300.0)
        assert lease.since_s == pytest.approx(0.0, abs=0.01)

    scheduling(test)


def test_an_offer_that_is_over_or_of_what_is_here_is_left_alone() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await asyncio.sleep(10)
        await happen(one, offer(*NEW, end_s=10.0), offer(*EXTERNAL, lease="N"))
        assert (one.stage.source.accepted, list(leases(one))) == ([], ["L"])
        assert one.moments() == []

    scheduling(test)


def test_an_offer_that_ends_while_it_is_accepted_goes_back() -> None:
    async def test(one: Scheduling) -> None:
        accept = one.stage.source.accept

        async def slow(lease: LeaseId, gpus: tuple[GpuId, ...]) -> bool:
            found = await accept(lease, gpus)
            await asyncio.sleep(20)
            return found

        one.stage.source.accept = slow  # type: ignore[method-assign,assignment]
        follow(one)
        await happen(one, offer(*NEW, end_s=10.0))
        await asyncio.sleep(30)
        assert (list(leases(one)), one.stage.source.given_back) == (["L"], ["x0", "x1"])

    scheduling(test)


def test_a_source_that_does_not_answer_is_not_waited_for() -> None:
    async def test(one: Scheduling) -> None:
        accept = one.stage.source.accept

        async def hang(lease: LeaseId, gpus: tuple[GpuId, ...]) -> bool:
            if lease == "M":
                await asyncio.get_running_loop().create_future()
            return await accept(lease, gpus)

        one.stage.source.accept = hang  # type: ignore[method-assign,assignment]
        follow(one)
        await happen(one, offer(NEW[0]), offer(NEW[1], lease="N"))
        assert list(leases(one)) == ["L"]
        await asyncio.sleep(ANSWER_TIMEOUT_S)
        assert leases(one)["N"] == ("x1",)

    scheduling(test)


def test_gpus_that_come_later_under_the_same_lease_are_not_lost() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await happen(one, offer(NEW[0]), offer(*NEW), offer(*NEW))
        assert leases(one) == {"L": ("e0", "e1"), "M": ("x0",), "M#2": ("x1",)}

    scheduling(test)


def test_a_worker_that_dies_with_its_gpus_is_no_restart_even_where_its_death_is_told_first() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await one.begin()
        on_e0 = next(each.id for each in one.stage.workers.state.snapshot.active() if each.gpus == g("e0"))
        one.scheduler.lost(on_e0, "killed")
        assert on_e0 in one.stage.hands.lost
        await happen(one, Withdrawn(gpus=g("e0")))
        assert one.stage.hands.lost == {}
        assert one.stage.workers.restarts == 0

    scheduling(test, ALL, external=True)


def test_what_is_withdrawn_takes_its_workers_with_it() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await one.begin()
        assert len(one.stage.workers.router.workers) == 4
        on_e0 = next(each.id for each in one.stage.workers.state.snapshot.active() if each.gpus == g("e0"))
        await happen(one, Withdrawn(gpus=g("e0", "unknown", "t0", "r0")))
        assert on_e0 not in one.stage.workers.router.workers
        assert on_e0 not in one.stage.fleet.engines
        assert leases(one) == {"L": ("e1",)}
        assert {"t0", "r0"} <= one.stage.workers.state.snapshot.gpus.keys()  # no source has a say in these
        assert one.stage.workers.restarts == 0
        assert "gpus_changed" in one.moments()

    scheduling(test, ALL, external=True)


def test_gpus_withdrawn_under_a_start_leave_no_process() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        one.scheduler.begin()
        await asyncio.sleep(5)
        await happen(one, Withdrawn(gpus=g("e0")))
        assert one.changes() == [(0, False)]
        await asyncio.sleep(60)
        serving = one.stage.workers.state.snapshot.active()
        assert sorted(gpu for each in serving for gpu in each.gpus) == ["e1", "r0", "r1"]
        assert sorted(one.stage.fleet.engines) == sorted([1, 2, *(each.id for each in serving)])

    scheduling(test, ALL, external=True)


def test_the_same_gpus_come_back_to_their_slot() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await one.begin()
        before = one.stage.workers.router.workers
        await happen(one, Withdrawn(gpus=g("e0", "e1")), offer(*EXTERNAL, lease="L"))
        await asyncio.sleep(START_S + LOAD_S + 1)
        assert one.stage.workers.router.workers == before

    scheduling(test, ALL, external=True)


def test_how_long_gpus_lasted_is_learned_once_for_each_coming_and_going() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await happen(one, offer(*NEW))
        await asyncio.sleep(50)
        await happen(one, Withdrawn(gpus=g("x0", "x1")), Withdrawn(gpus=g("x0", "x1")), offer(*NEW, lease="O"))
        await asyncio.sleep(30)
        await happen(one, Withdrawn(gpus=g("x1")))
        spans = [span.duration_s for span in one.scheduler.leases.spans]
        assert spans == pytest.approx([50.0, 30.0], abs=0.01)
        assert all(span.ended for span in one.scheduler.leases.spans)

    scheduling(test)


def test_a_notice_that_is_late_means_at_once_and_one_for_others_nothing() -> None:
    async def test(one: Scheduling) -> None:
        follow(one)
        await asyncio.sleep(100)
        one.scheduler.start_s = 90.0
        await happen(one, Notice(gpus=g("e0"), deadline_s=80.0), Notice(gpus=g("t0", "nobody"), deadline_s=500.0))
        assert dict(one.stage.workers.state.snapshot.notices) == {"e0": 0.0}

    scheduling(test)


def test_without_its_source_the_fleet_keeps_what_it_has() -> None:
    async def test(one: Scheduling) -> None:
        async def breaks() -> AsyncIterator[GpuSourceEvent]:
            yield offer(*NEW)
            raise EngineError("connection lost")

        one.stage.source.events = breaks  # type: ignore[method-assign]

        async def accept(lease: LeaseId, gpus: tuple[GpuId, ...]) -> bool:
            return True

        one.stage.source.accept = accept  # type: ignore[method-assign,assignment]
        follow(one)
        await asyncio.sleep(1)
        assert leases(one)["M"] == ("x0", "x1")
        await one.begin()

    scheduling(test, borrow=Borrow.NEVER)
