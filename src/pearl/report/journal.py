"""The journal on disk: one JSON-lines file per stream, written by a thread of its own.

`write` only queues. The queue is bounded: entries beyond it are counted and dropped, and the count is written at the
end of the stream. The first line of a file names schema and version. A process that dies leaves at most one torn line,
the last: readers ignore it and a resumed run cuts it off. A full disk stops the journal, not the pipeline: the first
error is kept and raised by `flush` and `close`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from pearl.errors import PearlError, RunFailed, RunFolderError
from pearl.records.journal import STREAMS, JournalEntry
from pearl.report.lines import ENTRIES, MalformedEntry, decode, dropped_count, dropped_line, encode, header_line

CAPACITY = 65_536
"""Entries that may wait for the writer: several seconds of the fastest fleet, some tens of megabytes."""

_TAIL_BYTES = 65_536

E = TypeVar("E", bound=JournalEntry)


class JournalWriter:
    """A `JournalSink` over a folder; continues the streams that it finds there."""

    def __init__(self, folder: Path, capacity: int = CAPACITY) -> None:
        """Repair what is there and start the writer.

        Raises:
            RunFolderError: a stream of an unknown version, or unreadable.
        """
        self._folder, self._capacity = folder, capacity
        for stream in STREAMS:
            _repair(stream_file(folder, stream), stream)
        self._condition = threading.Condition()
        self._queue: deque[JournalEntry | Callable[[], None]] = deque()
        self._pending = 0
        self._dropped: dict[str, int] = {}
        self._closing = False
        self._error: PearlError | None = None
        self._descriptors: dict[str, int] = {}
        self._thread = threading.Thread(target=self._run, name="pearl-journal", daemon=True)
        self._thread.start()

    def write(self, entry: JournalEntry) -> None:
        """Queue an entry; never blocks on the disk."""
        with self._condition:
            if self._closing or self._pending >= self._capacity:
                self._dropped[entry.stream] = self._dropped.get(entry.stream, 0) + 1
                return
            self._pending += 1
            self._queue.append(entry)
            self._condition.notify()

    async def flush(self) -> None:
        """Wait until everything written before is on disk.

        Raises:
            RunFailed: something could not be written, now or before.
        """
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def resolve() -> None:
            if not done.done():
                done.set_result(None)

        def wake() -> None:
            # A closed loop refuses: nobody waits any more.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(resolve)

        with self._condition:
            if not self._closing:
                self._queue.append(wake)
                self._condition.notify()
            else:
                resolve()
        await done
        self._raise_first()

    def close(self) -> None:
        """Write what is queued and the counts of dropped entries, and end the writer; harmless when repeated.

        Raises:
            RunFailed: something could not be written, now or before.
        """
        with self._condition:
            self._closing = True
            self._condition.notify()
        self._thread.join()
        self._raise_first()

    @property
    def dropped(self) -> Mapping[str, int]:
        """Stream -> entries dropped so far, because the queue was full or the journal closed."""
        with self._condition:
            return dict(self._dropped)

    def _raise_first(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._queue and not self._closing:
                    self._condition.wait()
                batch, self._queue = self._queue, deque()
                closing = self._closing
            self._write_batch(batch)
            if closing and not batch:
                break
        for stream, count in self.dropped.items():
            self._append(stream, dropped_line(count))
        self._sync()
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _write_batch(self, batch: deque[JournalEntry | Callable[[], None]]) -> None:
        entries = 0
        lines: dict[str, list[bytes]] = {}
        for item in batch:
            if isinstance(item, JournalEntry):
                entries += 1
                self._encode(item, lines.setdefault(item.stream, []))
            else:
                self._append_all(lines)
                self._sync()
                item()
        self._append_all(lines)
        with self._condition:
            self._pending -= entries

    def _encode(self, entry: JournalEntry, lines: list[bytes]) -> None:
        try:
            lines.append(encode(entry))
        except (KeyError, TypeError, ValueError) as error:
            self._fail(f"journal: a {type(entry).__name__} cannot be written: {error}", error)

    def _append_all(self, lines: dict[str, list[bytes]]) -> None:
        for stream, texts in lines.items():
            self._append(stream, b"".join(texts))
        lines.clear()

    def _append(self, stream: str, data: bytes) -> None:
        if self._error is not None or not data:
            return
        path = stream_file(self._folder, stream)
        try:
            if stream not in self._descriptors:
                self._descriptors[stream] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
                if not path.stat().st_size:
                    data = header_line(stream) + data
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptors[stream], view) :]
        except OSError as error:
            self._fail(f"{path}: the journal cannot be written: {error.strerror}; make room and resume the run", error)

    def _sync(self) -> None:
        if self._error is not None:
            return
        for stream, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:
                self._fail(
                    f"{stream_file(self._folder, stream)}: the journal cannot be written: {error.strerror}", error
                )

    def _fail(self, text: str, cause: Exception) -> None:
        if self._error is None:
            self._error = RunFailed(text)
            self._error.__cause__ = cause


def read_stream(folder: Path, stream: str) -> Iterator[JournalEntry]:
    """Entries of a stream in order; none when the stream was never written. A torn last line is left out.

    Raises:
        RunFolderError: unknown stream or version, or a malformed line that is not the last.
    """
    for entry, _ in _placed(folder, stream):
        yield entry


def read_entries(folder: Path, kind: type[E]) -> Iterator[E]:
    """Entries of one class, typed: `read_entries(folder, StepEntry)`; raises like `read_stream`."""
    for entry, _ in placed_entries(folder, kind):
        yield entry


def placed_entries(folder: Path, kind: type[E]) -> Iterator[tuple[E, str]]:
    """As `read_entries`, each with its place, `FILE:LINE`."""
    for entry, where in _placed(folder, kind.stream):
        assert isinstance(entry, kind)
        yield entry, where


def _placed(folder: Path, stream: str) -> Iterator[tuple[JournalEntry, str]]:
    for document, where in _documents(folder, stream):
        if dropped_count(document) is not None:
            continue
        try:
            yield decode(ENTRIES[stream], document), where
        except MalformedEntry as error:
            raise RunFolderError(f"{where}: malformed entry: {error}") from None


def count_dropped(folder: Path, stream: str) -> int:
    """Entries of a stream that were dropped, over all times the run was resumed; raises like `read_stream`."""
    return sum(dropped_count(document) or 0 for document, _ in _documents(folder, stream))


def _documents(folder: Path, stream: str) -> Iterator[tuple[object, str]]:
    """Parsed lines below the header, each with its place."""
    if stream not in ENTRIES:
        raise RunFolderError(f"{folder}: unknown stream {stream!r}; want one of {', '.join(ENTRIES)}")
    path = stream_file(folder, stream)
    if not path.exists():
        if not folder.is_dir():
            raise RunFolderError(f"{folder}: no such journal folder")
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            where = f"{path}:{number}"
            try:
                document = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise RunFolderError(f"{where}: malformed line: {error}") from None
            if number == 1:
                _check_header(document, stream, where)
            else:
                yield document, where


def _check_header(document: object, stream: str, where: str) -> None:
    want = {"schema": f"pearl.{stream}", "version": STREAMS[stream]}
    if document != want:
        raise RunFolderError(f"{where}: got {json.dumps(document)[:120]}, want {json.dumps(want)}")


def _repair(path: Path, stream: str) -> None:
    """Cut off a torn last line, so that the next entry begins a line of its own."""
    try:
        size = path.stat().st_size
        if not size:
            return
        with path.open("r+b") as file:
            tail, position = b"", size
            while position and b"\n" not in tail:
                step = min(_TAIL_BYTES, position)
                position -= step
                file.seek(position)
                tail = file.read(step) + tail
            whole = tail.rfind(b"\n") + 1
            if _is_json(tail[whole:]):
                file.seek(size)
                file.write(b"\n")
            elif whole < len(tail):
                file.truncate(position + whole)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunFolderError(f"{path}: the journal cannot be continued: {error.strerror}") from error
    # Reading one document checks the header.
    next(_documents(path.parent, stream), None)


def _is_json(text: bytes) -> bool:
    try:
        return bool(text) and isinstance(json.loads(text), dict)
    except ValueError:
        return False


def stream_file(folder: Path, stream: str) -> Path:
    """Where a journal keeps a stream."""
    return folder / f"{stream}.jsonl"
