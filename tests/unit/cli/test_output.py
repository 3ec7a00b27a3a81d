"""Output that cannot be written: real processes, a device that is always full, a pipe that nobody reads."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pearl.cli import main as command
from pearl.cli.output import OutputFailed, guarded_output
from pearl.report.live import PlainReporter, Reporter
from pearl.report.run_folder import RunFolder
from tests.unit.cli.test_train import Job, job, run_folders

__all__ = ["job"]

FULL = Path("/dev/full")
SAID = "output: cannot be written: No space left on device; want a file or a pipe that takes it\n"
PLAN = """\
model.path = "m"
environment = { kind = "guess_number", slots = 128 }
rollout = { groups_per_batch = 4, group_size = 16, max_turns = 145, max_context_tokens = 32768 }
engine.max_context_tokens = 32768
sampling.max_new_tokens = 8192
fleet = { external_gpus = 8, tp = [2], overlap_tp = 2 }
"""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason="no /dev/full here")


def pearl(
    arguments: Sequence[str], *, stdout: int, stderr: int = subprocess.PIPE, **environment: str
) -> tuple[int, str]:
    """Exit status and what is on stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "pearl.cli.main", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        text=True,
        check=False,
        env={**{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}, **environment},
    )
    return done.returncode, done.stderr or ""


COMMANDS = [
    ("--help",),
    ("--version",),
    ("doctor",),
    ("train", "--help"),
    ("config", "show", "x.toml"),
    ("config", "check", "x.toml"),
    ("plan", "explain", "p.toml"),
]


@pytest.fixture
def full() -> int:
    return os.open(FULL, os.O_WRONLY)


@pytest.fixture(autouse=True)
def plan_file(folder: Path) -> None:
    (folder / "p.toml").write_text(PLAN)


class TestProcess:
    @pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
    def test_a_full_disk_is_one_line_and_status_1(self, arguments: tuple[str, ...], full: int) -> None:
        assert pearl(arguments, stdout=full) == (1, SAID)

    def test_so_it_is_without_a_buffer(self, full: int) -> None:
        assert pearl(["--version"], stdout=full, PYTHONUNBUFFERED="1") == (1, SAID)

    @pytest.mark.parametrize("arguments", [("--help",), ("plan", "explain", "p.toml")], ids=" ".join)
    def test_a_reader_that_went_away_is_told_nothing(self, arguments: tuple[str, ...]) -> None:
        reading, writing = os.pipe()
        os.close(reading)
        assert pearl(arguments, stdout=writing) == (1, "")

    @pytest.mark.parametrize("arguments", [("nonsense",), ("config", "check", "no.toml")], ids=" ".join)
    def test_a_mistake_that_cannot_be_told(self, arguments: tuple[str, ...], full: int) -> None:
        assert pearl(arguments, stdout=subprocess.DEVNULL, stderr=full) == (1, "")

    def test_neither_can_be_written(self, full: int) -> None:
        assert pearl(["--version"], stdout=full, stderr=full) == (1, "")

    @pytest.mark.parametrize(("closed", "status"), [(">&-", 0), ("2>&-", 0), (">&- 2>&-", 0)])
    def test_a_stream_that_was_closed_before_is_not_missed(self, closed: str, status: int) -> None:
        line = f'"$0" -m pearl.cli.main --version {closed}'
        done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (status, "")

    def test_what_is_written_is_as_before(self) -> None:
        done = subprocess.run([sys.executable, "-m", "pearl.cli.main", "--version"], capture_output=True, check=False)
        assert done.stdout == f"pearl {command.pearl.__version__}\n".encode()
        assert (done.returncode, done.stderr) == (0, b"")


@contextlib.contextmanager
def printing_to(path: Path, **flags: bool) -> Iterator[io.TextIOWrapper]:
    """A file as stdout, in the test itself: pytest sets streams of its own between set-up and test."""
    with path.open("w", encoding="latin-1", errors="xmlcharrefreplace") as stream:
        stream.reconfigure(**flags)
        with contextlib.redirect_stdout(stream):
            yield stream


def fill(stream: io.TextIOWrapper) -> None:
    """From now on its disk is full."""
    with FULL.open("w") as full:
        os.dup2(full.fileno(), stream.fileno())


class TestTrain:
    """With a runtime that stands in."""

    @pytest.fixture(autouse=True)
    def argv(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "argv", ["pearl", "train", "x.toml"])

    def test_nothing_begins_where_nothing_can_be_said(
        self, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with printing_to(tmp_path / "out") as stream:
            fill(stream)
            with pytest.raises(SystemExit, match=r"^1$"):
                command.main()
        assert (job.calls, run_folders()) == ([], [])
        assert capsys.readouterr().err == SAID

    def test_a_disk_that_fills_up_ends_no_run(
        self, job: Job, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        done: list[str] = []
        with printing_to(tmp_path / "out") as stream:

            def act(folder: RunFolder, reporter: Reporter) -> None:
                fill(stream)
                reporter.stage("training", "goes on")
                done.append("all")

            job.act = act
            with pytest.raises(SystemExit, match=r"^1$"):
                command.main()
        assert done == ["all"]
        assert (tmp_path / "out").read_text().splitlines()[0] == "ray         starting"
        assert capsys.readouterr().err == SAID


class TestGuard:
    def end(self, how: Callable[[], object]) -> None:
        """A command that prints, and ends so."""
        with guarded_output():
            print("gathered")
            how()

    def test_the_streams_are_given_back(self, tmp_path: Path) -> None:
        error = sys.stderr
        with printing_to(tmp_path / "out") as stream:
            with guarded_output():
                assert sys.stdout is not stream
                assert (sys.stdout.encoding, sys.stdout.errors) == ("latin-1", "xmlcharrefreplace")
                print("é –")
            assert (sys.stdout, sys.stderr) == (stream, error)
        assert (tmp_path / "out").read_bytes() == b"\xe9 &#8211;\n"

    @pytest.mark.parametrize("flag", ["line_buffering", "write_through"])
    def test_lines_come_at_once_where_they_did(self, tmp_path: Path, flag: str) -> None:
        with printing_to(tmp_path / "out", **{flag: True}), guarded_output():
            print("now")
            assert (tmp_path / "out").read_bytes() == b"now\n"

    def test_and_else_they_are_gathered(self, tmp_path: Path) -> None:
        with printing_to(tmp_path / "out"):
            with guarded_output():
                print("later")
                assert (tmp_path / "out").read_bytes() == b""
            assert (tmp_path / "out").read_bytes() == b"later\n"

    @pytest.mark.parametrize(
        ("end", "status", "said"), [(0, 1, SAID), (None, 1, SAID), (2, 2, ""), (130, 130, "")], ids=str
    )
    def test_what_was_gathered_is_written_before_success_is_told(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: int | None, status: int, said: str
    ) -> None:
        """A command that failed for another reason says that one."""
        with printing_to(tmp_path / "out") as stream:
            fill(stream)
            with pytest.raises(SystemExit, match=f"^{status}$"):
                self.end(lambda: sys.exit(end))
        assert capsys.readouterr().err == said

    def test_other_errors_of_the_system_stay_what_they_are(self, tmp_path: Path) -> None:
        with printing_to(tmp_path / "out") as stream:
            fill(stream)
            with pytest.raises(FileNotFoundError):
                self.end(lambda: os.stat("no such file"))

    def test_a_stream_that_is_not_there(self) -> None:
        with contextlib.redirect_stdout(None), pytest.raises(SystemExit, match=r"^0$"):
            self.end(lambda: sys.exit(0))

    def test_reporters_take_it_for_what_it_is(self, tmp_path: Path) -> None:
        """An error of the system, which they let pass."""
        with printing_to(tmp_path / "out") as stream, guarded_output():
            fill(stream)
            PlainReporter(1).stage("a", "b")
        assert issubclass(OutputFailed, OSError)
