"""Locks on files that a process holds for as long as it lives: the operating system gives them up when it dies, however.

Unlike a process id in a file, a lock says who lives across containers that share a folder, and it is never stale.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path
from typing import Self

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""What file systems without locks answer, some network mounts among them; a run there is better than none."""


class FileLock:
    """An exclusive lock, held until `close`; the file stays, since removing it could split two holders."""

    def __init__(self, descriptor: int, *, is_exclusive: bool = True) -> None:
        """`descriptor`: of the locked file. Processes started meanwhile do not inherit it."""
        self._descriptor: int | None = descriptor
        self.is_exclusive = is_exclusive
        """Whether nobody else can hold it: False on a file system without locks."""

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Lock a file, made where there is none, and write this process's id into it; None when another holds it.

        Raises:
            OSError: the file cannot be opened or written.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        is_exclusive = True
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                is_exclusive = False
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor, is_exclusive=is_exclusive)

    def close(self) -> None:
        """Give the lock up; harmless when repeated."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def holder(path: Path) -> str:
    """The process id that the holder of a lock wrote down, `?` when there is none to read."""
    text = ""
    with contextlib.suppress(OSError, ValueError):
        text = path.read_text(encoding="ascii").strip()
    return text if text.isdecimal() else "?"
