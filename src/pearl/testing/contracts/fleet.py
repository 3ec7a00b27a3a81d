"""Contract of `Fleet`: groups start all or nothing, deaths are told once, a slot that comes back has a new epoch."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import pytest

from pearl.core.state import Role
from pearl.errors import EngineError, WorkerLost
from pearl.ports import Fleet, WorkerGone, WorkerSpec
from pearl.records.ids import WorkerId
from pearl.testing.contracts.base import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSubject:
    """A fleet under test, with nothing started."""

    fleet: Fleet
    specs: Sequence[WorkerSpec]
    """At least 3 workers that can be up together."""
    kill: Callable[[WorkerId], Awaitable[None]]
    """Ends a worker's process without notice."""
    fail_next_start: Callable[[WorkerId], None] | None = None
    """Makes the next start of a worker fail; None: there is no way to."""


class FleetContract(Contract):
    """Subclass it and give `fleet`."""

    start_timeout_s = 60.0
    too_short_s = 1e-4
    """A time-out that no start can meet."""
    supports_sleep = True
    settle_s = 0.1
    """How long an event that must not come is waited for."""

    def fleet(self) -> AbstractAsyncContextManager[FleetSubject]:
        """A fresh fleet; stops everything at the end."""
        raise NotImplementedError

    def test_a_group_starts_together(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                workers = tuple(spec.worker for spec in subject.specs)
                report = await subject.fleet.start(subject.specs, self.start_timeout_s)
                assert report.failed == {}
                assert sorted(report.started) == sorted(workers)
                assert report.seconds >= 0
                for worker in workers:
                    assert (await subject.fleet.engine(worker).info()).max_context_tokens > 1

        self.check(check())

    def test_workers_join_a_running_fleet(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                await self._start(subject, subject.specs[:1])
                await self._start(subject, subject.specs[1:2])
                for spec in subject.specs[:2]:
                    await subject.fleet.engine(spec.worker).stats()

        self.check(check())

    def test_a_worker_that_was_never_started_is_lost(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                with pytest.raises(WorkerLost):
                    subject.fleet.engine(subject.specs[0].worker)

        self.check(check())

    def test_one_failure_starts_nothing(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                if subject.fail_next_start is None:
                    return
                bad = subject.specs[1].worker
                subject.fail_next_start(bad)
                report = await subject.fleet.start(subject.specs, self.start_timeout_s)
                assert report.started == ()
                assert set(report.failed) == {bad}
                assert report.failed[bad]
                await self._check_none_up(subject)
                await self._start(subject, subject.specs)

        self.check(check())

    def test_a_start_that_takes_too_long_starts_nothing(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                report = await subject.fleet.start(subject.specs[:2], self.too_short_s)
                assert report.started == ()
                assert report.failed
                await self._check_none_up(subject)
                await self._start(subject, subject.specs[:2])

        self.check(check())

    def test_a_stopped_worker_is_lost_and_its_end_is_no_event(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                await self._start(subject, subject.specs[:2])
                first, second = (spec.worker for spec in subject.specs[:2])
                events = subject.fleet.events()
                event = asyncio.ensure_future(anext(events))
                await subject.fleet.stop([first, WorkerId(9999)], 0.0)
                await subject.fleet.stop([first], 0.0)
                with pytest.raises(WorkerLost):
                    subject.fleet.engine(first)
                await subject.fleet.engine(second).stats()
                await asyncio.sleep(self.settle_s)
                assert not event.done()
                event.cancel()
                await asyncio.gather(event, return_exceptions=True)

        self.check(check())

    def test_a_death_is_told_once(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                await self._start(subject, subject.specs)
                events = subject.fleet.events()
                told = []
                for spec in subject.specs[:2]:
                    engine = subject.fleet.engine(spec.worker)
                    await subject.kill(spec.worker)
                    event = await anext(events)
                    assert isinstance(event, WorkerGone)
                    assert event.detail
                    told.append(event.worker)
                    with pytest.raises(WorkerLost):
                        await engine.stats()
                assert told == [spec.worker for spec in subject.specs[:2]]
                await subject.fleet.engine(subject.specs[2].worker).stats()

        self.check(check())

    def test_a_slot_that_comes_back_has_a_new_epoch(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                specs, epochs = subject.specs[:1], []
                worker = specs[0].worker
                events = subject.fleet.events()
                for end in ("kill", "stop", "none"):
                    await self._start(subject, specs)
                    epochs.append((await subject.fleet.engine(worker).info()).epoch)
                    if end == "kill":
                        await subject.kill(worker)
                        await anext(events)
                    await subject.fleet.stop([worker], 0.0)
                assert epochs[0] < epochs[1] < epochs[2]

        self.check(check())

    def test_sleep_ends_an_epoch(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                await self._start(subject, subject.specs[:2])
                worker, other = (spec.worker for spec in subject.specs[:2])
                before = [(await subject.fleet.engine(w).info()).epoch for w in (worker, other)]
                await subject.fleet.sleep([worker])
                await subject.fleet.wake([worker])
                after = [(await subject.fleet.engine(w).info()).epoch for w in (worker, other)]
                assert after[0] > before[0]
                assert after[1] == before[1]

        if self.supports_sleep:
            self.check(check())

    def test_a_worker_takes_any_role_of_rollout_and_stays_up(self) -> None:
        async def check() -> None:
            async with self.fleet() as subject:
                await self._start(subject, subject.specs[:1])
                worker = subject.specs[0].worker
                engine, before = subject.fleet.engine(worker), await subject.fleet.engine(worker).info()
                for role in (Role.PREFILL, Role.DECODE, Role.DECODE, Role.COLOCATED):
                    await subject.fleet.set_role(worker, role)
                    assert subject.fleet.engine(worker) is engine
                assert await engine.info() == before  # its KV is as good as it was
                with pytest.raises(EngineError):
                    await subject.fleet.set_role(worker, Role.TRAINING)
                with pytest.raises(WorkerLost):
                    await subject.fleet.set_role(WorkerId(9999), Role.DECODE)

        self.check(check())

    async def _start(self, subject: FleetSubject, specs: Sequence[WorkerSpec]) -> None:
        report = await subject.fleet.start(specs, self.start_timeout_s)
        assert report.failed == {}

    async def _check_none_up(self, subject: FleetSubject) -> None:
        for spec in subject.specs:
            with pytest.raises(WorkerLost):
                subject.fleet.engine(spec.worker)
