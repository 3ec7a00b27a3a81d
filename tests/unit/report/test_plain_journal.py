"""The journal of a simulated run: what the writer of a real run writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pearl.errors import RunFailed
from pearl.records.journal import GroupEntry, JournalEntry
from pearl.report.journal import JournalWriter, read_entries
from pearl.report.plain_journal import BLOCK_LINES, PlainJournal


def group(number: int) -> GroupEntry:
    return GroupEntry(
        at_s=number / 3, group=f"g{number}", task="t", seed=1, status="completed", admitted_version=0, attempts=4
    )


def test_it_writes_what_the_writer_of_a_real_run_writes(tmp_path: Path) -> None:
    sinks = tmp_path / "plain", tmp_path / "real"
    for folder in sinks:
        folder.mkdir()
    plain, real = PlainJournal(sinks[0]), JournalWriter(sinks[1])
    entries = [group(number) for number in range(2 * BLOCK_LINES + 3)]
    for entry in entries:
        plain.write(entry)
        real.write(entry)
    plain.close()
    real.close()
    assert (sinks[0] / "groups.jsonl").read_bytes() == (sinks[1] / "groups.jsonl").read_bytes()
    assert len(list(read_entries(sinks[0], GroupEntry))) == len(entries)


def test_what_was_flushed_is_there_and_what_comes_later_is_added(tmp_path: Path) -> None:
    plain = PlainJournal(tmp_path)
    plain.write(group(0))
    assert list(tmp_path.iterdir()) == []
    asyncio.run(plain.flush())
    assert [entry.group for entry in read_entries(tmp_path, GroupEntry)] == ["g0"]
    plain.write(group(1))
    plain.close()
    plain.close()
    plain.write(group(2))
    assert [entry.group for entry in read_entries(tmp_path, GroupEntry)] == ["g0", "g1"]


def test_what_cannot_be_written_is_told_once_it_matters(tmp_path: Path) -> None:
    plain = PlainJournal(tmp_path / "nowhere")
    plain.write(group(0))
    plain.write(group(1))
    with pytest.raises(RunFailed, match=r"groups\.jsonl: the journal cannot be written: No such file"):
        plain.close()


def test_an_entry_of_no_stream_is_told(tmp_path: Path) -> None:
    plain = PlainJournal(tmp_path)
    plain.write(JournalEntry(at_s=0.0))
    with pytest.raises(RunFailed, match="a JournalEntry cannot be written"):
        plain.close()
