"""What is shown while a simulation runs, on a clock of its own."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from pearl.cli.progress import LOOK_EVERY, SPEAK_EVERY_S, Aim, Follower, LiveLine, NotShown, PlainLines, shown_here
from pearl.records.ids import WeightVersion
from pearl.records.journal import GroupEntry, JournalEntry
from pearl.records.training import TrainReport
from pearl.sim.tally import Moment
from tests.unit.cluster.test_job import STEP


class Sink:
    def __init__(self) -> None:
        self.entries: list[JournalEntry] = []
        self.flushed = False

    def write(self, entry: JournalEntry) -> None:
        self.entries.append(entry)

    async def flush(self) -> None:
        self.flushed = True


class Lines:
    def __init__(self) -> None:
        self.said: list[str] = []
        self.shown: list[tuple[float, str]] = []
        self.closed = False

    def say(self, line: str) -> None:
        self.said.append(line)

    def now(self, share: float, text: str) -> None:
        self.shown.append((share, text))

    def close(self) -> None:
        self.closed = True


def entry(at_s: float) -> GroupEntry:
    return GroupEntry(at_s=at_s, group="g", task="t", seed=0, status="completed", admitted_version=0, attempts=1)


def test_the_clock_is_looked_at_from_time_to_time() -> None:
    sink, lines, now_s = Sink(), Lines(), 100.0
    follower = Follower(sink, lines, Aim(steps=4, duration_s=None), clock=lambda: now_s)
    for _ in range(LOOK_EVERY - 1):
        follower.write(entry(600.0))
    now_s = 102.0
    assert lines.shown == []
    follower.fleet = lambda: Moment(
        at_s=0.0, owned={"reserved": 4, "external": 12}, serving={"colocated": 4, "borrowed": 8}
    )
    follower.write(entry(600.0))
    text = "at 10 min 00 s, 0 steps, 16 GPUs (12 external, 8 borrowed), 300x real time"
    assert lines.shown == [(0.0, text)]
    assert len(sink.entries) == LOOK_EVERY
    asyncio.run(follower.flush())
    follower.close()
    assert (sink.flushed, lines.closed) == (True, True)


def test_a_step_has_a_line() -> None:
    lines, now_s = Lines(), 0.0
    follower = Follower(Sink(), lines, Aim(steps=4, duration_s=None), clock=lambda: now_s)
    now_s = 2.0
    report = TrainReport(version=WeightVersion(3), train_s=60.0, samples=0, trained_tokens=0, metrics={})
    follower.step(replace(STEP, at_s=3600.0, wait_s=90.0, report=report), 1234.5)
    (line,) = lines.said
    assert line == (
        "step 3/4    1 h 00 min  waited 1 min 30 s, trained 1 min 00 s    1,234 tokens/s generated  no GPUs  1,800x real time"
    )
    assert lines.shown[-1][0] == 0.75


@pytest.mark.parametrize(
    ("aim", "steps", "now_s", "share"),
    [
        (Aim(steps=4, duration_s=None), 1, 9e9, 0.25),
        (Aim(steps=100, duration_s=60.0), 1, 30.0, 0.5),
        (Aim(steps=2, duration_s=60.0), 2, 30.0, 1.0),
        (Aim(steps=0, duration_s=None), 0, 0.0, 1.0),
    ],
)
def test_how_far_it_is(aim: Aim, steps: int, now_s: float, share: float) -> None:
    assert aim.share(steps, now_s) == share


def test_plain_lines_speak_where_nothing_was_said_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    now_s = 0.0
    lines = PlainLines(clock=lambda: now_s)
    now_s = SPEAK_EVERY_S - 1
    lines.now(0.1, "early")
    now_s = SPEAK_EVERY_S
    lines.now(0.25, "late")
    lines.now(0.3, "again")
    lines.say("a step")
    lines.close()
    assert capsys.readouterr().out.splitlines() == [" 25 %  late", "a step"]


def test_a_terminal_has_one_line_that_is_redrawn() -> None:
    file = StringIO()
    live = LiveLine(Console(file=file, force_terminal=True, width=100))
    live.now(0.5, "at 3 min")
    live.say("step 1/2 [not markup]")
    live.close()
    assert "step 1/2 [not markup]" in file.getvalue()
    assert "50 %" in file.getvalue()
    assert "at 3 min" in file.getvalue()


def test_programs_are_shown_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = shown_here(quiet=True)
    assert isinstance(quiet, NotShown)
    quiet.say("x")
    quiet.now(0.5, "x")
    quiet.close()
    assert capsys.readouterr().out == ""
    assert isinstance(shown_here(quiet=False), PlainLines)
