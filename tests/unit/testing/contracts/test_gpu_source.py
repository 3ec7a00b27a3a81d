"""The suite accepts the fake, and finds broken sources made from it."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pearl.ports import GpuSourceEvent, Offered, Withdrawn
from pearl.records.ids import GpuId, LeaseId
from pearl.testing.contracts.gpu_source import GpuSourceContract, GpuSourceSubject
from pearl.testing.gpu_source import FakeGpuSource
from pearl.testing.virtual_time import run_virtual


class TellsTheLastFirst(FakeGpuSource):
    def push(self, event: GpuSourceEvent) -> None:
        super().push(event)
        self._queue.rotate(1)


class AcceptsAnything(FakeGpuSource):
    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        return True


class AcceptsNothing(FakeGpuSource):
    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        return False


class AcceptsAllOrNothing(FakeGpuSource):
    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        offer = self._offers.get(lease)
        return offer is not None and [gpu.id for gpu in offer.gpus] == list(gpus) and await super().accept(lease, gpus)


class ForgetsWithdrawals(FakeGpuSource):
    def _happen(self, event: GpuSourceEvent) -> None:
        if isinstance(event, Withdrawn):
            self._queue.append(event)
        else:
            super()._happen(event)


class WithdrawsWholeOffers(FakeGpuSource):
    def _happen(self, event: GpuSourceEvent) -> None:
        super()._happen(event)
        if isinstance(event, Withdrawn):
            self._offers.clear()


class HasLeasesForever(FakeGpuSource):
    def _happen(self, event: GpuSourceEvent) -> None:
        super()._happen(event)
        if isinstance(event, Offered):
            self._offers[event.lease] = replace(event, end_s=None)


class CannotTakeBackWhatIsGone(FakeGpuSource):
    async def give_back(self, gpus: Sequence[GpuId]) -> None:
        for gpu in gpus:
            del self.held[gpu]


class Suite(GpuSourceContract):
    def __init__(self, make: type[FakeGpuSource]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def source(self) -> AsyncIterator[GpuSourceSubject]:
        source = self.make()

        async def cause(event: GpuSourceEvent) -> None:
            source.push(event)

        yield GpuSourceSubject(source=source, cause=cause)


BREACHES = [
    (TellsTheLastFirst, "events_come_in_order"),
    (AcceptsNothing, "an_offer_is_accepted_whole_or_in_parts"),
    (AcceptsAllOrNothing, "an_offer_is_accepted_whole_or_in_parts"),
    (AcceptsAnything, "what_is_not_on_offer_cannot_be_accepted"),
    (ForgetsWithdrawals, "an_offer_that_was_withdrawn_is_over"),
    (WithdrawsWholeOffers, "an_offer_that_was_withdrawn_is_over"),
    (HasLeasesForever, "a_lease_that_has_ended_is_over"),
    (CannotTakeBackWhatIsGone, "gpus_can_be_given_back"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_source_is_accepted(name: str) -> None:
    getattr(Suite(FakeGpuSource), f"test_{name}")()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_source_is_found(
    broken: type[FakeGpuSource], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(getattr(Suite(broken), f"test_{name}"))
