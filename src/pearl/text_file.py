"""Text files that a user names, read within bounds: nothing that could make us wait for ever, or fill the memory.

A pipe may never be written, a device never end, and a path may be a slip of the keyboard: what is no regular file, or longer
than anything of its kind is, is refused before it is read.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pearl.units import MIB, format_bytes

_CHUNK_BYTES = MIB
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class Unreadable(Exception):
    """A file that is no text within bounds: the message names it and says why, and the caller what it wants."""


def read_text(path: Path, *, most_bytes: int) -> str:
    """The text of a regular file in UTF-8, of at most so many bytes.

    Raises:
        Unreadable: anything else.
    """
    try:
        kind = stat.S_IFMT(path.stat().st_mode)
        if kind != stat.S_IFREG:
            raise Unreadable(f"{path}: got {_KINDS.get(kind, 'something else')}, no regular file")
        content = _content(path, most_bytes)
        return content.decode("utf-8")
    except FileNotFoundError:
        raise Unreadable(f"{path}: no such file") from None
    except OSError as error:
        raise Unreadable(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise Unreadable(f"{path}: cannot be read: not UTF-8 at byte {error.start}") from None
    except ValueError as error:
        # No path at all: it holds a zero character.
        raise Unreadable(f"{str(path)!r}: cannot be read: {error}") from None


def _content(path: Path, most_bytes: int) -> bytes:
    """What a file may say of its size is not what it gives: files under /proc claim to be empty."""
    content = bytearray()
    # Not blocking, in case somebody has put a pipe there since we looked.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        while chunk := os.read(descriptor, _CHUNK_BYTES):
            content += chunk
            if len(content) > most_bytes:
                size = max(len(content), os.fstat(descriptor).st_size)
                raise Unreadable(f"{path}: got {format_bytes(size)}, more than {format_bytes(most_bytes)}")
    finally:
        os.close(descriptor)
    return bytes(content)
