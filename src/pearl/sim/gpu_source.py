"""A simulated GPU source: replays how many GPUs there are over time, and takes and gives more on demand.

Laws: GPUs go at their time, whether or not anybody reads the events; what the job holds goes to `on_withdrawn`, so that the
world can end the workers there; what it has given back it may take again while the offer stands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId
from pearl.sim.leases import Availability, SourceSettings, Timed, Units, schedule, shifted


class SimGpuSource:
    """A `GpuSource` over a step function of available GPUs."""

    def __init__(
        self,
        availability: Availability = (),
        settings: SourceSettings | None = None,
        *,
        on_withdrawn: Callable[[tuple[GpuId, ...]], None] | None = None,
    ) -> None:
        """Times of `availability` count from `begin`, which the first use calls.

        `on_withdrawn` is told which GPUs the job held when they went. `notice` and `offer` hand out GPUs of their own, whose
        names end in `+`.
        """
        self._settings = settings or SourceSettings()
        self._events: deque[Timed] = deque(schedule(availability, self._settings))
        self._extra = Units(replace(self._settings, name=f"{self._settings.name}+"))
        self._extra_leases = 0
        self._leaving: dict[int, None] = {}
        """Units of `offer` that are under notice."""
        self._on_withdrawn = on_withdrawn
        self._start_s: float | None = None
        self._queue: deque[GpuSourceEvent] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._offers: dict[LeaseId, Offered] = {}
        self.held: dict[GpuId, LeaseId] = {}
        """GPUs that the job has accepted and still has."""
        self.withdrawn_held: list[GpuId] = []
        """GPUs taken away while the job had them."""

    @property
    def began_s(self) -> float | None:
        """Loop time from which times count; None before the first use."""
        return self._start_s

    @property
    def available(self) -> tuple[GpuId, ...]:
        """GPUs that were offered and not withdrawn, in order of coming."""
        return tuple(gpu.id for offer in self._offers.values() for gpu in offer.gpus)

    def begin(self) -> None:
        """Let the times begin now; repeating it does nothing."""
        if self._start_s is None:
            self._start_s = asyncio.get_running_loop().time()
            self._arm()

    def events(self) -> AsyncIterator[GpuSourceEvent]:
        """Events in order; never ends."""
        return self._stream()

    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        """Take GPUs of an offer that still stands."""
        self.begin()
        offer = self._offers.get(lease)
        if offer is None or (offer.end_s is not None and asyncio.get_running_loop().time() >= offer.end_s):
            return False
        free = {gpu.id for gpu in offer.gpus if gpu.id not in self.held}
        if not gpus or len(set(gpus)) != len(gpus) or not free.issuperset(gpus):
            return False
        self.held.update(dict.fromkeys(gpus, lease))
        return True

    async def give_back(self, gpus: Sequence[GpuId]) -> None:
        """Return GPUs; those that the job does not have are ignored."""
        self.begin()
        for gpu in gpus:
            self.held.pop(gpu, None)

    def push(self, event: GpuSourceEvent) -> None:
        """Let an event happen now; its times are loop time."""
        self.begin()
        match event:
            case Offered():
                self._offers[event.lease] = event
            case Withdrawn(gpus=gpus):
                self._withdraw(gpus)
            case Notice():
                pass
        self._queue.append(event)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def offer(self, units: int) -> None:
        """Offer so many units more, now; those that `notice` took away come back first."""
        if units < 1:
            raise ValueError(f"GPU source {self._settings.name}: offer: got {units} units, want >= 1")
        lease = LeaseId(f"{self._settings.name}+lease{self._extra_leases}")
        self._extra_leases += 1
        self.push(Offered(lease=lease, gpus=self._extra.gpus(self._extra.come(units)), end_s=None))

    def notice(self, units: int, notice_s: float | None = None) -> int:
        """Take so many units of `offer` away, with notice or (0) at once; how many there were. None: as in the settings."""
        notice_s = self._settings.notice_s if notice_s is None else notice_s
        staying = [unit for unit in self._extra.here if unit not in self._leaving]
        going = self._extra.choose(units, staying)
        if not going:
            return 0
        if notice_s <= 0:
            self._take(going)
            return len(going)
        loop = asyncio.get_running_loop()
        self._leaving.update(dict.fromkeys(going))
        self.push(Notice(gpus=self._extra.ids(going), deadline_s=loop.time() + notice_s))
        loop.call_later(notice_s, self._take, going)
        return len(going)

    def _take(self, units: tuple[int, ...]) -> None:
        for unit in units:
            self._leaving.pop(unit, None)
        self._extra.go(units)
        self.push(Withdrawn(gpus=self._extra.ids(units)))

    def _withdraw(self, gpus: tuple[GpuId, ...]) -> None:
        gone = frozenset(gpus)
        for lease, offer in list(self._offers.items()):
            rest = tuple(gpu for gpu in offer.gpus if gpu.id not in gone)
            if rest:
                self._offers[lease] = replace(offer, gpus=rest)
            else:
                del self._offers[lease]
        held = tuple(gpu for gpu in gpus if self.held.pop(gpu, None) is not None)
        self.withdrawn_held += held
        if held and self._on_withdrawn is not None:
            self._on_withdrawn(held)

    def _arm(self) -> None:
        """One timer, for the next event."""
        if self._events and self._start_s is not None:
            asyncio.get_running_loop().call_at(self._start_s + self._events[0][0], self._happen)

    def _happen(self) -> None:
        assert self._start_s is not None, "armed by `begin`"
        at_s = self._events[0][0]
        while self._events and self._events[0][0] == at_s:
            self.push(shifted(self._events.popleft()[1], self._start_s))
        self._arm()

    async def _stream(self) -> AsyncIterator[GpuSourceEvent]:
        self.begin()
        while True:
            while self._queue:
                yield self._queue.popleft()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter
