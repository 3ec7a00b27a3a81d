"""GPUs from outside: offers are taken, notices are heeded, and what is gone is gone.

Laws:

- whatever is offered is taken: whether a worker is started on it is for the policy to say;
- a notice is a state event like any other; what has to leave, and when, is decided;
- GPUs that are withdrawn take their workers with them at once; their requests go on elsewhere with every token they had.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from pearl.core.decision import Moment
from pearl.core.state import GpuOwner, GpusLeft, LeaseBegan, NoticeGiven
from pearl.core.survival import with_lease
from pearl.elastic.scheduler import Scheduler
from pearl.errors import PearlError
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.ports import GpuSource, GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId

_log = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 60.0
"""For a source to answer: others of its events wait meanwhile."""


@dataclass(slots=True, kw_only=True)
class Rebuilder:
    """Follows a source of GPUs."""

    source: GpuSource
    scheduler: Scheduler
    is_closing: bool = False
    """Set where the run is about to end: nothing is taken any more."""
    _since_s: dict[GpuId, float] = field(default_factory=dict)
    """When each GPU came."""

    async def run(self) -> None:
        """Follow it for as long as it goes on; without it the fleet keeps what it has."""
        try:
            async for event in self.source.events():
                await self._happen(event)
        except PearlError as error:
            _log.warning("GPU source: %s; GPUs from outside come and go unheard from now on", error)

    async def _happen(self, event: GpuSourceEvent) -> None:
        match event:
            case Offered():
                changed = await self._offered(event)
            case Notice():
                changed = self._notice(event)
            case Withdrawn():
                changed = self._withdrawn(event.gpus)
        if changed:
            self.scheduler.tell(Moment.GPUS_CHANGED)

    async def _offered(self, offer: Offered) -> bool:
        """Take what is not here already; what comes too late goes back."""
        scheduler = self.scheduler
        gpus = tuple(gpu for gpu in offer.gpus if gpu.id not in scheduler.state.gpus)
        names = tuple(gpu.id for gpu in gpus)
        if self.is_closing or not gpus or self._is_over(offer) or not await self._accept(offer.lease, names):
            return False
        if self.is_closing or self._is_over(offer):
            await self._give_back(names)
            return False
        now_s = scheduler.now_s
        end_s = None if offer.end_s is None else offer.end_s - scheduler.start_s
        event = LeaseBegan(lease=self._lease(offer.lease), gpus=gpus, at_s=now_s, end_s=end_s)
        # What is offered again has gone meanwhile, whether or not that was said.
        self._learn(names)
        if scheduler.workers.state.submit(event) is not None:
            await self._give_back(names)
            return False
        self._since_s |= dict.fromkeys(names, now_s)
        return True

    def _is_over(self, offer: Offered) -> bool:
        return offer.end_s is not None and offer.end_s <= asyncio.get_running_loop().time()

    def _lease(self, lease: LeaseId) -> LeaseId:
        """Its name in the state: GPUs that come later under a lease of which some are still here are a lease of their own."""
        held, name, number = self.scheduler.state.leases, lease, 1
        while name in held:
            number += 1
            name = LeaseId(f"{lease}#{number}")
        return name

    async def _accept(self, lease: LeaseId, gpus: tuple[GpuId, ...]) -> bool:
        try:
            async with guard(ANSWER_TIMEOUT_S, f"GPU source: accepting lease {lease}"):
                return await self.source.accept(lease, gpus)
        except GuardExpired as error:
            # Whether it was taken is not known: to have it and not to know would cost for ever.
            _log.warning("%s", error)
            await self._give_back(gpus)
            return False

    async def _give_back(self, gpus: tuple[GpuId, ...]) -> None:
        try:
            async with guard(ANSWER_TIMEOUT_S, f"GPU source: giving back {len(gpus)} GPUs"):
                await self.source.give_back(gpus)
        except GuardExpired as error:
            _log.warning("%s", error)

    def _notice(self, notice: Notice) -> bool:
        scheduler = self.scheduler
        here = self._here(notice.gpus)
        if here:
            deadline_s = max(0.0, notice.deadline_s - scheduler.start_s)
            event = NoticeGiven(gpus=here, deadline_s=deadline_s, at_s=scheduler.now_s)
            return scheduler.workers.state.submit(event) is None
        return False

    def _withdrawn(self, gpus: tuple[GpuId, ...]) -> bool:
        scheduler = self.scheduler
        self._learn(gpus)
        here = self._here(gpus)
        if not here:
            return False
        scheduler.hands.forgive(here)
        workers = sorted(w.id for w in scheduler.state.workers.values() if any(gpu in here for gpu in w.gpus))
        for worker in workers:
            scheduler.workers.router.retire(worker, "its GPUs were withdrawn")
        scheduler.workers.state.submit(GpusLeft(gpus=here))
        scheduler.forget(workers)
        return True

    def _learn(self, gpus: tuple[GpuId, ...]) -> None:
        """How long they lasted: each time of coming and going once."""
        ended = dict.fromkeys(self._since_s.pop(gpu) for gpu in gpus if gpu in self._since_s)
        for since_s in sorted(ended):
            lasted_s = max(0.0, self.scheduler.now_s - since_s)
            self.scheduler.leases = with_lease(self.scheduler.leases, lasted_s, ended=True)

    def _here(self, gpus: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
        """Those that are here, each once, and came from outside: no source has a say in others."""
        found = self.scheduler.state.gpus
        return tuple(gpu for gpu in dict.fromkeys(gpus) if gpu in found and found[gpu].owner is GpuOwner.EXTERNAL)
