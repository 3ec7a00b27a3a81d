"""Schedules of faults: drawn alike, written and read alike, applied at their times."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest

from pearl.errors import ProfileError, WorkerLost
from pearl.records.ids import WorkerId
from pearl.sim.environment import EnvironmentFaultKind, InjectedFault
from pearl.sim.faults import (
    Fault,
    FaultInjector,
    FaultKind,
    FaultRates,
    drawn_faults,
    faults_from_json,
    faults_to_json,
)
from pearl.virtual_time import run_virtual

ALL = FaultRates(
    per_hour=dict.fromkeys(FaultKind, 20.0), workers=4, mean_s=30.0, notice_s=25.0, slowest=3.0, max_units=2
)


class Ledger:
    """A fleet, a pool and a source that only write down what is done to them, and when."""

    def __init__(self, workers: Sequence[int] = (0, 1)) -> None:
        self.workers = list(workers)
        self.calls: list[tuple[float, str, object]] = []

    def _note(self, what: str, value: object) -> None:
        self.calls.append((asyncio.get_running_loop().time(), what, value))

    def engine(self, worker: WorkerId) -> object:
        if worker not in self.workers:
            raise WorkerLost(f"no worker {worker}")
        return object()

    def kill(self, worker: WorkerId) -> None:
        self._note("kill", worker)
        if worker in self.workers:
            self.workers.remove(worker)

    def hang(self, worker: WorkerId) -> None:
        self._note("hang", worker)

    def unhang(self, worker: WorkerId) -> None:
        self._note("unhang", worker)

    def slow(self, worker: WorkerId, factor: float) -> None:
        self._note("slow", (worker, factor))

    def fail_next_start(self, worker: WorkerId) -> None:
        self._note("fail_next_start", worker)

    def fail_next(self, fault: InjectedFault) -> None:
        self._note("fail_next", (fault.kind, fault.extra_s))

    def offer(self, units: int) -> None:
        self._note("offer", units)

    def notice(self, units: int, notice_s: float | None) -> int:
        self._note("notice", (units, notice_s))
        return units - 1


def applied(faults: Sequence[Fault], ledger: Ledger) -> FaultInjector:
    async def check() -> FaultInjector:
        await asyncio.sleep(100)
        injector = FaultInjector(faults=faults, fleet=ledger, environments=ledger, source=ledger)
        await injector.run()
        return injector

    return run_virtual(check())


def test_the_same_seed_draws_the_same_and_another_another() -> None:
    schedules = [drawn_faults(seed, 3600.0, ALL) for seed in (1, 1, 2)]
    assert schedules[0] == schedules[1] != schedules[2]
    times = [fault.at_s for fault in schedules[0]]
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 3600
    # 11 kinds of 20 an hour: within four standard deviations of 220.
    assert abs(len(times) - 220) < 4 * 220**0.5
    assert {fault.kind for fault in schedules[0]} == set(FaultKind)
    assert {fault.worker for fault in schedules[0]} == {0, 1, 2, 3}
    assert {fault.units for fault in schedules[0]} == {1, 2}
    assert {fault.seconds for fault in schedules[0] if fault.kind is FaultKind.NOTICE} == {25.0}
    assert all(1.0 <= fault.factor <= 3.0 for fault in schedules[0])


def test_kinds_are_drawn_apart() -> None:
    both = drawn_faults(5, 7200.0, FaultRates(per_hour={FaultKind.KILL: 9.0, FaultKind.SLOW: 9.0}))
    kills = drawn_faults(5, 7200.0, FaultRates(per_hour={FaultKind.KILL: 9.0}))
    assert kills
    assert tuple(fault for fault in both if fault.kind is FaultKind.KILL) == kills


def test_schedules_are_written_and_read_back() -> None:
    faults = drawn_faults(3, 3600.0, ALL)
    assert faults_from_json(faults_to_json(faults)) == faults
    assert faults_from_json('[{"at_s": 5, "kind": "kill"}, {"at_s": 1, "kind": "hang", "seconds": 2}]') == (
        Fault(at_s=1, kind=FaultKind.HANG, seconds=2),
        Fault(at_s=5, kind=FaultKind.KILL),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"faults: no JSON: "),
        ("{}", r"faults: got dict, want a list"),
        ('[{"at_s": 1}]', r"faults: entry 0: got \{'at_s': 1\}, want at_s, kind and maybe \['factor', "),
        ('[{"at_s": 1, "kind": "kill", "who": 2}]', r"faults: entry 0: got .*'who'"),
        ('[{"at_s": 1, "kind": "die"}]', r"faults: entry 0: kind: got 'die', want one of \['kill', 'hang'"),
        ('[{"at_s": 1, "kind": []}]', r"faults: entry 0: kind: got \[\], want one of"),
        ('[{"at_s": true, "kind": "kill"}]', r"faults: entry 0: at_s: got True, want a number"),
        ('[{"at_s": 1, "kind": "kill", "worker": 1.5}]', r"faults: entry 0: worker: got 1.5, want a number"),
        ('[{"at_s": NaN, "kind": "kill"}]', r"faults: entry 0: fault kill: at_s: got nan, want a finite number >= 0"),
        ('[{"at_s": 1, "kind": "slow", "factor": 0}]', r"factor: got 0, want a finite number > 0"),
        ('[{"at_s": 1, "kind": "rejoin", "units": 0}]', r"units: got 0, want a finite number >= 1"),
    ],
)
def test_schedules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        faults_from_json(text)


def test_rates_that_cannot_be() -> None:
    with pytest.raises(ProfileError, match=r"faults: per_hour of kill: got -1, want a finite number >= 0"):
        drawn_faults(1, 10.0, FaultRates(per_hour={FaultKind.KILL: -1}))


def test_faults_happen_at_their_times_counted_from_the_beginning() -> None:
    ledger = Ledger()
    faults = [
        Fault(at_s=0, kind=FaultKind.FAIL_START, worker=1),
        Fault(at_s=5, kind=FaultKind.HANG, worker=1, seconds=10),
        Fault(at_s=6, kind=FaultKind.SLOW, worker=0, seconds=2, factor=3.0),
        Fault(at_s=7, kind=FaultKind.NOTICE, units=2, seconds=30),
        Fault(at_s=9, kind=FaultKind.REJOIN, units=3),
        Fault(at_s=9, kind=FaultKind.ENV_SLOW, seconds=4),
        Fault(at_s=20, kind=FaultKind.KILL, worker=0),
    ]
    injector = applied(faults, ledger)
    assert ledger.calls == [
        (100, "fail_next_start", 1),
        (105, "hang", 1),
        (106, "slow", (0, 3.0)),
        (107, "notice", (2, 30)),
        (108, "slow", (0, 1.0)),
        (109, "offer", 3),
        (109, "fail_next", (EnvironmentFaultKind.SLOW, 4)),
        (115, "unhang", 1),
        (120, "kill", 0),
    ]
    assert [fault for _, fault in injector.applied] == faults
    assert injector.missed == []


def test_a_fault_behind_another_of_its_kind_takes_over_its_end() -> None:
    ledger = Ledger()
    applied(
        [
            Fault(at_s=0, kind=FaultKind.SLOW, worker=0, seconds=10, factor=2.0),
            Fault(at_s=4, kind=FaultKind.SLOW, worker=0, seconds=30, factor=5.0),
            Fault(at_s=5, kind=FaultKind.HANG, worker=0, seconds=3),
        ],
        ledger,
    )
    assert ledger.calls == [
        (100, "slow", (0, 2.0)),
        (104, "slow", (0, 5.0)),
        (105, "hang", 0),
        (108, "unhang", 0),
        (134, "slow", (0, 1.0)),
    ]


def test_what_hits_nothing_is_counted() -> None:
    faults = [
        Fault(at_s=1, kind=FaultKind.KILL, worker=0),
        Fault(at_s=2, kind=FaultKind.KILL, worker=0),
        Fault(at_s=3, kind=FaultKind.HANG, worker=0, seconds=5),
        Fault(at_s=4, kind=FaultKind.NOTICE, units=1),
    ]
    injector = applied(faults, Ledger())
    assert [fault for _, fault in injector.applied] == faults[:1]
    assert [(at_s, fault) for at_s, fault in injector.missed] == [
        (102, faults[1]),
        (103, faults[2]),
        (104, faults[3]),
    ]


def test_a_world_without_a_part_misses_its_faults() -> None:
    async def check() -> None:
        injector = FaultInjector(faults=[Fault(at_s=n, kind=kind) for n, kind in enumerate(FaultKind)])
        await injector.run()
        assert len(injector.missed) == len(FaultKind)

    run_virtual(check())


def test_cancelling_lets_no_further_one_happen() -> None:
    async def check() -> None:
        ledger = Ledger()
        injector = FaultInjector(faults=three_starts(), fleet=ledger)
        task = asyncio.create_task(injector.run())
        await asyncio.sleep(2.5)
        task.cancel()
        await asyncio.sleep(100)
        assert [what for _, what, _ in ledger.calls] == ["fail_next_start"] * 2

    run_virtual(check())


def three_starts() -> list[Fault]:
    return [Fault(at_s=n, kind=FaultKind.FAIL_START) for n in (1, 2, 3)]


def test_the_json_is_plain() -> None:
    (entry,) = json.loads(faults_to_json([Fault(at_s=1.5, kind=FaultKind.SLOW, worker=2, factor=3.0, seconds=4.0)]))
    assert entry == {"at_s": 1.5, "kind": "slow", "worker": 2, "seconds": 4.0, "factor": 3.0, "units": 1}
