"""The suite accepts the fake, and finds broken fleets made from it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pearl.core.state import Role
from pearl.ports import StartReport, WorkerGone, WorkerSpec
from pearl.records.ids import GpuId, WorkerId
from pearl.testing.contracts.fleet import FleetContract, FleetSubject
from pearl.testing.engine import FakeEngine
from pearl.testing.fleet import FakeFleet
from pearl.testing.virtual_time import run_virtual


class StartsWhatItCan(FakeFleet):
    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        reports = [await FakeFleet.start(self, [spec], timeout_s) for spec in specs]
        started = tuple(worker for report in reports for worker in report.started)
        failed = {worker: detail for report in reports for worker, detail in report.failed.items()}
        return StartReport(started=started, failed=failed, seconds=0)


class HasAllTheTimeInTheWorld(FakeFleet):
    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        return await super().start(specs, 1000)


class HidesFailures(FakeFleet):
    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        return replace(await super().start(specs, timeout_s), failed={})


class RemembersFailures(FakeFleet):
    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        report = await super().start(specs, timeout_s)
        for worker in report.failed:
            self.fail_next_start(worker)
        return report


class CannotStopTheUnknown(FakeFleet):
    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        for worker in workers:
            self.engine(worker)
        await super().stop(workers, grace_s)


class TellsOfStops(FakeFleet):
    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        await super().stop(workers, grace_s)
        for worker in workers:
            self._events.put(WorkerGone(worker=worker, detail="stopped"))


class KeepsTheStopped(FakeFleet):
    def engine(self, worker: WorkerId) -> FakeEngine:
        return self.past_engines[0] if self.past_engines else super().engine(worker)


class TellsTwice(FakeFleet):
    def _lose(self, worker: WorkerId, detail: str) -> None:
        super()._lose(worker, detail)
        self._events.put(WorkerGone(worker=worker, detail=detail))


class TellsNothing(FakeFleet):
    def _lose(self, worker: WorkerId, detail: str) -> None:
        self._forget(worker)


class HasOneEpoch(FakeFleet):
    def _admit(self, spec: WorkerSpec) -> None:
        super()._admit(spec)
        self.engines[spec.worker].kv.epoch = 0


class SleepsLightly(FakeFleet):
    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        pass


class PutsAllToSleep(FakeFleet):
    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        await super().sleep(list(self.engines))


class RestartsForARole(FakeFleet):
    async def set_role(self, worker: WorkerId, role: Role) -> None:
        await super().set_role(worker, role)
        self.engines[worker].kv.invalidate()


class TrainsOnRequest(FakeFleet):
    async def set_role(self, worker: WorkerId, role: Role) -> None:
        if role is not Role.TRAINING:
            await super().set_role(worker, role)


class GivesRolesToNobody(FakeFleet):
    async def set_role(self, worker: WorkerId, role: Role) -> None:
        if worker in self.engines:
            await super().set_role(worker, role)


class Suite(FleetContract):
    too_short_s = 0.5

    def __init__(self, make: type[FakeFleet]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def fleet(self) -> AsyncIterator[FleetSubject]:
        fleet = self.make(start_s=2.0)

        async def kill(worker: WorkerId) -> None:
            fleet.kill(worker)

        specs = [WorkerSpec(worker=WorkerId(n), gpus=(GpuId(f"g{n}"),), role=Role.COLOCATED) for n in range(3)]
        yield FleetSubject(fleet=fleet, specs=specs, kill=kill, fail_next_start=fleet.fail_next_start)


BREACHES = [
    (HidesFailures, "one_failure_starts_nothing"),
    (StartsWhatItCan, "one_failure_starts_nothing"),
    (RemembersFailures, "one_failure_starts_nothing"),
    (HasAllTheTimeInTheWorld, "a_start_that_takes_too_long_starts_nothing"),
    (RemembersFailures, "a_start_that_takes_too_long_starts_nothing"),
    (KeepsTheStopped, "a_stopped_worker_is_lost_and_its_end_is_no_event"),
    (CannotStopTheUnknown, "a_stopped_worker_is_lost_and_its_end_is_no_event"),
    (TellsOfStops, "a_stopped_worker_is_lost_and_its_end_is_no_event"),
    (TellsTwice, "a_death_is_told_once"),
    (TellsNothing, "a_death_is_told_once"),
    (HasOneEpoch, "a_slot_that_comes_back_has_a_new_epoch"),
    (SleepsLightly, "sleep_ends_an_epoch"),
    (PutsAllToSleep, "sleep_ends_an_epoch"),
    (RestartsForARole, "a_worker_takes_any_role_of_rollout_and_stays_up"),
    (TrainsOnRequest, "a_worker_takes_any_role_of_rollout_and_stays_up"),
    (GivesRolesToNobody, "a_worker_takes_any_role_of_rollout_and_stays_up"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_fleet_is_accepted(name: str) -> None:
    getattr(Suite(FakeFleet), f"test_{name}")()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_fleet_is_found(
    broken: type[FakeFleet], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(getattr(Suite(broken), f"test_{name}"))
