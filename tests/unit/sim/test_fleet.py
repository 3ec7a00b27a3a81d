"""The simulated fleet: times of changes, failures, faults."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pearl.core.platform import TransitionCosts
from pearl.core.state import Role
from pearl.errors import EngineError, ProfileError, WorkerLost
from pearl.ports import FleetEvent, WorkerGone, WorkerSpec, WorkerUnwell
from pearl.records.ids import GpuId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import Sampling, TurnRequest
from pearl.sim.fleet import SimFleet, WorkerTimes
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of
from pearl.sim.settings import EngineSettings
from pearl.testing.virtual_time import run_virtual
from tests.platforms import engine_profile, linear_times

PROFILE = engine_profile(1, linear_times(0.010, 0.001, 0.0001))
TIMES = WorkerTimes(start_s=10.0, sleep_s=1.0, wake_s=2.0, role_change_s=3.0, stop_s=0.5)
ONE, TWO = WorkerId(1), WorkerId(2)


def spec(worker: int, *gpus: str) -> WorkerSpec:
    names = tuple(GpuId(gpu) for gpu in gpus or (f"gpu{worker}",))
    return WorkerSpec(worker=WorkerId(worker), gpus=names, role=Role.COLOCATED)


class Rig:
    def __init__(self) -> None:
        self.left: list[str] = []
        self.fleet = SimFleet(
            lambda _: EngineSettings(profile=PROFILE),
            lambda one: replace(TIMES, start_s=10.0 * one.worker),
            health_s=5.0,
            left=self.left.append,
        )
        self.events: list[tuple[float, FleetEvent]] = []
        self.reader = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        async for event in self.fleet.events():
            self.events.append((now_s(), event))


def now_s() -> float:
    return asyncio.get_running_loop().time()


def request() -> TurnRequest:
    return TurnRequest(
        id=RequestId("r"),
        trajectory=TrajectoryId("t"),
        turn=0,
        context=ScriptedTokens(10, script_of((ScriptTurn(10, 1000, 0.0),))),
        sampling=Sampling(seed=0),
        max_new_tokens=1000,
        min_version=WeightVersion(0),
    )


def test_changes_take_their_time() -> None:
    async def check() -> None:
        rig = Rig()
        report = await rig.fleet.start([spec(1), spec(2)], 60.0)
        assert (report.started, report.seconds, now_s()) == ((1, 2), 20.0, 20.0)
        await rig.fleet.sleep([ONE, TWO])
        assert (now_s(), rig.left) == (21.0, ["worker 1", "worker 2"])
        await rig.fleet.wake([ONE, TWO])
        assert now_s() == 23.0
        await rig.fleet.set_role(ONE, Role.DECODE)
        await rig.fleet.set_role(ONE, Role.DECODE)
        assert (now_s(), rig.fleet.roles[ONE]) == (26.0, Role.DECODE)
        await rig.fleet.stop([ONE, ONE, WorkerId(9)], 7.0)
        assert (now_s(), list(rig.fleet.engines)) == (26.5, [TWO])
        assert not rig.events

    run_virtual(check())


def test_who_has_requests_keeps_its_role_and_gets_grace() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.fleet.start([spec(1)], 60.0)
        await rig.fleet.engine(ONE).submit([request()])
        with pytest.raises(EngineError, match="worker 1: role decode: it still has requests; drain it first"):
            await rig.fleet.set_role(ONE, Role.DECODE)
        await rig.fleet.stop([ONE], 2.0)
        assert now_s() == 15.5
        assert rig.fleet.lost_tokens == 0

    run_virtual(check())


def test_gpus_serve_one_worker_at_a_time() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.fleet.start([spec(1, "a", "b")], 60.0)
        report = await rig.fleet.start([spec(2, "b"), spec(3, "c")], 60.0)
        assert (report.started, report.failed) == ((), {2: "worker 2: GPU b is in use by worker 1"})
        assert report.seconds == 0
        report = await rig.fleet.start([spec(1, "d"), spec(4), spec(4)], 60.0)
        assert report.failed == {
            1: "worker 1: is already up; stop it first",
            4: "worker 4: is already up; stop it first",
        }
        await rig.fleet.sleep([ONE])
        assert (await rig.fleet.start([spec(2, "b")], 60.0)).started == (2,)
        with pytest.raises(EngineError, match="worker 1: wake: GPU b is in use by worker 2; free it first"):
            await rig.fleet.wake([ONE])

    run_virtual(check())


def test_a_group_comes_up_whole_or_not_at_all() -> None:
    async def check() -> None:
        rig = Rig()
        slow = await rig.fleet.start([spec(1), spec(3)], 25.0)
        assert slow.failed == {3: "worker 3: not up within 25 s, want cluster.start_timeout_s higher"}
        assert (slow.seconds, rig.fleet.engines) == (25.0, {})
        start = asyncio.ensure_future(rig.fleet.start([spec(1), spec(2)], 60.0))
        await asyncio.sleep(4.0)
        rig.fleet.kill(TWO, "no power")
        rig.fleet.kill(TWO)
        assert ((await start).failed, now_s()) == ({2: "worker 2: no power"}, 29.0)
        rig.fleet.fail_next_start(ONE, "out of memory")
        assert (await rig.fleet.start([spec(1)], 60.0)).failed == {1: "worker 1: out of memory"}
        assert (await rig.fleet.start([spec(1), spec(2)], 60.0)).failed == {}

    run_virtual(check())


def test_a_death_is_told_and_what_it_lost_is_counted() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.fleet.start([spec(1)], 60.0)
        engine = rig.fleet.engine(ONE)
        await engine.submit([request()])
        await asyncio.sleep(0.3)
        rig.fleet.kill(ONE, "power")
        rig.fleet.kill(ONE)
        await asyncio.sleep(0)
        assert rig.events == [(10.3, WorkerGone(worker=ONE, detail="power"))]
        # 11 ms for the prompt, 11 for each further token; none was told.
        assert rig.fleet.lost_tokens == engine.lost_tokens == 1 + 26
        with pytest.raises(WorkerLost, match=r"fleet: got worker 1, want one of \[\]; start it first"):
            rig.fleet.engine(ONE)

    run_virtual(check())


def test_a_death_during_a_change_is_a_loss() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.fleet.start([spec(1)], 60.0)
        change = asyncio.ensure_future(rig.fleet.set_role(ONE, Role.DECODE))
        await asyncio.sleep(1.0)
        rig.fleet.kill(ONE)
        with pytest.raises(WorkerLost, match="worker 1: was lost meanwhile"):
            await change

    run_virtual(check())


def test_a_hung_worker_is_unwell_unless_it_goes_on() -> None:
    async def check() -> None:
        rig = Rig()
        await rig.fleet.start([spec(1), spec(2)], 60.0)
        rig.fleet.hang(ONE)
        rig.fleet.hang(TWO)
        rig.fleet.slow(TWO, 2.0)
        await asyncio.sleep(4.0)
        rig.fleet.unhang(TWO)
        await asyncio.sleep(10.0)
        assert rig.events == [(25.0, WorkerUnwell(worker=ONE, detail="worker 1: no answer within 5 s"))]
        for unknown in (rig.fleet.hang, rig.fleet.unhang, rig.fleet.kill):
            unknown(WorkerId(9))
        rig.fleet.slow(WorkerId(9), 2.0)

    run_virtual(check())


def test_times_come_from_measurements_or_from_what_is_published() -> None:
    costs = TransitionCosts(start_s=50.0, activate_s=6.0, return_s=3.0, role_change_s=20.0, stop_s=1.5)
    measured = WorkerTimes.measured(PROFILE, costs)
    assert measured == WorkerTimes(start_s=50.0, sleep_s=1.0, wake_s=1.0, role_change_s=20.0, stop_s=1.5)
    assert WorkerTimes.measured(replace(PROFILE, engine_start_s=7.0), costs).start_s == 7.0
    # Activation holds the second in which weights are loaded.
    published = WorkerTimes.published(PROFILE, costs)
    assert published == WorkerTimes(start_s=50.0, sleep_s=3.0, wake_s=5.0, role_change_s=20.0, stop_s=1.5)
    with pytest.raises(ProfileError, match="fleet: wake_s: got -1, want a finite number >= 0"):
        replace(measured, wake_s=-1)
