"""Files of trajectories: a small one by hand, every mistake with its line, and the shared recordings where they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from pearl.core.distribution import Distribution, constant
from pearl.errors import ProfileError
from pearl.report.workload_file import read_workload

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "workloads"


def turn(new: object, generated: object, *env_s: object) -> dict[str, object]:
    return {"input_tokens": new, "output_tokens": generated, **({"env_s": env_s[0]} if env_s else {})}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def write(file: Path, *trajectories: list[dict[str, object]]) -> Path:
    file.write_text("".join(json.dumps({"id": "x", "turns": turns}) + "\n" for turns in trajectories))
    return file


class TestRead:
    def test_by_hand(self, file: Path) -> None:
        write(
            file,
            [turn(100, 10, 1.0), turn(20, 30, None), turn(20, 10, 4)],
            [turn(300, 10, 1.0)],
        )
        found = read_workload(file)
        assert found.turns == Distribution((1.0, 3.0), (0.5, 0.5))
        assert found.prompt_tokens == Distribution((100.0, 300.0), (0.5, 0.5))
        assert found.new_tokens == constant(20)
        assert found.generated_tokens == Distribution((10.0, 30.0), (0.75, 0.25))
        assert found.env_s.values == (1.0, 4.0)
        assert found.env_s.weights == pytest.approx((2 / 3, 1 / 3))
        assert (found.retained, found.turn_overhead_s) == (1.0, 0.0)
        # 15 tokens at 10 ms, then 2 s on average.
        assert found.theta == pytest.approx(2 / 0.15)

    def test_waits_that_were_not_recorded(self, file: Path) -> None:
        """An absent key is as null; a caller may know better than 0."""
        write(file, [turn(100, 10), turn(20, 30, None)])
        assert read_workload(file).env_s == constant(0)
        assert read_workload(file).theta == 0.0
        given = read_workload(file, env_s=constant(0.6))
        assert given.env_s == constant(0.6)
        assert given.theta == pytest.approx(3.0)

    def test_recorded_waits_win_over_given_ones(self, file: Path) -> None:
        write(file, [turn(100, 10, 0)])
        assert read_workload(file, env_s=constant(9)).env_s == constant(0)

    def test_single_turns(self, file: Path) -> None:
        assert read_workload(write(file, [turn(100, 10)])).new_tokens == constant(0)

    def test_other_keys_and_empty_lines_do_not_matter(self, file: Path) -> None:
        file.write_text('\n{"turns": [{"input_tokens": 0, "output_tokens": 1, "llm_s": "x"}], "group": 3}\n \n')
        assert read_workload(file).prompt_tokens == constant(0)

    def test_a_strange_line_end_in_text_ends_no_line(self, file: Path) -> None:
        file.write_text('{"id": "a\u2028b", "turns": [{"input_tokens": 1, "output_tokens": 1}]}', encoding="utf-8")
        assert read_workload(file).turns == constant(1)


class TestRefused:
    def test_no_file(self, file: Path) -> None:
        with pytest.raises(
            ProfileError, match=r"t\.jsonl: no such file; want a file of trajectories \(JSONL\) or a run folder$"
        ):
            read_workload(file)

    def test_a_folder(self, tmp_path: Path) -> None:
        with pytest.raises(
            ProfileError,
            match=r": got a folder, no regular file; want a file of trajectories \(JSONL\) or a run folder$",
        ):
            read_workload(tmp_path)

    def test_a_pipe_is_not_waited_for(self, file: Path) -> None:
        os.mkfifo(file)
        with pytest.raises(ProfileError, match=r"t\.jsonl: got a pipe, no regular file; want a file of trajectories"):
            read_workload(file)

    def test_what_never_ends(self) -> None:
        with pytest.raises(ProfileError, match=r"^/dev/zero: got a device, no regular file; want a file of traj"):
            read_workload(Path("/dev/zero"))

    @pytest.mark.parametrize(("more", "message"), [(0, "line 2: not JSON"), (1, "got 256.0 MiB, more than 256.0 MiB")])
    def test_what_is_too_long(self, file: Path, more: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
        write(file, [turn(1, 1)])
        os.truncate(file, 256 * 2**20 + more)
        with pytest.raises(ProfileError, match=rf"t\.jsonl: {message}"):
            read_workload(file)

    def test_not_text(self, file: Path) -> None:
        file.write_bytes(b'{"id": "\xff"}')
        with pytest.raises(
            ProfileError,
            match=r"t\.jsonl: cannot be read: not UTF-8 at byte 8; want a file of trajectories",
        ):
            read_workload(file)

    @pytest.mark.parametrize("text", ["", "\n \n"])
    def test_no_trajectory(self, file: Path, text: str) -> None:
        file.write_text(text)
        with pytest.raises(ProfileError, match=r"t\.jsonl: got no trajectory, want at least one line$"):
            read_workload(file)

    def test_nothing_generated(self, file: Path) -> None:
        with pytest.raises(ProfileError, match=r"t\.jsonl: output_tokens: got 0 everywhere"):
            read_workload(write(file, [turn(1, 0), turn(1, 0)]))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", "not JSON: Expecting .*; want one trajectory a line"),
            ("[" * 100_000, "not JSON: nested too deeply; want one trajectory a line"),
            ("[1]", r'got \[1\], want an object with "turns": a list of at least one'),
            ("3", "got 3, want an object"),
            ('{"turn": []}', r'got {"turn": \[\]}, want an object with "turns"'),
            ('{"turns": []}', r'got {"turns": \[\]}, want an object with "turns"'),
            ('{"turns": {"a": 1}}', 'got {"turns": .*, want an object with "turns"'),
            ('{"turns": 3, "x": "' + "y" * 90 + '"}', 'got {"turns": 3, "x": "y{38}\\.\\.\\., want'),
            ('{"turns": [3]}', r"turns\[0\]: got 3, want an object"),
            ('{"turns": [{"input_tokens": NaN, "output_tokens": 1}]}', "got NaN, want finite numbers"),
        ],
    )
    def test_not_a_trajectory(self, file: Path, line: str, message: str) -> None:
        write(file, [turn(1, 1)])
        file.write_text(file.read_text() + "\n" + line)
        with pytest.raises(ProfileError, match=rf"t\.jsonl: line 3: {message}"):
            read_workload(file)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (turn(None, 1), r"turns\[1\].input_tokens: got null, want a whole number >= 0"),
            (turn(-1, 1), r"turns\[1\].input_tokens: got -1, want a whole number >= 0"),
            (turn(1.5, 1), r"turns\[1\].input_tokens: got 1.5, want a whole number >= 0"),
            (turn(True, 1), r"turns\[1\].input_tokens: got true, want a whole number >= 0"),
            (turn(10**16, 1), r"turns\[1\].input_tokens: got 10000000000000000, want a whole number >= 0"),
            (turn(1, "2"), r'turns\[1\].output_tokens: got "2", want a whole number >= 0'),
            ({"input_tokens": 1}, r"turns\[1\].output_tokens: got null, want a whole number >= 0"),
            (turn(1, 1, -0.1), r"turns\[1\].env_s: got -0.1, want seconds >= 0, or null"),
            (turn(1, 1, "0"), r'turns\[1\].env_s: got "0", want seconds >= 0, or null'),
            (turn(1, 1, False), r"turns\[1\].env_s: got false, want seconds >= 0, or null"),
            (turn(1, 1, 1e16), r"turns\[1\].env_s: got 1e\+16, want seconds >= 0, or null"),
        ],
    )
    def test_a_wrong_number(self, file: Path, bad: dict[str, object], message: str) -> None:
        with pytest.raises(ProfileError, match=rf"t\.jsonl: line 2: {message}$"):
            read_workload(write(file, [turn(1, 1)], [turn(1, 1), bad]))

    def test_the_edges_are_allowed(self, file: Path) -> None:
        found = read_workload(write(file, [turn(10**15, 10**15, 1e15), turn(0, 0, 0)]))
        assert found.prompt_tokens == constant(1e15)


@pytest.mark.parametrize(
    ("name", "count", "turns", "new", "generated"),
    [
        ("swe_claudecode_glm47flash", 111, 50.7, 701, 258),
        ("tau_airline_gpt4o", 200, 12.3, 136, 62),
        ("webshop_react", 500, 6.9, 59, 17),
    ],
)
def test_shared_recordings(name: str, count: int, turns: float, new: float, generated: float) -> None:
    """Their published means."""
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip("no shared/data beside the project")
    found = read_workload(path)
    assert found.turns.mean == pytest.approx(turns, rel=0.01)
    assert found.new_tokens.mean == pytest.approx(new, rel=0.01)
    assert found.generated_tokens.mean == pytest.approx(generated, rel=0.01)
    assert min(found.turns.weights) >= 1 / count - 1e-12


def test_a_path_that_is_none() -> None:
    with pytest.raises(
        ProfileError, match=r"^'a\\x00b': cannot be read: embedded null byte; want a file of trajectories"
    ):
        read_workload(Path("a\0b"))
