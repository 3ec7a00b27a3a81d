"""The suite accepts the fake, and finds broken sinks made from it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pearl.records.journal import JournalEntry
from pearl.testing.contracts.journal import JournalSinkContract, JournalSinkSubject
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual


class TurnsThingsRound(ListSink):
    def write(self, entry: JournalEntry) -> None:
        super().write(entry)
        self.entries[-2:] = self.entries[:-3:-1]


class ForgetsToFlush(ListSink):
    def __init__(self, capacity: int | None = None) -> None:
        super().__init__(capacity)
        self.queue: list[JournalEntry] = []

    def write(self, entry: JournalEntry) -> None:
        self.queue.append(entry)
        if len(self.queue) > 10:
            super().write(self.queue.pop(0))


class DropsSilently(ListSink):
    def write(self, entry: JournalEntry) -> None:
        super().write(entry)
        self.dropped = 0


class RaisesWhenFull(ListSink):
    def write(self, entry: JournalEntry) -> None:
        super().write(entry)
        if self.dropped:
            raise BufferError("full")


class StaysFull(ListSink):
    async def flush(self) -> None:
        self.flushes += 1


class KeepsTheLast(ListSink):
    def write(self, entry: JournalEntry) -> None:
        self.entries.append(entry)
        if len(self.entries) > 8:
            self.entries.pop(0)
            self.dropped += 1


class CannotFlushNothing(ListSink):
    async def flush(self) -> None:
        if not self.entries:
            raise ValueError("nothing to flush")


class Suite(JournalSinkContract):
    def __init__(self, make: type[ListSink]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @contextmanager
    def sink(self, capacity: int) -> Iterator[JournalSinkSubject]:
        sink = self.make(capacity)
        yield JournalSinkSubject(
            sink=sink,
            read=lambda stream: [entry for entry in sink.entries if entry.stream == stream],
            dropped=lambda: sink.dropped,
        )


BREACHES = [
    (TurnsThingsRound, "what_was_flushed_can_be_read_in_order"),
    (ForgetsToFlush, "what_was_flushed_can_be_read_in_order"),
    (DropsSilently, "a_full_queue_drops_and_counts_and_never_waits"),
    (RaisesWhenFull, "a_full_queue_drops_and_counts_and_never_waits"),
    (StaysFull, "a_full_queue_drops_and_counts_and_never_waits"),
    (KeepsTheLast, "a_full_queue_drops_and_counts_and_never_waits"),
    (CannotFlushNothing, "a_flush_of_nothing_returns"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_sink_is_accepted(name: str) -> None:
    getattr(Suite(ListSink), f"test_{name}")()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_sink_is_found(
    broken: type[ListSink], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(getattr(Suite(broken), f"test_{name}"))
