"""What a run shows, rendered to text."""

import io
from dataclasses import replace

import pytest

from pearl.report.live import MultiReporter, PlainReporter, Reporter, StepReport, fault_text, plain_line
from tests.unit.report._reports import REPORT, Terminal


class TestPlain:
    def test_one_line_per_step(self) -> None:
        assert plain_line(REPORT, 100) == (
            "step   7/100    2 min 05 s  success 0.44  reward  0.531    1,234 tokens/s  staleness 0.62 max 1  "
            "idle trainer  12 % rollout 100 %  in flight  128"
        )

    def test_columns_stay_in_place(self) -> None:
        later = replace(
            REPORT,
            step=100,
            elapsed_s=7384.0,
            success_mean=None,
            reward_mean=-1.25,
            tokens_per_s=9.9,
            trainer_idle_frac=0,
        )
        first, second = plain_line(REPORT, 100), plain_line(later, 100)
        for label in ("success", "reward", "tokens/s", "staleness", "idle", "in flight"):
            assert first.index(label) == second.index(label), label

    def test_faults_come_last(self) -> None:
        line = plain_line(replace(REPORT, faults={"env_hung": 2, "timed_out": 1}), 100)
        assert line.endswith("in flight  128  faults 2 env_hung, 1 timed_out")

    def test_lines_are_written_as_they_come(self) -> None:
        file = io.StringIO()
        reporter = PlainReporter(100, file)
        reporter.stage("evaluation", "before training: 16 tasks")
        reporter.step(REPORT)
        reporter.close()
        assert file.getvalue() == f"evaluation  before training: 16 tasks\n{plain_line(REPORT, 100)}\n"

    def test_a_reader_that_went_away_ends_nothing(self) -> None:
        file = Terminal()
        file.is_gone = True
        PlainReporter(100, file).step(REPORT)

    def test_standard_output_is_the_default(self, capsys: pytest.CaptureFixture[str]) -> None:
        PlainReporter(100).stage("warmup", "supervised step 1")
        assert capsys.readouterr().out == "warmup      supervised step 1\n"


@pytest.mark.parametrize(
    ("faults", "text"),
    [
        ({}, "none"),
        ({"env_hung": 0}, "none"),
        ({"timed_out": 1, "env_hung": 3, "env_lost": 1}, "3 env_hung, 1 env_lost, 1 timed_out"),
    ],
)
def test_faults_most_frequent_first(faults: dict[str, int], text: str) -> None:
    assert fault_text(faults) == text


class TestMulti:
    def test_all_are_told_and_closed_in_reverse(self) -> None:
        calls: list[tuple[str, object]] = []

        class Recorder:
            def __init__(self, name: str) -> None:
                self.name = name

            def stage(self, name: str, text: str) -> None:
                calls.append((self.name, (name, text)))

            def step(self, report: StepReport) -> None:
                calls.append((self.name, report))

            def close(self) -> None:
                calls.append((self.name, "close"))

        reporter: Reporter = MultiReporter([Recorder("a"), Recorder("b")])
        reporter.stage("s", "t")
        reporter.step(REPORT)
        reporter.close()
        assert calls == [
            ("a", ("s", "t")), ("b", ("s", "t")), ("a", REPORT), ("b", REPORT), ("b", "close"), ("a", "close"),
        ]  # fmt: skip
