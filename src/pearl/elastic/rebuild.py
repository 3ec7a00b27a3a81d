"""GPUs from outside: offers are taken, notices are heeded, and what is gone is gone.

Laws:

- whatever is offered is taken: whether a worker is started on it is for the policy to say;
- a notice is a state event like any other; what has to leave, and when, is decided;
- GPUs that are withdrawn take their workers with them at once; their requests go on elsewhere with every token they had.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pearl.core.decision import Moment
from pearl.core.state import GpusLeft, LeaseBegan, NoticeGiven, StateEvent
from pearl.core.survival import with_lease
from pearl.elastic.scheduler import Scheduler
from pearl.ports import GpuSource, GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId


@dataclass(slots=True, kw_only=True)
class Rebuilder:
    """Follows a source of GPUs."""

    source: GpuSource
    scheduler: Scheduler
    _since_s: dict[GpuId, float] = field(default_factory=dict)
    """When each GPU came."""

    async def run(self) -> None:
        """Follow it for ever."""
        async for event in self.source.events():
            await self._happen(event)

    async def _happen(self, event: GpuSourceEvent) -> None:
        scheduler = self.scheduler
        loop_s = asyncio.get_running_loop().time() - scheduler.now_s
        match event:
            case Offered():
                gpus = tuple(gpu for gpu in event.gpus if gpu.id not in scheduler.state.gpus)
                if not gpus or not await self.source.accept(event.lease, [gpu.id for gpu in gpus]):
                    return
                now_s = scheduler.now_s
                end_s = None if event.end_s is None else event.end_s - loop_s
                self._since_s |= {gpu.id: now_s for gpu in gpus}
                self._submit(LeaseBegan(lease=event.lease, gpus=gpus, at_s=now_s, end_s=end_s))
            case Notice():
                here = self._here(event.gpus)
                if not here:
                    return
                deadline_s = max(0.0, event.deadline_s - loop_s)
                self._submit(NoticeGiven(gpus=here, deadline_s=deadline_s, at_s=scheduler.now_s))
            case Withdrawn():
                self._withdrawn(event.gpus)
        scheduler.tell(Moment.GPUS_CHANGED)

    def _withdrawn(self, gpus: tuple[GpuId, ...]) -> None:
        scheduler = self.scheduler
        self._learn(gpus)
        here = self._here(gpus)
        if not here:
            return
        gone = set(here)
        workers = sorted(w.id for w in scheduler.state.workers.values() if not gone.isdisjoint(w.gpus))
        for worker in workers:
            scheduler.workers.router.retire(worker, "its GPUs were withdrawn")
            scheduler.end(worker)
        self._submit(GpusLeft(gpus=here))
        scheduler.executor.call_off(workers)

    def _learn(self, gpus: tuple[GpuId, ...]) -> None:
        """How long they lasted: each time of coming and going once."""
        ended = {self._since_s.pop(gpu) for gpu in gpus if gpu in self._since_s}
        for since_s in sorted(ended):
            lasted_s = max(0.0, self.scheduler.now_s - since_s)
            self.scheduler.leases = with_lease(self.scheduler.leases, lasted_s, ended=True)

    def _here(self, gpus: tuple[GpuId, ...]) -> tuple[GpuId, ...]:
        return tuple(gpu for gpu in gpus if gpu in self.scheduler.state.gpus)

    def _submit(self, event: StateEvent) -> None:
        self.scheduler.workers.state.submit(event)
