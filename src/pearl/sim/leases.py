"""From how many GPUs there are over time to which ones: a step function becomes offers, notices and withdrawals.

GPUs come and go in units of a worker's GPUs, each unit on one node. Invariant *conserved*: at every time the units that were
offered and not withdrawn are those of the step function, rounded down to whole units.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pearl.core.state import Gpu, GpuOwner
from pearl.pipeline.tasks import derive_seed
from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId, NodeId

Availability = Sequence[tuple[float, int]]
"""`(time_s, gpus)`, times rising from >= 0: a right-continuous step function, 0 before the first; the last level stays."""
Timed = tuple[float, GpuSourceEvent]
"""`(at_s, event)`."""


class Leaving(enum.Enum):
    """Which GPUs go when some must."""

    NEWEST = "newest"
    """Those that came last."""
    SEEDED = "seeded"
    """Any, drawn from the seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSettings:
    """How a source hands out GPUs."""

    unit_gpus: int = 1
    """>= 1: GPUs come and go by so many, of one node."""
    node_gpus: int = 8
    """Of a node; whole units."""
    notice_s: float = 0.0
    """Between notice and loss, >= 0; 0: none is given."""
    leaving: Leaving = Leaving.NEWEST
    ends_known: bool = False
    """Whether an offer says when its GPUs will go."""
    rejoin: bool = True
    """Whether GPUs that come are, where there are any, those that went before; else each is seen once only."""
    seed: int = 0
    name: str = "external"
    """Of leases, nodes and GPUs."""

    def __post_init__(self) -> None:
        where = f"GPU source {self.name}"
        if self.unit_gpus < 1:
            raise ValueError(f"{where}: unit_gpus: got {self.unit_gpus}, want >= 1")
        if self.node_gpus < 1 or self.node_gpus % self.unit_gpus:
            raise ValueError(f"{where}: node_gpus: got {self.node_gpus}, want a multiple of {self.unit_gpus} GPUs")
        if not 0 <= self.notice_s < math.inf:
            raise ValueError(f"{where}: notice_s: got {self.notice_s}, want a finite number >= 0")


class Units:
    """Who is here: units by number, which have places of their own on nodes."""

    def __init__(self, settings: SourceSettings) -> None:
        self._settings = settings
        self._random = random.Random(derive_seed("gpu source", settings.seed, settings.name))
        self._here: dict[int, None] = {}
        self._next = 0

    @property
    def here(self) -> tuple[int, ...]:
        """Units, in order of coming."""
        return tuple(self._here)

    def come(self, count: int) -> tuple[int, ...]:
        """The units that come, in order."""
        came: list[int] = []
        number = 0 if self._settings.rejoin else self._next
        while len(came) < count:
            if number not in self._here:
                came.append(number)
            number += 1
        self._here.update(dict.fromkeys(came))
        self._next = max(self._next, number)
        return tuple(came)

    def choose(self, count: int, among: Sequence[int]) -> tuple[int, ...]:
        """The units that must go, of those among which it may choose, in order of coming; as many as there are at most."""
        if self._settings.leaving is Leaving.NEWEST:
            return tuple(reversed(among))[:count]
        return tuple(self._random.sample(list(among), min(count, len(among))))

    def go(self, units: Sequence[int]) -> None:
        """Units are gone."""
        for unit in units:
            del self._here[unit]

    def gpus(self, units: Sequence[int]) -> tuple[Gpu, ...]:
        """The GPUs of units, in order of their numbers."""
        settings = self._settings
        return tuple(
            Gpu(
                id=GpuId(f"{settings.name}{number:04}"),
                node=NodeId(f"{settings.name}-node{number // settings.node_gpus:03}"),
                owner=GpuOwner.EXTERNAL,
            )
            for unit in sorted(units)
            for number in range(unit * settings.unit_gpus, (unit + 1) * settings.unit_gpus)
        )

    def ids(self, units: Sequence[int]) -> tuple[GpuId, ...]:
        """Their ids."""
        return tuple(gpu.id for gpu in self.gpus(units))


def schedule(availability: Availability, settings: SourceSettings) -> tuple[Timed, ...]:
    """All events of a step function, in order of time; of one time, withdrawals before notices before offers.

    Raises:
        ValueError: times that do not rise, or a number out of range.
    """
    _check(availability)
    units = Units(settings)
    offers: list[tuple[float, tuple[int, ...]]] = []
    losses: list[tuple[float, tuple[int, ...]]] = []
    begun: dict[int, float] = {}
    noticed: dict[float, dict[float, list[int]]] = {}
    for at_s, gpus in availability:
        change = gpus // settings.unit_gpus - len(units.here)
        if change > 0:
            came = units.come(change)
            begun.update(dict.fromkeys(came, at_s))
            offers.append((at_s, came))
        elif change < 0:
            going = units.choose(-change, units.here)
            units.go(going)
            losses.append((at_s, going))
            for unit in going if settings.notice_s else ():
                told_s = max(begun[unit], at_s - settings.notice_s)
                noticed.setdefault(told_s, {}).setdefault(at_s, []).append(unit)
    offered_s = frozenset(at_s for at_s, _ in offers)
    events: list[tuple[float, int, GpuSourceEvent]] = []
    events += [(at_s, 0, Withdrawn(gpus=units.ids(going))) for at_s, going in losses]
    events += [
        # What is noticed the moment it comes is noticed after its offer.
        (told_s, 3 if told_s in offered_s else 1, _notice(units, going, at_s))
        for told_s, by_end in noticed.items()
        for at_s, going in by_end.items()
    ]
    events += [(at_s, 2, offer) for at_s, offer in _offers(units, offers, losses, settings)]
    return tuple((at_s, event) for at_s, _, event in sorted(events, key=lambda entry: entry[:2]))


def _notice(units: Units, going: Sequence[int], deadline_s: float) -> Notice:
    return Notice(gpus=units.ids(going), deadline_s=deadline_s)


def _offers(
    units: Units,
    offers: Sequence[tuple[float, tuple[int, ...]]],
    losses: Sequence[tuple[float, tuple[int, ...]]],
    settings: SourceSettings,
) -> list[tuple[float, Offered]]:
    """One lease for what comes together; where ends are known, for what comes and goes together."""
    made: list[tuple[float, Offered]] = []
    for at_s, came in offers:
        by_end: dict[float | None, list[int]] = {}
        for unit in came:
            end_s = None
            if settings.ends_known:
                end_s = next((gone_s for gone_s, going in losses if gone_s > at_s and unit in going), None)
            by_end.setdefault(end_s, []).append(unit)
        for end_s, together in by_end.items():
            lease = LeaseId(f"{settings.name}-lease{len(made)}")
            made.append((at_s, Offered(lease=lease, gpus=units.gpus(together), end_s=end_s)))
    return made


def _check(availability: Availability) -> None:
    before_s = -math.inf
    for row, (at_s, gpus) in enumerate(availability):
        if not (0 <= at_s < math.inf and at_s > before_s):
            raise ValueError(f"availability: row {row}: got time {at_s} s, want rising numbers >= 0")
        if gpus < 0:
            raise ValueError(f"availability: row {row}: got {gpus} GPUs, want >= 0")
        before_s = at_s


def shifted(event: GpuSourceEvent, by_s: float) -> GpuSourceEvent:
    """The event, with the times inside it later."""
    match event:
        case Offered(end_s=float() | int() as end_s):
            return replace(event, end_s=end_s + by_s)
        case Notice(deadline_s=deadline_s):
            return replace(event, deadline_s=deadline_s + by_s)
        case _:
            return event
