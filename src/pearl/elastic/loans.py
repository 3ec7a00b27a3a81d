"""GPUs that the trainer lends to rollout.

Laws:

- one loan or return at a time; what has begun ends before the next begins, also when whoever asked no longer waits;
- nothing is lent while training needs its GPUs;
- a GPU is lent at most once, and only what is lent is reclaimed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from pearl.errors import PearlError
from pearl.pipeline.concurrency import GuardExpired, Nursery, guard
from pearl.ports import Trainer
from pearl.records.ids import GpuId


@dataclass(slots=True, kw_only=True)
class Loans:
    """What rollout has of the trainer's."""

    trainer: Trainer
    nursery: Nursery
    timeout_s: float
    """For the trainer to move its state away, or back."""
    is_open: bool = True
    """False: training runs or is about to."""
    lent: dict[GpuId, None] = field(default_factory=dict)
    """In order of lending."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def lend(self, gpus: Collection[GpuId]) -> str | None:
        """Have these GPUs; or why not."""
        # Half a loan can be neither used nor returned: a caller that is cancelled leaves it to end by itself.
        return await asyncio.shield(self.nursery.spawn(self._lend(tuple(gpus)), name="elastic: loan"))

    async def reclaim(self, gpus: Collection[GpuId]) -> str | None:
        """Give back those of these GPUs that are lent; or why not."""
        return await self._return(lambda: gpus)

    async def reclaim_all(self, but: Callable[[], Collection[GpuId]]) -> str | None:
        """Give back all that is lent when a loan under way has ended, `but` what is used then; or why not."""

        def wanted() -> list[GpuId]:
            used = but()
            return [gpu for gpu in self.lent if gpu not in used]

        return await self._return(wanted)

    async def _return(self, gpus: Callable[[], Collection[GpuId]]) -> str | None:
        return await asyncio.shield(self.nursery.spawn(self._reclaim(gpus), name="elastic: return of a loan"))

    async def _lend(self, gpus: tuple[GpuId, ...]) -> str | None:
        async with self._turn:
            wanted = tuple(gpu for gpu in gpus if gpu not in self.lent)
            if not self.is_open:
                return "training needs its GPUs"
            try:
                if wanted:
                    async with guard(self.timeout_s, f"trainer: lending {len(wanted)} GPUs"):
                        await self.trainer.lend_gpus(wanted)
            except GuardExpired as error:
                # Nobody knows how far it got: it is to be reclaimed.
                self.lent |= dict.fromkeys(wanted)
                return str(error)
            except PearlError as error:
                return str(error)
            self.lent |= dict.fromkeys(wanted)
        return None

    async def _reclaim(self, gpus: Callable[[], Collection[GpuId]]) -> str | None:
        async with self._turn:
            wanted = tuple(gpu for gpu in gpus() if gpu in self.lent)
            try:
                if wanted:
                    async with guard(self.timeout_s, f"trainer: reclaiming {len(wanted)} GPUs"):
                        await self.trainer.reclaim_gpus(wanted)
            except PearlError as error:
                return str(error)
            for gpu in wanted:
                del self.lent[gpu]
        return None
