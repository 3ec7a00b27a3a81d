"""A fake GPU source: offers, notices and withdrawals by a script, or pushed by hand."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from pearl.ports import GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId


class FakeGpuSource:
    """A `GpuSource` in this process; GPUs go at the time of their event, whether or not it has been read."""

    def __init__(self, script: Sequence[tuple[float, GpuSourceEvent]] = ()) -> None:
        """`script`: `(at_s, event)`; all its times, those inside events too, count from the first use of the source."""
        self._script = deque(sorted(script, key=lambda entry: entry[0]))
        self._start_s: float | None = None
        self._queue: deque[GpuSourceEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._offers: dict[LeaseId, Offered] = {}
        self.held: dict[GpuId, LeaseId] = {}
        """GPUs that the job has accepted and still has."""
        self.accepted: list[tuple[LeaseId, tuple[GpuId, ...]]] = []
        self.given_back: list[GpuId] = []
        self.withdrawn_held: list[GpuId] = []
        """GPUs taken away while the job had them."""

    def events(self) -> AsyncIterator[GpuSourceEvent]:
        """Events in order; never ends."""
        return self._stream()

    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        """Take GPUs of an offer that still stands."""
        now_s = self._advance()
        offer = self._offers.get(lease)
        if offer is None or (offer.end_s is not None and now_s >= offer.end_s):
            return False
        free = {gpu.id for gpu in offer.gpus} - set(self.held)
        if not gpus or len(set(gpus)) != len(gpus) or not free.issuperset(gpus):
            return False
        self.held.update(dict.fromkeys(gpus, lease))
        self.accepted.append((lease, tuple(gpus)))
        return True

    async def give_back(self, gpus: Sequence[GpuId]) -> None:
        """Return GPUs; those that the job does not have are ignored."""
        self._advance()
        for gpu in gpus:
            if self.held.pop(gpu, None) is not None:
                self.given_back.append(gpu)

    def push(self, event: GpuSourceEvent) -> None:
        """Let an event happen now; its times are loop time."""
        self._advance()
        self._happen(event)
        self._wake()

    async def _stream(self) -> AsyncIterator[GpuSourceEvent]:
        loop = asyncio.get_running_loop()
        while True:
            self._advance()
            while self._queue:
                yield self._queue.popleft()
                self._advance()
            self._waiter = loop.create_future()
            timer = None
            if self._script:
                timer = loop.call_at((self._start_s or 0.0) + self._script[0][0], self._wake)
            try:
                await self._waiter
            finally:
                if timer is not None:
                    timer.cancel()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _advance(self) -> float:
        now_s = asyncio.get_running_loop().time()
        if self._start_s is None:
            self._start_s = now_s
        while self._script and self._start_s + self._script[0][0] <= now_s:
            self._happen(_shifted(self._script.popleft()[1], self._start_s))
        return now_s

    def _happen(self, event: GpuSourceEvent) -> None:
        match event:
            case Offered():
                self._offers[event.lease] = event
            case Withdrawn(gpus=gpus):
                gone = set(gpus)
                for lease, offer in list(self._offers.items()):
                    rest = tuple(gpu for gpu in offer.gpus if gpu.id not in gone)
                    self._offers[lease] = replace(offer, gpus=rest)
                self.withdrawn_held += [gpu for gpu in gpus if self.held.pop(gpu, None) is not None]
            case Notice():
                pass
        self._queue.append(event)


def _shifted(event: GpuSourceEvent, start_s: float) -> GpuSourceEvent:
    match event:
        case Offered(end_s=end_s) if end_s is not None:
            return replace(event, end_s=end_s + start_s)
        case Notice(deadline_s=deadline_s):
            return replace(event, deadline_s=deadline_s + start_s)
        case _:
            return event
