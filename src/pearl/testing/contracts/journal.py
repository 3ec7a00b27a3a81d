"""Contract of `JournalSink`: writing never waits, order is kept within a stream, what was flushed can be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from pearl.ports import JournalSink
from pearl.records.journal import GroupEntry, JournalEntry, TurnEntry
from pearl.testing.contracts.base import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalSinkSubject:
    """A sink under test, empty."""

    sink: JournalSink
    read: Callable[[str], Sequence[JournalEntry]]
    """Entries of a stream, as a reader of the journal would get them now."""
    dropped: Callable[[], int]
    """Entries that did not fit into the queue."""


class JournalSinkContract(Contract):
    """Subclass it and give `sink`."""

    def sink(self, capacity: int) -> AbstractContextManager[JournalSinkSubject]:
        """A fresh sink whose queue holds `capacity` entries."""
        raise NotImplementedError

    def test_what_was_flushed_can_be_read_in_order(self) -> None:
        async def check() -> None:
            with self.sink(10_000) as subject:
                turns = [_turn(n) for n in range(500)]
                groups = [_group(n) for n in range(500)]
                for turn, group in zip(turns[:300], groups[:300], strict=True):
                    subject.sink.write(turn)
                    subject.sink.write(group)
                await subject.sink.flush()
                assert list(subject.read("turns")) == turns[:300]
                assert list(subject.read("groups")) == groups[:300]
                for turn, group in zip(turns[300:], groups[300:], strict=True):
                    subject.sink.write(group)
                    subject.sink.write(turn)
                await subject.sink.flush()
                assert list(subject.read("turns")) == turns
                assert list(subject.read("groups")) == groups
                assert subject.dropped() == 0

        self.check(check())

    def test_a_full_queue_drops_and_counts_and_never_waits(self) -> None:
        async def check() -> None:
            with self.sink(8) as subject:
                # No await in between: a write that waited for the loop would never return.
                for n in range(5_000):
                    subject.sink.write(_turn(n))
                await subject.sink.flush()
                numbers = [entry.turn for entry in subject.read("turns") if isinstance(entry, TurnEntry)]
                assert numbers == sorted(numbers)
                assert numbers[:8] == list(range(8))
                assert len(numbers) + subject.dropped() == 5_000
                subject.sink.write(_turn(9_999))
                await subject.sink.flush()
                assert list(subject.read("turns"))[-1] == _turn(9_999)

        self.check(check())

    def test_a_flush_of_nothing_returns(self) -> None:
        async def check() -> None:
            with self.sink(8) as subject:
                await subject.sink.flush()
                await subject.sink.flush()
                assert list(subject.read("turns")) == []

        self.check(check())


def _turn(number: int) -> TurnEntry:
    return TurnEntry(
        at_s=number / 8,
        trajectory=f"t{number}",
        turn=number,
        prompt=3,
        generated=4,
        computed=3,
        end="stop",
        versions=[[0, 4]],
        workers=[0],
        generate_s=0.5,
        env_s=0.25,
    )


def _group(number: int) -> GroupEntry:
    return GroupEntry(
        at_s=number / 8,
        group=f"g{number}",
        task="task",
        seed=number,
        status="completed",
        admitted_version=0,
        attempts=2,
    )
