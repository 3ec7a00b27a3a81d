"""Locks: one holder at a time, and none that is dead."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pearl.file_lock import FileLock, holder


def test_one_holder_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.take(path)
    assert first is not None
    assert first.is_exclusive
    assert FileLock.take(path) is None
    assert holder(path) == str(os.getpid())
    first.close()
    first.close()
    second = FileLock.take(path)
    assert second is not None
    second.close()
    assert path.exists()


def test_processes_that_the_holder_started_do_not_keep_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first = FileLock.take(path)
    assert first is not None
    code = "print('up', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        first.close()
        second = FileLock.take(path)
        child.communicate("\n")
    assert second is not None
    second.close()


def test_a_shorter_process_id_leaves_nothing_of_a_longer_one(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.write_text("9" * 30)
    lock = FileLock.take(path)
    assert lock is not None
    assert path.read_text() == f"{os.getpid()}\n"
    lock.close()


@pytest.mark.parametrize("text", [None, b"", b"x", b"\xff\xff"])
def test_a_holder_that_wrote_nothing_down(tmp_path: Path, text: bytes | None) -> None:
    if text is not None:
        (tmp_path / "lock").write_bytes(text)
    assert holder(tmp_path / "lock") == "?"


@pytest.mark.parametrize(("code", "works"), [(errno.ENOLCK, True), (errno.ENOSYS, True), (errno.EIO, False)])
def test_a_file_system_without_locks_is_no_obstacle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, works: bool
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    if works:
        lock = FileLock.take(tmp_path / "lock")
        assert lock is not None
        assert not lock.is_exclusive
        lock.close()
    else:
        with pytest.raises(OSError, match=os.strerror(code)):
            FileLock.take(tmp_path / "lock")
