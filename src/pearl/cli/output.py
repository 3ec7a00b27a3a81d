"""What the command prints, where it cannot be printed: a full disk, a reader that went away, a stream that is closed.

`guarded_output` is the one place that deals with it, whoever prints (pearl, typer, a library): one line on stderr and exit
status 1; nothing is said where a reader has gone (`| head`). A pipe that takes nothing just now is waited for. Commands do not
look after their own output, but those that do something beside printing: they say `stdout_may_be_closed`.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TextIO, cast

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class OutputFailed(OSError):
    """A standard stream takes nothing: by its type told from every other error of the system."""


class _Descriptor(io.FileIO):
    """A standard stream that says so when it cannot be written."""

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what there is room for, at least a byte: where a pipe does not wait for room, wait here."""
        room = select.poll()
        room.register(self, select.POLLOUT)
        try:
            # None: it does not wait, and has no room.
            while (written := cast("int | None", super().write(data))) is None:
                room.poll()
        except OSError as error:
            raise OutputFailed(error.errno, error.strerror) from None
        return written


class _Closed(io.TextIOBase):
    """Stands in for a stdout that was closed before the command began."""

    def write(self, text: str, /) -> int:
        """Take nothing."""
        if text:
            raise OutputFailed(errno.EBADF, "stdout is closed")
        return 0


@contextlib.contextmanager
def guarded_output() -> Iterator[None]:
    """Around a whole command.

    Raises:
        SystemExit: 1, when something could not be printed and the command did not fail for another reason.
    """
    before = sys.stdout, sys.stderr
    guarded = [_guarded(stream) for stream in before]
    sys.stdout, sys.stderr = guarded
    if before[0] is None:
        sys.stdout = cast("TextIO", _Closed())
    try:
        try:
            yield
        except SystemExit as end:
            if not end.code and sys.stdout is not None:
                sys.stdout.flush()
            raise
    except OutputFailed as error:
        if error.errno != errno.EPIPE:
            with contextlib.suppress(OutputFailed):
                print(
                    f"output: cannot be written: {error.strerror}; want a file or a pipe that takes it", file=sys.stderr
                )
        raise SystemExit(1) from None
    finally:
        _give_up(guarded)
        sys.stdout, sys.stderr = before


def stdout_may_be_closed() -> None:
    """For a command that does something beside printing: where stdout was closed before, what it prints is not missed."""
    if isinstance(sys.stdout, _Closed):
        sys.stdout = cast("TextIO", None)  # as Python has it


def _guarded(stream: TextIO) -> TextIO:
    """The same stream under a type of error of its own; as it is where there is no file behind it."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # None: it was closed before the command began
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Descriptor(descriptor, "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.write_through,
    )


def _give_up(streams: Sequence[TextIO]) -> None:
    """Let go of what was never written: Python tries again at its end, and complains."""
    for stream in streams:
        try:
            if stream is not None:
                stream.flush()
        except OutputFailed:
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())
            stream.flush()
