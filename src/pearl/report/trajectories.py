"""Recorded trajectories, counts and times only: files that somebody brings, and the journals of our own runs.

A file (JSONL) has one trajectory a line; other keys are ignored, and so are empty lines:

    {"id": "a", "group": 0, "turns": [{"input_tokens": 900, "output_tokens": 120, "env_s": 0.4, "env_lo_s": 0.3}, ...]}

- `input_tokens`: new at this turn; of the first turn, the prompt.
- `output_tokens`: generated.
- `env_s`: seconds from the end of the turn until the environment's reply; null or absent where it was not recorded.
- `env_lo_s`: a lower bound of that, where only a bound is certain.
- `group`: text or a whole number; attempts at one task share it. Absent or null: not known.

Of a run folder, what counts is every attempt of training that ended and whose turns are all there; faults, evaluations, and
what the journal dropped are left out, and counted.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pearl.core.distribution import LARGEST
from pearl.errors import ProfileError, RunFolderError
from pearl.records.journal import TrajectoryEntry, TurnEntry
from pearl.records.trajectory import TrajectoryStatus
from pearl.report.journal import placed_entries, stream_file
from pearl.text_file import Unreadable, read_text
from pearl.units import MIB, format_bytes

LONGEST_FILE_BYTES = 256 * MIB
"""Some four million turns; more says nothing more of their distributions."""
LONGEST_STREAM_BYTES = 1024 * MIB
"""Of a stream of a journal: some four million turns of up to 300 bytes."""
_WANTED = "want a file of trajectories (JSONL) or a run folder"
_TRAINING = "g"
"""Groups that are trained on are called `g0`, `g1`, ...; those of evaluations otherwise."""


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """One turn; numbers 0 .. `LARGEST`."""

    input_tokens: int
    output_tokens: int
    env_s: float | None = None
    env_lo_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    """One attempt at a task."""

    where: str
    """File and line, for messages."""
    group: str | None
    """Attempts at the same task have the same."""
    turns: tuple[RecordedTurn, ...]
    """At least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All that a file or a run folder holds."""

    path: Path
    trajectories: tuple[RecordedTrajectory, ...]
    """In the order of the file, or in which they ended; at least one."""
    left_out: int = 0
    """Trajectories of a run that ended by a fault, were no training, or lack turns."""


def read_recording(path: Path) -> Recording:
    """The trajectories of a file or of a run folder.

    Raises:
        ProfileError: none there, not a regular file, too large, or the first line that is not what it should be: the message
            names file and line.
    """
    recording = _of_run(path) if _is_run(path) else _of_file(path)
    if not recording.trajectories:
        left_out = f" ({recording.left_out} were left out)" if recording.left_out else ""
        raise ProfileError(f"{path}: got no trajectory{left_out}, want at least one{' line' if path.is_file() else ''}")
    return recording


# -- files ----------------------------------------------------------------------------------------------------------


def lines_of(path: Path, *, most_bytes: int, wanted: str) -> Iterator[tuple[str, str]]:
    """Lines of a text file that are not empty, each with its place: `FILE: line N`.

    Raises:
        ProfileError: not a regular file, not text, or too large; `wanted` ends the message.
    """
    try:
        text = read_text(path, most_bytes=most_bytes)
    except Unreadable as error:
        raise ProfileError(f"{error}; {wanted}") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}: line {number}", line


def _of_file(path: Path) -> Recording:
    found: list[RecordedTrajectory] = []
    for where, line in lines_of(path, most_bytes=LONGEST_FILE_BYTES, wanted=_WANTED):
        try:
            found.append(_trajectory(where, line))
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from None
    return Recording(path=path, trajectories=tuple(found))


def _trajectory(where: str, line: str) -> RecordedTrajectory:
    try:
        document = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProfileError(f"not JSON: {reason}; want one trajectory a line") from None
    turns = document.get("turns") if isinstance(document, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ProfileError(f'got {_got(document)}, want an object with "turns": a list of at least one')
    return RecordedTrajectory(
        where=where,
        group=_group(document.get("group")),
        turns=tuple(_turn(f"turns[{index}]", turn) for index, turn in enumerate(turns)),
    )


def _no_constant(name: str) -> float:
    raise ProfileError(f"got {name}, want finite numbers")


def _turn(where: str, turn: object) -> RecordedTurn:
    if not isinstance(turn, dict):
        raise ProfileError(f"{where}: got {_got(turn)}, want an object")
    return RecordedTurn(
        _whole(f"{where}.input_tokens", turn.get("input_tokens")),
        _whole(f"{where}.output_tokens", turn.get("output_tokens")),
        _seconds(f"{where}.env_s", turn.get("env_s")),
        _seconds(f"{where}.env_lo_s", turn.get("env_lo_s")),
    )


def _group(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ProfileError(f"group: got {_got(value)}, want text, a whole number, or null")
    return str(value)


def _whole(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ProfileError(f"{where}: got {_got(value)}, want a whole number >= 0")
    return value


def _seconds(where: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ProfileError(f"{where}: got {_got(value)}, want seconds >= 0, or null")
    return value


def _got(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# -- run folders ----------------------------------------------------------------------------------------------------


def _is_run(path: Path) -> bool:
    try:
        return (path / "journal").is_dir()
    except (OSError, ValueError):
        return False  # reading it as a file says why


def _of_run(path: Path) -> Recording:
    journal = path / "journal"
    found: list[RecordedTrajectory] = []
    left_out = 0
    try:
        for stream in (TurnEntry.stream, TrajectoryEntry.stream):
            _check_stream(stream_file(journal, stream))
        turns = _turns_of(journal)
        for entry, where in placed_entries(journal, TrajectoryEntry):
            played = turns.pop(entry.trajectory, {})
            whole = len(played) == entry.turns > 0 and all(number in played for number in range(entry.turns))
            if whole and entry.group.startswith(_TRAINING) and _is_attempt(entry.status, where):
                ordered = tuple(played[number] for number in range(entry.turns))
                found.append(RecordedTrajectory(where=where, group=entry.group, turns=ordered))
            else:
                left_out += 1
    except RunFolderError as error:
        raise ProfileError(str(error)) from None
    return Recording(path=path, trajectories=tuple(found), left_out=left_out)


def _is_attempt(status: str, where: str) -> bool:
    try:
        return TrajectoryStatus(status).trainable
    except ValueError:
        known = ", ".join(status.value for status in TrajectoryStatus)
        raise ProfileError(f"{where}: status: got {_got(status)}, want one of {known}") from None


def _turns_of(journal: Path) -> dict[str, dict[int, RecordedTurn]]:
    """Trajectory -> number of a turn -> that turn."""
    found: dict[str, dict[int, RecordedTurn]] = {}
    for entry, where in placed_entries(journal, TurnEntry):
        try:
            turn = RecordedTurn(
                _whole("prompt", entry.prompt), _whole("generated", entry.generated), _seconds("env_s", entry.env_s)
            )
        except ProfileError as error:
            raise ProfileError(f"{where}: {error}") from None
        found.setdefault(entry.trajectory, {})[entry.turn] = turn
    return found


def _check_stream(path: Path) -> None:
    """Nothing that would make us wait for ever, or fill the memory."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return  # nothing was written: there are no trajectories
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise ProfileError(f"{path}: got no regular file; want a stream of a journal")
    if status.st_size > LONGEST_STREAM_BYTES:
        raise ProfileError(
            f"{path}: got {format_bytes(status.st_size)}, more than {format_bytes(LONGEST_STREAM_BYTES)}"
        )
