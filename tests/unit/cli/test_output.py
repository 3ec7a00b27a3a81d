"""Output that cannot be written: real processes, a device that is always full, a pipe that nobody reads."""

from __future__ import annotations

import array
import contextlib
import fcntl
import io
import os
import select
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from pearl.cli import main as command
from pearl.cli.output import OutputFailed, guarded_output, stdout_may_be_closed
from pearl.report.live import PlainReporter, Reporter
from pearl.report.run_folder import RunFolder
from tests.unit.cli.test_train import Job, job, run_folders

__all__ = ["job"]

FULL = Path("/dev/full")
CLOSED = "output: cannot be written: stdout is closed; want a file or a pipe that takes it\n"
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

    @pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
    def test_a_result_that_was_asked_for_and_is_lost_is_one_line_and_status_1(self, arguments: tuple[str, ...]) -> None:
        assert self.closed(" ".join(arguments), ">&-") == (1, "", CLOSED)

    def test_neither_stream_is_there(self) -> None:
        assert self.closed("--version", ">&- 2>&-") == (1, "", "")

    def test_a_closed_stderr_is_not_missed(self) -> None:
        assert self.closed("--version", "2>&-") == (0, f"pearl {command.pearl.__version__}\n", "")

    def test_a_mistake_is_told_where_stdout_is_closed(self) -> None:
        status, _, said = self.closed("config check no.toml", ">&-")
        assert (status, "no.toml" in said, CLOSED in said) == (2, True, False)

    def closed(self, arguments: str, closed: str) -> tuple[int, str, str]:
        line = f'"$0" -m pearl.cli.main {arguments} {closed}'
        done = subprocess.run(["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def test_a_pipe_that_does_not_wait_gets_all_of_it(self) -> None:
        """More than it holds, read only when it is full."""
        expected = subprocess.run(self.explained(), capture_output=True, check=True).stdout
        reading, process = self.started_on_a_small_pipe()
        assert len(expected) > 4096
        poll_until_full(reading)
        with open(reading, "rb") as pipe:
            assert pipe.read() == expected
        _, said = process.communicate()
        assert (process.returncode, said) == (0, b"")

    def test_a_reader_that_goes_away_from_it_is_told_nothing(self) -> None:
        reading, process = self.started_on_a_small_pipe()
        poll_until_full(reading)
        os.close(reading)
        _, said = process.communicate()
        assert (process.returncode, said) == (1, b"")

    def explained(self) -> list[str]:
        return [sys.executable, "-m", "pearl.cli.main", "plan", "explain", "p.toml", "--json"]

    def started_on_a_small_pipe(self) -> tuple[int, subprocess.Popen[bytes]]:
        """A pipe of one page whose writing end does not wait for room; the end to read from."""
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
        os.set_blocking(writing, False)
        process = subprocess.Popen(self.explained(), stdout=writing, stderr=subprocess.PIPE)
        os.close(writing)
        return reading, process

    def test_what_is_written_is_as_before(self) -> None:
        done = subprocess.run([sys.executable, "-m", "pearl.cli.main", "--version"], capture_output=True, check=False)
        assert done.stdout == f"pearl {command.pearl.__version__}\n".encode()
        assert (done.returncode, done.stderr) == (0, b"")


def poll_until_full(reading: int) -> None:
    """Wait until a pipe of one page holds all that it can."""
    held = array.array("i", [0])
    while held[0] < 4096:
        assert select.select([reading], [], [], 60)[0], "nothing was written"
        fcntl.ioctl(reading, termios.FIONREAD, held)


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

    def test_a_closed_stdout_is_not_missed(self, job: Job, capsys: pytest.CaptureFixture[str]) -> None:
        with contextlib.redirect_stdout(None), contextlib.suppress(SystemExit):
            command.main()
        assert (len(job.calls), capsys.readouterr().err) == (1, "")

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

    def test_a_stream_that_is_not_there(self, capsys: pytest.CaptureFixture[str]) -> None:
        with contextlib.redirect_stdout(None):
            with pytest.raises(SystemExit, match=r"^1$"):
                self.end(lambda: sys.exit(0))
            assert sys.stdout is None
        assert capsys.readouterr().err == CLOSED

    def test_and_that_nobody_writes_to(self, capsys: pytest.CaptureFixture[str]) -> None:
        with contextlib.redirect_stdout(None), guarded_output():
            print("", end="")
        assert capsys.readouterr().err == ""

    def test_what_a_command_prints_beside_what_it_does_is_not_missed(self, capsys: pytest.CaptureFixture[str]) -> None:
        with contextlib.redirect_stdout(None), guarded_output():
            stdout_may_be_closed()
            assert sys.stdout is None
            print("progress")
        assert capsys.readouterr().err == ""

    def test_a_stream_that_is_there_stays(self, tmp_path: Path) -> None:
        with printing_to(tmp_path / "out"), guarded_output():
            stdout_may_be_closed()
            print("progress")
        assert (tmp_path / "out").read_text() == "progress\n"

    def test_reporters_take_it_for_what_it_is(self, tmp_path: Path) -> None:
        """An error of the system, which they let pass."""
        with printing_to(tmp_path / "out") as stream, guarded_output():
            fill(stream)
            PlainReporter(1).stage("a", "b")
        assert issubclass(OutputFailed, OSError)
