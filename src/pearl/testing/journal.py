"""A fake journal sink: a list."""

from __future__ import annotations

from typing import TypeVar

from pearl.records.journal import JournalEntry

EntryT = TypeVar("EntryT", bound=JournalEntry)


class ListSink:
    """A `JournalSink` in this process."""

    def __init__(self, capacity: int | None = None) -> None:
        """`capacity`: entries between two flushes; more are counted as dropped. None: no bound."""
        self._capacity = capacity
        self._unflushed = 0
        self.entries: list[JournalEntry] = []
        self.dropped = 0
        self.flushes = 0

    def write(self, entry: JournalEntry) -> None:
        """Keep an entry, or count it as dropped."""
        if self._capacity is not None and self._unflushed >= self._capacity:
            self.dropped += 1
            return
        self.entries.append(entry)
        self._unflushed += 1

    async def flush(self) -> None:
        """Empty the queue."""
        self._unflushed = 0
        self.flushes += 1

    def of(self, kind: type[EntryT]) -> list[EntryT]:
        """Entries of one class, in order."""
        return [entry for entry in self.entries if isinstance(entry, kind)]
