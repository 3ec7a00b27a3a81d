"""The journal on disk: order, bounds, torn lines, full disks."""

import asyncio
import errno
import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pearl.errors import RunFailed, RunFolderError
from pearl.ports import JournalSink
from pearl.records.journal import GroupEntry, JournalEntry, StateEntry, TurnEntry
from pearl.report.journal import CAPACITY, JournalWriter, count_dropped, read_entries, read_stream


def group(number: int) -> GroupEntry:
    return GroupEntry(
        at_s=float(number), group=f"g{number}", task="t", seed=1, status="completed", admitted_version=0, attempts=8
    )


def state(number: int) -> StateEntry:
    return StateEntry(at_s=float(number), event="E", inputs={"n": number}, state_version=number, state_hash="h")


UNWRITABLE = TurnEntry(
    at_s=0.0,
    trajectory="t",
    turn=0,
    prompt=1,
    generated=1,
    computed=1,
    end="stop",
    versions=[[{1}]],  # type: ignore[list-item]
    workers=[],
    generate_s=0.0,
    env_s=0.0,
)
"""JSON has no sets."""


@contextmanager
def writer(folder: Path, capacity: int = CAPACITY) -> Iterator[JournalWriter]:
    journal = JournalWriter(folder, capacity)
    try:
        yield journal
    finally:
        journal.close()


@contextmanager
def blocked_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """`os.write` waits until the block ends; the event tells that the writer waits there."""
    real, waiting, released = os.write, threading.Event(), threading.Event()

    def write(descriptor: int, data: bytes) -> int:
        waiting.set()
        released.wait()
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", write)
        try:
            yield waiting
        finally:
            released.set()


def test_what_is_written_is_read_in_order_stream_by_stream(tmp_path: Path) -> None:
    with writer(tmp_path) as journal:
        for number in range(1000):
            journal.write(group(number))
            journal.write(state(number))
    assert list(read_stream(tmp_path, "groups")) == [group(number) for number in range(1000)]
    assert list(read_stream(tmp_path, "decisions")) == [state(number) for number in range(1000)]
    assert (tmp_path / "groups.jsonl").read_text().splitlines()[0] == '{"schema":"pearl.groups","version":1}'


def test_it_is_a_journal_sink(tmp_path: Path) -> None:
    with writer(tmp_path) as journal:
        sink: JournalSink = journal
        sink.write(group(1))


def test_typed_reading(tmp_path: Path) -> None:
    with writer(tmp_path) as journal:
        journal.write(group(1))
    assert [entry.group for entry in read_entries(tmp_path, GroupEntry)] == ["g1"]


def test_a_stream_that_was_never_written_has_no_file_and_no_entries(tmp_path: Path) -> None:
    with writer(tmp_path) as journal:
        journal.write(group(1))
    assert [path.name for path in tmp_path.iterdir()] == ["groups.jsonl"]
    assert list(read_stream(tmp_path, "turns")) == []


def test_flush_means_on_disk(tmp_path: Path) -> None:
    async def main(journal: JournalWriter) -> None:
        for round_number in range(3):
            for number in range(100):
                journal.write(group(100 * round_number + number))
            await journal.flush()
            assert len(list(read_stream(tmp_path, "groups"))) == 100 * (round_number + 1)

    with writer(tmp_path) as journal:
        asyncio.run(main(journal))


def test_flush_and_close_repeated(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write(group(1))
    journal.close()
    journal.close()
    asyncio.run(journal.flush())
    assert list(read_stream(tmp_path, "groups")) == [group(1)]


def test_a_full_queue_drops_counts_and_says_so_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with writer(tmp_path, capacity=10) as journal:
        with blocked_disk(monkeypatch) as waiting:
            journal.write(group(0))
            waiting.wait()
            # One is with the writer, nine wait: the queue's bound is on both together.
            for number in range(1, 30):
                journal.write(group(number))
            journal.write(state(0))
            assert journal.dropped == {"groups": 20, "decisions": 1}
        asyncio.run(journal.flush())
        journal.write(group(100))
    assert [entry.at_s for entry in read_stream(tmp_path, "groups")] == [*range(10), 100]
    assert (count_dropped(tmp_path, "groups"), count_dropped(tmp_path, "decisions")) == (20, 1)
    assert json.loads((tmp_path / "groups.jsonl").read_text().splitlines()[-1]) == {"dropped": 20}
    # The next part of the run goes on behind it.
    with writer(tmp_path) as journal:
        journal.write(group(101))
    assert [entry.at_s for entry in read_stream(tmp_path, "groups")][-2:] == [100, 101]
    assert count_dropped(tmp_path, "groups") == 20


def test_write_never_waits_for_the_disk_and_the_queue_holds_65536(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path) as journal, blocked_disk(monkeypatch) as waiting:
        journal.write(group(0))
        waiting.wait()
        for number in range(65_540):
            journal.write(group(number))
        assert journal.dropped == {"groups": 5}


def test_entries_after_close_are_counted(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.close()
    journal.write(group(1))
    assert journal.dropped == {"groups": 1}


def test_a_cancelled_flush_leaves_the_journal_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(journal: JournalWriter) -> None:
        with blocked_disk(monkeypatch) as waiting:
            journal.write(group(0))
            await asyncio.to_thread(waiting.wait)
            flush = asyncio.create_task(journal.flush())
            await asyncio.sleep(0)
            flush.cancel()
            with pytest.raises(asyncio.CancelledError):
                await flush
        await journal.flush()

    with writer(tmp_path) as journal:
        asyncio.run(main(journal))
        journal.write(group(1))
    assert list(read_stream(tmp_path, "groups")) == [group(0), group(1)]


class TestTornLines:
    @pytest.fixture
    def whole(self, tmp_path: Path) -> bytes:
        with writer(tmp_path) as journal:
            for number in range(3):
                journal.write(group(number))
        return (tmp_path / "groups.jsonl").read_bytes()

    def test_every_cut_is_read_and_repaired(self, tmp_path: Path, whole: bytes) -> None:
        # Independent of the reader: entries before a cut are the newlines before it, header left out, and a line
        # that lacks nothing but its newline counts as well.
        path = tmp_path / "groups.jsonl"
        for cut in range(len(whole) + 1):
            part = whole[:cut]
            kept = max(part.count(b"\n") - 1, 0)
            if whole[cut : cut + 1] == b"\n" and part.count(b"\n") >= 1:
                kept += 1
            path.write_bytes(part)
            assert list(read_stream(tmp_path, "groups")) == [group(number) for number in range(kept)], cut
            with writer(tmp_path) as journal:
                journal.write(group(77))
            assert list(read_stream(tmp_path, "groups")) == [*(group(number) for number in range(kept)), group(77)], cut
            lines = path.read_text().splitlines()
            assert all(json.loads(line) for line in lines)

    def test_a_torn_line_longer_than_a_read(self, tmp_path: Path, whole: bytes) -> None:
        (tmp_path / "groups.jsonl").write_bytes(whole + b'{"at_s":1.0,"group":"' + b"x" * 200_000)
        with writer(tmp_path) as journal:
            journal.write(group(3))
        assert list(read_stream(tmp_path, "groups")) == [group(number) for number in range(4)]

    def test_a_tail_of_zeros(self, tmp_path: Path, whole: bytes) -> None:
        # What a file system may leave after a power cut.
        (tmp_path / "groups.jsonl").write_bytes(whole + b"\0" * 100)
        assert len(list(read_stream(tmp_path, "groups"))) == 3

    def test_a_bad_line_in_the_middle_is_named(self, tmp_path: Path, whole: bytes) -> None:
        lines = whole.splitlines(keepends=True)
        lines[2] = lines[2][:10] + b"\n"
        (tmp_path / "groups.jsonl").write_bytes(b"".join(lines))
        with pytest.raises(RunFolderError, match=r"groups\.jsonl:3: malformed line: "):
            list(read_stream(tmp_path, "groups"))

    def test_a_bad_field_is_named(self, tmp_path: Path, whole: bytes) -> None:
        (tmp_path / "groups.jsonl").write_bytes(whole.replace(b'"attempts":8', b'"attempts":"8"', 1))
        with pytest.raises(RunFolderError, match=r"groups\.jsonl:2: malformed entry: attempts: got str, want int"):
            list(read_stream(tmp_path, "groups"))


@pytest.mark.parametrize(
    "header",
    [
        b'{"schema":"pearl.groups","version":2}\n',
        b'{"schema":"pearl.turns","version":1}\n',
        b'{"schema":"pearl.groups"}\n',
        b"[]\n",
    ],
)
def test_another_schema_is_refused_by_reader_and_writer(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / "groups.jsonl"
    path.write_bytes(header)
    for use in (lambda: list(read_stream(tmp_path, "groups")), lambda: JournalWriter(tmp_path)):
        with pytest.raises(
            RunFolderError, match=r'groups\.jsonl:1: got .*, want {"schema": "pearl.groups", "version": 1}'
        ):
            use()
    assert path.read_bytes() == header


def test_unknown_streams_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RunFolderError, match="unknown stream 'group'; want one of decisions, choices, changes, turns, "
    ):
        list(read_stream(tmp_path, "group"))
    with pytest.raises(RunFolderError, match="no such journal folder"):
        list(read_stream(tmp_path / "nope", "groups"))


class TestFullDisk:
    def test_a_device_without_room(self, tmp_path: Path) -> None:
        (tmp_path / "groups.jsonl").symlink_to("/dev/full")
        journal = JournalWriter(tmp_path)
        journal.write(group(0))
        with pytest.raises(RunFailed, match=r"groups\.jsonl: the journal cannot be written: No space left on device"):
            asyncio.run(journal.flush())
        journal.write(group(1))
        with pytest.raises(RunFailed, match="No space left on device"):
            journal.close()

    def test_the_first_error_is_kept_and_nothing_follows_a_torn_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = os.write, 0

        def write(descriptor: int, data: bytes) -> int:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(descriptor, data[:60])  # A short write is not yet an error.

        monkeypatch.setattr(os, "write", write)
        journal = JournalWriter(tmp_path, capacity=10)
        journal.write(group(0))
        with pytest.raises(RunFailed, match="No space left"):
            asyncio.run(journal.flush())
        # There is room again, but the line is torn; and another error does not hide the first.
        for number in range(1000):
            journal.write(group(number))
        with pytest.raises(RunFailed, match="No space left"):
            asyncio.run(journal.flush())
        journal.write(UNWRITABLE)
        with pytest.raises(RunFailed, match="No space left"):
            journal.close()
        monkeypatch.undo()
        assert calls == 2
        # What was torn is repaired when the run goes on.
        with writer(tmp_path) as again:
            again.write(group(5))
        assert list(read_stream(tmp_path, "groups")) == [group(5)]

    def test_short_writes_lose_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[:7]))
        with writer(tmp_path) as journal:
            for number in range(20):
                journal.write(group(number))
        assert list(read_stream(tmp_path, "groups")) == [group(number) for number in range(20)]


def test_an_entry_that_json_cannot_hold_is_an_error_not_a_hang(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path)
    journal.write(UNWRITABLE)
    with pytest.raises(RunFailed, match="a TurnEntry cannot be written: "):
        asyncio.run(journal.flush())
    with pytest.raises(RunFailed):
        journal.close()


def test_an_entry_of_no_stream_is_an_error_not_a_hang(tmp_path: Path) -> None:
    class Other(GroupEntry):
        __slots__ = ()

    make: Callable[..., JournalEntry] = Other
    journal = JournalWriter(tmp_path)
    journal.write(make(at_s=0.0, group="g", task="t", seed=1, status="s", admitted_version=0, attempts=1))
    with pytest.raises(RunFailed, match="a Other cannot be written"):
        journal.close()


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "groups.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"groups\.jsonl: the journal cannot be continued: Is a directory"):
        JournalWriter(tmp_path)
