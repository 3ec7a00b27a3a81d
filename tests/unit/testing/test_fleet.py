import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import pytest

from pearl.core.state import Role
from pearl.errors import EngineError, WorkerLost
from pearl.ports import FleetEvent, WorkerGone, WorkerSpec, WorkerUnwell
from pearl.records.ids import GpuId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenCount
from pearl.records.turn import EndReason, Sampling, TurnRequest
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.fleet import FakeFleet
from pearl.testing.virtual_time import run_virtual

W0, W1, W2 = WorkerId(0), WorkerId(1), WorkerId(2)


def spec(worker: int, *gpus: str, role: Role = Role.COLOCATED) -> WorkerSpec:
    return WorkerSpec(worker=WorkerId(worker), gpus=tuple(map(GpuId, gpus or (f"g{worker}",))), role=role)


def request(name: str, context: int = 10) -> TurnRequest:
    return TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId("t"),
        turn=0,
        context=TokenCount(context),
        sampling=Sampling(seed=0, stop_token_ids=(0,)),
        max_new_tokens=100,
        min_version=WeightVersion(0),
    )


def slow_engine(one: WorkerSpec) -> FakeEngine:
    return FakeEngine(FakeEngineConfig(token_s=0.25, turn_tokens=8), worker=one.worker)


def play(work: Callable[[], Coroutine[object, object, None]]) -> None:
    run_virtual(work())


async def told(fleet: FakeFleet) -> list[FleetEvent]:
    """Events up to now."""
    events: list[FleetEvent] = []
    stream = fleet.events()
    with contextlib.suppress(TimeoutError):
        while True:
            async with asyncio.timeout(0.001):
                events.append(await anext(stream))
    return events


def test_a_start_takes_as_long_as_its_slowest_worker() -> None:
    async def check() -> None:
        fleet = FakeFleet(start_s=3)
        fleet.delay_next_start(W1, 5)
        report = await fleet.start([spec(0), spec(1, role=Role.DECODE)], timeout_s=10)
        assert (report.started, report.failed, report.seconds) == ((0, 1), {}, 5)
        assert fleet.roles == {0: Role.COLOCATED, 1: Role.DECODE}
        assert (await fleet.start([spec(2)], timeout_s=10)).seconds == 3
        assert [report.started for report in fleet.starts] == [(0, 1), (2,)]

    play(check)


def test_nothing_is_up_before_all_are() -> None:
    async def check() -> None:
        fleet = FakeFleet(start_s=3)
        start = asyncio.create_task(fleet.start([spec(0), spec(1)], timeout_s=10))
        await asyncio.sleep(2.9)
        with pytest.raises(WorkerLost):
            fleet.engine(W0)
        await start
        assert fleet.engine(W0) is fleet.engines[W0]

    play(check)


def test_a_start_gives_up_at_its_time_out() -> None:
    async def check() -> None:
        fleet = FakeFleet(start_s=1)
        fleet.delay_next_start(W1, 10.5)
        report = await fleet.start([spec(0), spec(1)], timeout_s=10)
        assert (report.started, set(report.failed), report.seconds) == ((), {1}, 10)
        assert fleet.engines == {}
        assert (await fleet.start([spec(0), spec(1)], timeout_s=10)).started == (0, 1)

    play(check)


def test_failures_are_used_up_one_by_one() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        fleet.fail_next_start(W0, "no memory")
        fleet.fail_next_start(W0)
        failures = [(await fleet.start([spec(0)], timeout_s=1)).failed.get(W0) for _ in range(3)]
        assert failures == ["worker 0: no memory", "worker 0: made to fail", None]

    play(check)


def test_a_start_that_is_given_up_leaves_nothing() -> None:
    async def check() -> None:
        fleet = FakeFleet(start_s=3)
        start = asyncio.create_task(fleet.start([spec(0)], timeout_s=10))
        await asyncio.sleep(1)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        assert fleet.engines == {}
        assert (await fleet.start([spec(0)], timeout_s=10)).failed == {}

    play(check)


@pytest.mark.parametrize(
    ("specs", "failed"),
    [
        ([spec(0)], {W0}),
        ([spec(1, "g0")], {W1}),
        ([spec(1), spec(2, "g1")], {W2}),
        ([spec(1), spec(1)], {W1}),
        ([spec(1, "x", "g0"), spec(2)], {W1}),
    ],
)
def test_workers_and_gpus_are_used_once(specs: list[WorkerSpec], failed: set[WorkerId]) -> None:
    async def check() -> None:
        fleet = FakeFleet()
        await fleet.start([spec(0)], timeout_s=1)
        assert set((await fleet.start(specs, timeout_s=1)).failed) == failed
        assert set(fleet.engines) == {0}

    play(check)


def test_two_starts_at_once_do_not_share_a_gpu() -> None:
    async def check() -> None:
        fleet = FakeFleet(start_s=3)
        reports = await asyncio.gather(*(fleet.start([spec(worker, "g")], timeout_s=9) for worker in (0, 1)))
        assert [report.started for report in reports] == [(0,), ()]

    play(check)


def test_a_sleeper_leaves_its_gpus_to_others() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        await fleet.start([spec(0)], timeout_s=1)
        await fleet.sleep([W0])
        assert fleet.asleep == {0}
        await fleet.start([spec(1, "g0")], timeout_s=1)
        with pytest.raises(EngineError, match="GPU g0 is in use by worker 1"):
            await fleet.wake([W0])
        await fleet.stop([W1], grace_s=0)
        await fleet.wake([W0])
        assert fleet.asleep == set()

    play(check)


def test_deaths_and_illness_are_told_once_and_in_order() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        await fleet.start([spec(0), spec(1), spec(2)], timeout_s=1)
        fleet.kill(W1, "out of memory")
        fleet.report_unwell(W2)
        engine = fleet.engines[W0]
        engine.kill()
        engine.kill()
        assert await told(fleet) == [
            WorkerGone(worker=W1, detail="out of memory"),
            WorkerUnwell(worker=W2, detail="no answer to the health check"),
            WorkerGone(worker=W0, detail="killed"),
        ]
        assert await told(fleet) == []
        assert set(fleet.engines) == {2}

    play(check)


def test_a_stopped_worker_is_not_told() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        await fleet.start([spec(0)], timeout_s=1)
        engine = fleet.engines[W0]
        await fleet.stop([W0, W0, W1], grace_s=5)
        assert engine.gone
        engine.kill()
        assert await told(fleet) == []
        assert asyncio.get_running_loop().time() < 1

    play(check)


@pytest.mark.parametrize(("grace_s", "end"), [(1.0, EndReason.INTERRUPTED), (3.0, EndReason.STOP)])
def test_a_busy_worker_gets_its_grace(grace_s: float, end: EndReason) -> None:
    async def check() -> None:
        fleet = FakeFleet(slow_engine)
        await fleet.start([spec(0)], timeout_s=1)
        engine = fleet.engines[W0]
        await engine.submit([request("a")])
        await fleet.stop([W0], grace_s=grace_s)
        assert asyncio.get_running_loop().time() == grace_s
        events = engine.events()
        chunks = await anext(events)
        with pytest.raises(WorkerLost):
            await anext(events)
        assert chunks[-1].end is end
        assert sum(len(chunk.token_ids) for chunk in chunks) == min(8, grace_s * 4)

    play(check)


def test_a_turn_keeps_its_length_from_worker_to_worker() -> None:
    async def check() -> None:
        fleet = FakeFleet(slow_engine)
        await fleet.start([spec(0), spec(1)], timeout_s=1)
        await fleet.engines[W0].submit([request("a")])
        await asyncio.sleep(0.75)
        await fleet.engines[W0].interrupt([RequestId("a")])
        await fleet.engines[W1].submit([request("b", context=13)])
        await asyncio.sleep(10)
        chunks = await anext(fleet.engines[W1].events())
        assert sum(len(chunk.token_ids) for chunk in chunks) == 5
        assert fleet.past_engines == [fleet.engines[W0], fleet.engines[W1]]

    play(check)


def test_a_change_of_role_takes_its_time_and_may_be_refused() -> None:
    async def check() -> None:
        fleet = FakeFleet(slow_engine)
        fleet.role_s = 3.0
        await fleet.start([spec(0)], timeout_s=1)
        fleet.fail_next_role(W0, "no")
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(EngineError, match="worker 0: no"):
            await fleet.set_role(W0, Role.DECODE)
        assert fleet.roles[W0] is Role.COLOCATED
        await fleet.set_role(W0, Role.DECODE)
        assert fleet.roles[W0] is Role.DECODE
        assert asyncio.get_running_loop().time() - began_s == 6

    play(check)


def test_a_role_changes_when_the_worker_is_drained() -> None:
    async def check() -> None:
        fleet = FakeFleet(slow_engine)
        await fleet.start([spec(0)], timeout_s=1)
        await fleet.engines[W0].submit([request("a")])
        with pytest.raises(EngineError, match="drain it first"):
            await fleet.set_role(W0, Role.DECODE)
        await asyncio.sleep(10)
        await fleet.set_role(W0, Role.DECODE)
        assert fleet.roles[W0] is Role.DECODE

    play(check)


def test_unknown_workers_are_lost() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        await fleet.start([spec(1)], timeout_s=1)
        with pytest.raises(WorkerLost, match=r"got worker 0, want one of \[1\]"):
            fleet.engine(W0)
        for call in (fleet.sleep([W0]), fleet.wake([W0]), fleet.set_role(W0, Role.DECODE)):
            with pytest.raises(WorkerLost):
                await call

    play(check)


def test_epochs_rise_over_deaths_and_sleep() -> None:
    async def check() -> None:
        fleet = FakeFleet()
        epochs = []
        for end in ("kill", "sleep", "stop", "none"):
            await fleet.start([spec(0)], timeout_s=1)
            epochs.append((await fleet.engine(W0).info()).epoch)
            if end == "kill":
                fleet.kill(W0)
            elif end == "sleep":
                await fleet.sleep([W0])
            await fleet.stop([W0], grace_s=0)
        assert epochs == [0, 1, 3, 4]

    play(check)


def test_sleeping_and_waking_take_time_and_may_never_be_answered() -> None:
    async def work() -> list[float]:
        fleet = FakeFleet()
        spec = WorkerSpec(worker=WorkerId(0), gpus=(GpuId("gpu0"),), role=Role.COLOCATED)
        await fleet.start([spec], 10.0)
        fleet.sleep_s, fleet.wake_s = 2.0, 3.0
        loop, times = asyncio.get_running_loop(), []
        await fleet.sleep([spec.worker])
        times.append(loop.time())
        await fleet.wake([spec.worker])
        times.append(loop.time())
        fleet.hang_next(spec.worker)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fleet.sleep([spec.worker]), 100)
        assert fleet.asleep == set()
        await fleet.sleep([spec.worker])
        times.append(loop.time())
        return times

    assert run_virtual(work()) == [2.0, 5.0, 107.0]
