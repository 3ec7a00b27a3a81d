"""Seeded schedules of faults, as data, and the task that lets them happen.

A schedule is a tuple of records in order of time: the same seed gives the same schedule in every process, and it can be
written as JSON with a run and read back. Times count from when the injector begins. A fault that finds nothing to hit (a
worker that was lost already, no GPUs to take) is counted as missed.
"""

from __future__ import annotations

import asyncio
import enum
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Protocol

from pearl.errors import ProfileError, WorkerLost
from pearl.pipeline.tasks import derive_seed
from pearl.records.ids import WorkerId
from pearl.sim.environment import EnvironmentFaultKind, InjectedFault


class FaultKind(enum.Enum):
    """What goes wrong, or right again."""

    KILL = "kill"
    """A worker dies without notice."""
    HANG = "hang"
    """A worker does not answer for `seconds`."""
    SLOW = "slow"
    """A worker takes `factor` times as long for `seconds`."""
    FAIL_START = "fail_start"
    """The next start of a worker fails."""
    NOTICE = "notice"
    """`units` of external GPUs go after `seconds`."""
    REJOIN = "rejoin"
    """`units` of external GPUs are offered."""
    ENV_RAISE = "env_raise"
    ENV_HANG = "env_hang"
    ENV_LOST = "env_lost"
    ENV_NONSENSE = "env_nonsense"
    ENV_SLOW = "env_slow"
    """The next call of an environment takes `seconds` longer."""


_OF_ENVIRONMENTS: Mapping[FaultKind, EnvironmentFaultKind] = {
    FaultKind.ENV_RAISE: EnvironmentFaultKind.RAISE,
    FaultKind.ENV_HANG: EnvironmentFaultKind.HANG,
    FaultKind.ENV_LOST: EnvironmentFaultKind.LOST,
    FaultKind.ENV_NONSENSE: EnvironmentFaultKind.NONSENSE,
    FaultKind.ENV_SLOW: EnvironmentFaultKind.SLOW,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One thing that happens."""

    at_s: float
    """>= 0, since the injector began."""
    kind: FaultKind
    worker: int = 0
    """Slot, of what hits a worker."""
    seconds: float = 0.0
    """>= 0: how long it lasts, or how long before it the notice is given."""
    factor: float = 1.0
    """> 0, of SLOW."""
    units: int = 1
    """>= 1, of NOTICE and REJOIN."""

    def __post_init__(self) -> None:
        for name, least in (("at_s", 0.0), ("seconds", 0.0), ("worker", 0), ("units", 1)):
            if not least <= (value := getattr(self, name)) < math.inf:
                raise ProfileError(f"fault {self.kind.value}: {name}: got {value}, want a finite number >= {least:g}")
        if not 0 < self.factor < math.inf:
            raise ProfileError(f"fault {self.kind.value}: factor: got {self.factor}, want a finite number > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    """What a drawn schedule is made of."""

    per_hour: Mapping[FaultKind, float] = field(default_factory=dict)
    """Faults of each kind, >= 0; their times are a Poisson process."""
    workers: int = 1
    """Slots that are hit, 0 .. workers - 1."""
    mean_s: float = 60.0
    """Of `seconds`, exponential."""
    notice_s: float = 30.0
    """`seconds` of NOTICE."""
    slowest: float = 4.0
    """`factor` is uniform in 1 .. this."""
    max_units: int = 1
    """`units` is uniform in 1 .. this."""


def drawn_faults(seed: int, duration_s: float, rates: FaultRates) -> tuple[Fault, ...]:
    """A schedule, a pure function of its arguments; kinds are drawn apart, so one more changes none of the others."""
    faults: list[Fault] = []
    for kind in FaultKind:
        rate = rates.per_hour.get(kind, 0.0)
        if not 0 <= rate < math.inf:
            raise ProfileError(f"faults: per_hour of {kind.value}: got {rate}, want a finite number >= 0")
        source = random.Random(derive_seed("faults", seed, kind.value))
        at_s = source.expovariate(rate / 3600) if rate else math.inf
        while at_s < duration_s:
            seconds = source.expovariate(1 / rates.mean_s)
            faults.append(
                Fault(
                    at_s=at_s,
                    kind=kind,
                    worker=source.randrange(rates.workers),
                    seconds=rates.notice_s if kind is FaultKind.NOTICE else seconds,
                    factor=source.uniform(1.0, rates.slowest),
                    units=source.randint(1, rates.max_units),
                )
            )
            at_s += source.expovariate(rate / 3600)
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind.value)))


def faults_to_json(faults: Sequence[Fault]) -> str:
    """A schedule as JSON, one list."""
    return json.dumps([{**asdict(fault), "kind": fault.kind.value} for fault in faults])


def faults_from_json(text: str) -> tuple[Fault, ...]:
    """Read one back, in order of time.

    Raises:
        ProfileError: no list of faults; the message says which one.
    """
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"faults: no JSON: {error}") from error
    if not isinstance(entries, list):
        raise ProfileError(f"faults: got {type(entries).__name__}, want a list")
    return tuple(sorted((_fault(n, entry) for n, entry in enumerate(entries)), key=lambda fault: fault.at_s))


def _fault(number: int, entry: object) -> Fault:
    where = f"faults: entry {number}"
    known = {one.name for one in fields(Fault)}
    if not isinstance(entry, dict) or not {"at_s", "kind"} <= entry.keys() <= known:
        raise ProfileError(f"{where}: got {entry!r}, want at_s, kind and maybe {sorted(known - {'at_s', 'kind'})}")
    kinds = [kind.value for kind in FaultKind]
    if entry["kind"] not in kinds:
        raise ProfileError(f"{where}: kind: got {entry['kind']!r}, want one of {kinds}")
    numbers = {name: value for name, value in entry.items() if name != "kind"}
    for name, value in numbers.items():
        allowed = int if name in ("worker", "units") else (int, float)
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ProfileError(f"{where}: {name}: got {value!r}, want a number")
    try:
        return Fault(kind=FaultKind(entry["kind"]), **numbers)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from error


class FaultyFleet(Protocol):
    """What a simulated fleet lets happen to it; unknown workers are ignored."""

    def engine(self, worker: WorkerId, /) -> object:
        """Raises `WorkerLost` where there is none."""

    def kill(self, worker: WorkerId, /) -> None:
        """End its process."""

    def hang(self, worker: WorkerId, /) -> None:
        """Let it answer nobody."""

    def unhang(self, worker: WorkerId, /) -> None:
        """Let it go on."""

    def slow(self, worker: WorkerId, factor: float, /) -> None:
        """Let it take so many times as long as at its start."""

    def fail_next_start(self, worker: WorkerId, /) -> None:
        """Let its next start fail."""


class FaultyPool(Protocol):
    """As `SimEnvironmentPool`."""

    def fail_next(self, fault: InjectedFault, /) -> None:
        """Let the next call of an environment go wrong."""


class FaultySource(Protocol):
    """As `SimGpuSource`."""

    def offer(self, units: int, /) -> None:
        """Offer so many units."""

    def notice(self, units: int, notice_s: float | None, /) -> int:
        """Take so many units away after the notice; how many there were."""


@dataclass(slots=True, kw_only=True)
class FaultInjector:
    """Applies a schedule to a world."""

    faults: Sequence[Fault]
    """In order of time."""
    fleet: FaultyFleet | None = None
    environments: FaultyPool | None = None
    source: FaultySource | None = None
    applied: list[tuple[float, Fault]] = field(default_factory=list)
    """`(loop time, fault)` of those that hit something, in order."""
    missed: list[tuple[float, Fault]] = field(default_factory=list)
    """Those that did not."""
    _slow: dict[WorkerId, int] = field(default_factory=dict)
    """Which slowing holds: only its own end ends it."""
    _hung: dict[WorkerId, int] = field(default_factory=dict)

    async def run(self) -> None:
        """Let them happen, each at its time, until the last one is over; cancelling it lets no further one happen."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        ends: list[tuple[float, int, FaultKind, WorkerId]] = []
        for number, fault in enumerate(self.faults):
            await self._end_until(began_s + fault.at_s, ends)
            await _sleep_until(began_s + fault.at_s)
            hit = self._apply(number, fault)
            (self.applied if hit else self.missed).append((loop.time(), fault))
            if hit and fault.kind in (FaultKind.HANG, FaultKind.SLOW):
                ends.append((loop.time() + fault.seconds, number, fault.kind, WorkerId(fault.worker)))
        await self._end_until(math.inf, ends)

    async def _end_until(self, until_s: float, ends: list[tuple[float, int, FaultKind, WorkerId]]) -> None:
        for end in sorted(end for end in ends if end[0] <= until_s):
            ends.remove(end)
            await _sleep_until(end[0])
            self._end(*end[1:])

    def _end(self, number: int, kind: FaultKind, worker: WorkerId) -> None:
        holding = self._hung if kind is FaultKind.HANG else self._slow
        if self.fleet is None or holding.get(worker) != number:
            return
        del holding[worker]
        if kind is FaultKind.HANG:
            self.fleet.unhang(worker)
        else:
            self.fleet.slow(worker, 1.0)

    def _apply(self, number: int, fault: Fault) -> bool:
        """Whether it hit something."""
        if fault.kind in _OF_ENVIRONMENTS:
            if self.environments is not None:
                kind = _OF_ENVIRONMENTS[fault.kind]
                self.environments.fail_next(InjectedFault(kind=kind, extra_s=fault.seconds))
            return self.environments is not None
        if fault.kind in (FaultKind.NOTICE, FaultKind.REJOIN):
            return self._change_gpus(fault)
        return self.fleet is not None and self._hit_worker(self.fleet, number, fault)

    def _change_gpus(self, fault: Fault) -> bool:
        if self.source is None:
            return False
        if fault.kind is FaultKind.NOTICE:
            return self.source.notice(fault.units, fault.seconds) > 0
        self.source.offer(fault.units)
        return True

    def _hit_worker(self, fleet: FaultyFleet, number: int, fault: Fault) -> bool:
        worker = WorkerId(fault.worker)
        try:
            fleet.engine(worker)
            is_up = True
        except WorkerLost:
            is_up = False
        match fault.kind:
            case FaultKind.KILL:
                fleet.kill(worker)  # also one that only starts
            case FaultKind.HANG if is_up:
                fleet.hang(worker)
                self._hung[worker] = number
            case FaultKind.SLOW if is_up:
                fleet.slow(worker, fault.factor)
                self._slow[worker] = number
            case FaultKind.FAIL_START:
                fleet.fail_next_start(worker)
                return True
        return is_up


async def _sleep_until(at_s: float) -> None:
    now_s = asyncio.get_running_loop().time()
    if at_s > now_s:
        await asyncio.sleep(at_s - now_s)
