"""Contract of `GpuSource`: events come in order, and only a standing offer can be accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

from pearl.core.state import Gpu, GpuOwner
from pearl.ports import GpuSource, GpuSourceEvent, Notice, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId, NodeId
from pearl.testing.contracts.base import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSourceSubject:
    """A source under test, with nothing on offer."""

    source: GpuSource
    cause: Callable[[GpuSourceEvent], Awaitable[None]]
    """Makes the world behind the source do what the event tells of."""


class GpuSourceContract(Contract):
    """Subclass it and give `source`."""

    def source(self) -> AbstractAsyncContextManager[GpuSourceSubject]:
        """A fresh source."""
        raise NotImplementedError

    def test_events_come_in_order(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                later_s = asyncio.get_running_loop().time() + 1000
                caused: list[GpuSourceEvent] = [
                    _offer("one", "a", "b"),
                    _offer("two", "c"),
                    Notice(gpus=(GpuId("a"),), deadline_s=later_s),
                    Withdrawn(gpus=(GpuId("a"),)),
                ]
                events = subject.source.events()
                await subject.cause(caused[0])
                assert await anext(events) == caused[0]
                for event in caused[1:]:
                    await subject.cause(event)
                assert [await anext(events) for _ in caused[1:]] == caused[1:]

        self.check(check())

    def test_an_offer_is_accepted_whole_or_in_parts(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                await self._offered(subject, _offer("one", "a", "b", "c"))
                assert await subject.source.accept(LeaseId("one"), [GpuId("b")])
                assert await subject.source.accept(LeaseId("one"), [GpuId("a"), GpuId("c")])

        self.check(check())

    def test_what_is_not_on_offer_cannot_be_accepted(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                await self._offered(subject, _offer("one", "a"))
                assert not await subject.source.accept(LeaseId("other"), [GpuId("a")])
                assert not await subject.source.accept(LeaseId("one"), [GpuId("a"), GpuId("z")])
                assert await subject.source.accept(LeaseId("one"), [GpuId("a")])

        self.check(check())

    def test_an_offer_that_was_withdrawn_is_over(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                events = await self._offered(subject, _offer("one", "a", "b"))
                await subject.cause(Withdrawn(gpus=(GpuId("a"),)))
                assert isinstance(await anext(events), Withdrawn)
                assert not await subject.source.accept(LeaseId("one"), [GpuId("a")])
                assert not await subject.source.accept(LeaseId("one"), [GpuId("b"), GpuId("a")])
                assert await subject.source.accept(LeaseId("one"), [GpuId("b")])

        self.check(check())

    def test_a_lease_that_has_ended_is_over(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                past_s = asyncio.get_running_loop().time() - 1
                await self._offered(subject, _offer("one", "a", end_s=past_s))
                assert not await subject.source.accept(LeaseId("one"), [GpuId("a")])

        self.check(check())

    def test_gpus_can_be_given_back(self) -> None:
        async def check() -> None:
            async with self.source() as subject:
                events = await self._offered(subject, _offer("one", "a", "b"))
                assert await subject.source.accept(LeaseId("one"), [GpuId("a"), GpuId("b")])
                await subject.source.give_back([GpuId("a")])
                await subject.cause(Withdrawn(gpus=(GpuId("b"),)))
                assert await anext(events) == Withdrawn(gpus=(GpuId("b"),))
                await subject.source.give_back([GpuId("b")])

        self.check(check())

    async def _offered(self, subject: GpuSourceSubject, offer: Offered) -> AsyncIterator[GpuSourceEvent]:
        events = subject.source.events()
        await subject.cause(offer)
        assert await anext(events) == offer
        return events


def _offer(lease: str, *gpus: str, end_s: float | None = None) -> Offered:
    offered = tuple(Gpu(id=GpuId(gpu), node=NodeId("outside"), owner=GpuOwner.EXTERNAL) for gpu in gpus)
    return Offered(lease=LeaseId(lease), gpus=offered, end_s=end_s)
