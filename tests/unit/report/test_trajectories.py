"""Recorded trajectories beyond what profiles of them show: groups, lower bounds, and run folders with all that goes wrong there.

Mistakes in the lines of files are tested where profiles are read: `test_workload_file`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pearl.errors import ProfileError
from pearl.records.journal import JournalEntry, TrajectoryEntry, TurnEntry
from pearl.report import trajectories as module
from pearl.report.lines import dropped_line, encode, header_line
from pearl.report.trajectories import RecordedTurn, read_recording
from pearl.report.workload_file import read_workload


def turn(trajectory: str, number: int, prompt: int = 10, generated: int = 5, env_s: float = 0.5) -> TurnEntry:
    return TurnEntry(
        at_s=0.0,
        trajectory=trajectory,
        turn=number,
        prompt=prompt,
        generated=generated,
        computed=prompt,
        end="stop",
        versions=[[0, generated]],
        workers=[0],
        generate_s=1.0,
        env_s=env_s,
    )


def end(trajectory: str, turns: int, status: str = "done", group: str = "") -> TrajectoryEntry:
    return TrajectoryEntry(
        at_s=9.0,
        trajectory=trajectory,
        group=group or trajectory.split(".")[0],
        status=status,
        turns=turns,
        generated=5 * turns,
        reward=0.0,
        success=None,
        started_s=0.0,
    )


def run_folder(folder: Path, *entries: JournalEntry) -> Path:
    journal = folder / "run" / "journal"
    journal.mkdir(parents=True)
    for stream in ("turns", "trajectories"):
        lines = [encode(entry) for entry in entries if entry.stream == stream]
        (journal / f"{stream}.jsonl").write_bytes(header_line(stream) + b"".join(lines))
    return folder / "run"


def write(folder: Path, *documents: object) -> Path:
    path = folder / "t.jsonl"
    path.write_text("\n".join(json.dumps(document) for document in documents))
    return path


ONE = {"input_tokens": 3, "output_tokens": 2}


class TestFile:
    def test_by_hand(self, tmp_path: Path) -> None:
        full = {"input_tokens": 3, "output_tokens": 2, "env_s": 1, "env_lo_s": 0.5}
        path = write(tmp_path, {"group": 0, "turns": [full, ONE]}, {"group": "a", "turns": [ONE]}, {"turns": [ONE]})
        first, second, third = read_recording(path).trajectories
        assert first.turns == (RecordedTurn(3, 2, 1, 0.5), RecordedTurn(3, 2, None, None))
        assert (first.group, second.group, third.group) == ("0", "a", None)
        assert (first.where, third.where) == (f"{path}: line 1", f"{path}: line 3")
        assert read_recording(path).left_out == 0

    @pytest.mark.parametrize(
        ("document", "message"),
        [
            ({"group": True, "turns": [ONE]}, "group: got true, want text, a whole number, or null"),
            ({"group": 1.5, "turns": [ONE]}, "group: got 1.5, want text"),
            ({"group": [], "turns": [ONE]}, r"group: got \[\], want text"),
            ({"turns": [{**ONE, "env_lo_s": -1}]}, r"turns\[0\]\.env_lo_s: got -1, want seconds >= 0, or null"),
            ({"turns": [{**ONE, "env_lo_s": True}]}, r"turns\[0\]\.env_lo_s: got true, want seconds"),
        ],
    )
    def test_mistakes(self, tmp_path: Path, document: object, message: str) -> None:
        with pytest.raises(ProfileError, match=rf"t\.jsonl: line 2: {message}"):
            read_recording(write(tmp_path, {"turns": [ONE]}, document))

    @pytest.mark.parametrize("number", ["1e400", "-Infinity", "9" * 5000])
    def test_huge_numbers(self, tmp_path: Path, number: str) -> None:
        path = tmp_path / "t.jsonl"
        path.write_text(f'{{"turns": [{{"input_tokens": {number}, "output_tokens": 1}}]}}')
        with pytest.raises(ProfileError, match=r"t\.jsonl: line 1: (turns\[0\]\.input_tokens: )?(got|not JSON)"):
            read_recording(path)


class TestRun:
    def test_by_hand(self, tmp_path: Path) -> None:
        """Turns of several trajectories come mixed; an attempt counts where it ended, however its group did."""
        path = run_folder(
            tmp_path,
            turn("g0.0", 0, prompt=100, generated=7, env_s=0.25),
            turn("g0.1", 0),
            turn("g0.0", 1, prompt=20),
            turn("g1.0r1", 0),
            end("g0.1", 1, "truncated_turns"),
            end("g0.0", 2),
            end("g1.0r1", 1, "truncated_tokens"),
        )
        recording = read_recording(path)
        assert [trajectory.group for trajectory in recording.trajectories] == ["g0", "g0", "g1"]
        assert recording.trajectories[1].turns == (RecordedTurn(100, 7, 0.25), RecordedTurn(20, 5, 0.5))
        assert recording.trajectories[0].where == f"{path}/journal/trajectories.jsonl:2"
        assert recording.left_out == 0

    def test_what_is_left_out(self, tmp_path: Path) -> None:
        """Faults, evaluations, what lacks turns or has too many, what never ended; only ends are counted."""
        path = run_folder(
            tmp_path,
            turn("g0.0", 0),
            end("g0.0", 1),
            turn("g0.1", 0),
            end("g0.1", 1, "env_hung"),
            turn("e3.0.0", 0),
            end("e3.0.0", 1, group="e3.0"),
            turn("g0.2", 1),
            end("g0.2", 2),
            turn("g0.3", 0),
            turn("g0.3", 1),
            end("g0.3", 1),
            end("g0.4", 0, "cancelled"),
            turn("g0.5", 0),
        )
        recording = read_recording(path)
        assert [trajectory.group for trajectory in recording.trajectories] == ["g0"]
        assert recording.left_out == 5

    def test_dropped_lines_and_a_torn_one(self, tmp_path: Path) -> None:
        path = run_folder(tmp_path, turn("g0.0", 0), end("g0.0", 1))
        for stream in ("turns", "trajectories"):
            with (path / "journal" / f"{stream}.jsonl").open("ab") as file:
                file.write(dropped_line(3) + b'{"at_s":')
        assert len(read_recording(path).trajectories) == 1

    def test_as_a_profile(self, tmp_path: Path) -> None:
        path = run_folder(tmp_path, turn("g0.0", 0, prompt=100), turn("g0.0", 1, prompt=20), end("g0.0", 2))
        found = read_workload(path)
        assert (found.turns.mean, found.prompt_tokens.mean, found.new_tokens.mean) == (2, 100, 20)
        assert (found.generated_tokens.mean, found.env_s.mean) == (5, 0.5)

    @pytest.mark.parametrize("streams", [(), ("turns",), ("trajectories",)])
    def test_nothing_there(self, tmp_path: Path, streams: tuple[str, ...]) -> None:
        path = run_folder(tmp_path)
        for stream in {"turns", "trajectories"} - set(streams):
            (path / "journal" / f"{stream}.jsonl").unlink()
        with pytest.raises(ProfileError, match=r"run: got no trajectory, want at least one$"):
            read_recording(path)

    def test_nothing_of_use_there(self, tmp_path: Path) -> None:
        path = run_folder(tmp_path, end("g0.4", 0, "cancelled"))
        with pytest.raises(ProfileError, match=r"run: got no trajectory \(1 were left out\), want at least one$"):
            read_recording(path)

    @pytest.mark.parametrize(
        ("stream", "text", "message"),
        [
            ("turns", b"{}\n", r"turns\.jsonl:1: got {}, want {.schema.: .pearl\.turns."),
            ("turns", header_line("turns") + b"{\n", r"turns\.jsonl:2: malformed line: "),
            ("turns", header_line("turns") + b"[" * 100_000 + b"\n", r"turns\.jsonl:2: malformed line: "),
            ("turns", header_line("turns") + b"[]\n", r"turns\.jsonl:2: malformed entry: got list, want an object"),
            ("turns", encode(turn("g0.0", 0, prompt=-1)), r"turns\.jsonl:2: prompt: got -1, want a whole number >= 0"),
            (
                "turns",
                encode(turn("g0.0", 0, generated=10**16)),
                r"turns\.jsonl:2: generated: got 1000.*, want a whole",
            ),
            ("turns", encode(turn("g0.0", 0, env_s=-2)), r"turns\.jsonl:2: env_s: got -2.*, want seconds >= 0"),
            ("turns", encode(turn("g0.0", 0, env_s=float("nan"))), r"turns\.jsonl:2: env_s: got NaN, want seconds"),
            (
                "trajectories",
                encode(end("g0.0", 1, "asleep")),
                r'ries\.jsonl:2: status: got "asleep", want one of done, ',
            ),
        ],
    )
    def test_mistakes(self, tmp_path: Path, stream: str, text: bytes, message: str) -> None:
        path = run_folder(tmp_path, turn("g0.0", 0), end("g0.0", 1))
        has_header = text.startswith((header_line(stream), b"{}"))
        (path / "journal" / f"{stream}.jsonl").write_bytes(text if has_header else header_line(stream) + text)
        with pytest.raises(ProfileError, match=message):
            read_recording(path)

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        path = run_folder(tmp_path)
        (path / "journal" / "turns.jsonl").unlink()
        os.mkfifo(path / "journal" / "turns.jsonl")
        with pytest.raises(ProfileError, match=r"turns\.jsonl: got no regular file; want a stream of a journal$"):
            read_recording(path)

    def test_what_is_too_long(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LONGEST_STREAM_BYTES", 10)
        path = run_folder(tmp_path, turn("g0.0", 0))
        with pytest.raises(ProfileError, match=r"turns\.jsonl: got \d+ B, more than 10 B$"):
            read_recording(path)
