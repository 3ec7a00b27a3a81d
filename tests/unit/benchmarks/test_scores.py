"""Scores of predictions, by hand: errors, truths that are ratio estimates, what choosing loses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest

from benchmarks import _scores
from benchmarks._predict_cells import Cell, Load
from benchmarks._scores import CellScore, ShapeScore, bias, mape, noise, regret, score, table, truth
from benchmarks._truth import Asked
from benchmarks.predict import checks_of
from pearl.core.distribution import constant
from pearl.core.makespan import Candidates, Forecast, Infeasible, Predictions, Profile
from pearl.core.progress import Progress, fresh_batch
from pearl.core.workload import WorkloadProfile

WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(100),
    new_tokens=constant(50),
    generated_tokens=constant(20),
    env_s=constant(3),
)
BEGUN = Progress(batch_trajectories=8, unfinished=8, live_groups=2, needed_groups=2, running={0: 6, 2: 2})


def cell(workload: str = "webshop", max_staleness: int = 0) -> Cell:
    return Cell(
        platform="qwen3-8b-h100",
        workload=workload,
        load=Load(groups=2, group_size=4, workers=4, tp=1),
        max_staleness=max_staleness,
        time_scale=1.1,
        seed=5,
    )


def asked(close_s: float, progress: Progress = BEGUN, *, alone_s: float = 1.0, usual_s: float = 1.0) -> Asked:
    return Asked(
        workload=WORK,
        time_scale=MappingProxyType({}),
        progress=progress,
        close_s=close_s,
        alone_s=alone_s,
        usual_s=usual_s,
    )


def shape(truth_s: float, predicted_s: float, paper_s: float = math.inf, noise: float = 0.0) -> ShapeScore:
    return ShapeScore(shape="4C", truth_s=truth_s, noise=noise, predicted_s={"pearl": predicted_s, "paper": paper_s})


def scored(shapes: Sequence[ShapeScore], lost: Sequence[float], of: Cell | None = None) -> CellScore:
    return CellScore(cell=of or cell(), shapes=tuple(shapes), regrets={"pearl": tuple(lost), "paper": (0.5,)})


class TestTruth:
    FRESH = fresh_batch(2, 4)

    def test_of_batches_that_begin_it_is_a_ratio_estimate(self) -> None:
        """22 s for 10 s alone: 2.2 times what is usual, 6 s. They are off by 1 s each."""
        found = truth(
            [asked(10, self.FRESH, alone_s=5, usual_s=6), asked(12, self.FRESH, alone_s=5, usual_s=6)],
        )
        assert found == pytest.approx((13.2, math.sqrt(2) / 26.4))

    def test_where_the_slowest_explains_it_there_is_no_noise(self) -> None:
        found = truth([asked(2 * alone, self.FRESH, alone_s=alone, usual_s=10) for alone in (5, 8, 17)])
        assert found == pytest.approx((20.0, 0.0))

    def test_of_others_it_is_the_mean(self) -> None:
        """Variance 8 of each; of the sum 16."""
        assert truth([asked(10), asked(14)]) == pytest.approx((12.0, 4 / 24))
        assert truth([asked(10)]) == pytest.approx((10.0, 0.0))

    def test_of_both(self) -> None:
        """Two at 20 * 3 / 2 = 30 s, off by 2 s each, and 10 and 14."""
        both = [asked(18, self.FRESH, alone_s=2, usual_s=3), asked(10), asked(14)]
        both.append(asked(22, self.FRESH, alone_s=2, usual_s=3))
        assert truth(both) == pytest.approx(((60 + 24) / 4, math.sqrt(16 + 8) / 84))

    @pytest.mark.parametrize("running", [{0: 8, 3: 0}, {0: 8}])
    def test_nobody_has_made_a_turn(self, running: dict[int, int]) -> None:
        fresh = Progress(batch_trajectories=8, unfinished=8, live_groups=2, needed_groups=2, running=running)
        assert truth([asked(10, fresh, alone_s=2, usual_s=3)])[0] == pytest.approx(15.0)

    def test_nothing_in_flight_is_no_batch_that_begins(self) -> None:
        nothing = Progress(batch_trajectories=8, unfinished=8, live_groups=2, needed_groups=2)
        assert truth([asked(10, nothing, alone_s=2, usual_s=3)])[0] == 10.0


class TestMeans:
    ONE = scored([shape(10, 11, 20, 0.02), shape(10, 7, noise=0.04)], [0.0, 0.1])
    OTHER = scored([shape(20, 20, 15, 0.03)], [0.3])

    def test_errors_are_relative_and_signed(self) -> None:
        assert [each.error("pearl") for each in self.ONE.shapes] == pytest.approx([0.1, -0.3])
        assert self.ONE.shapes[0].error("paper") == pytest.approx(1.0)
        assert math.isnan(self.ONE.shapes[1].error("paper"))

    def test_over_shapes(self) -> None:
        """10, 30 and 0 %; of the paper's 100 and 25 %, and one that it does not predict."""
        both = [self.ONE, self.OTHER]
        assert mape(both, "pearl") == pytest.approx(0.4 / 3)
        assert bias(both, "pearl") == pytest.approx(-0.2 / 3)
        assert mape(both, "paper") == pytest.approx(1.25 / 2)
        assert bias(both, "paper") == pytest.approx(0.75 / 2)
        assert noise(both) == pytest.approx(0.03)

    def test_regret_is_a_mean_over_cells(self) -> None:
        """Of 5 % and 30 %, however many shapes."""
        assert self.ONE.regret("pearl") == pytest.approx(0.05)
        assert regret([self.ONE, self.OTHER], "pearl") == pytest.approx(0.175)

    def test_of_nothing_there_is_none(self) -> None:
        nothing = scored([shape(10, math.inf)], [0.0])
        assert [mape([], "pearl"), bias([], "pearl"), regret([], "pearl"), noise([])] == [None] * 4
        assert [mape([nothing], "pearl"), bias([nothing], "pearl")] == [None, None]


@dataclass(frozen=True)
class Says:
    """A predictor that says the same, whatever it is asked; None: infeasible."""

    seconds: tuple[float, ...]
    name: str = "says"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        assert profile.workload == WORK
        factor = profile.platform.scale(1)

        def predict(candidates: Candidates) -> Predictions:
            assert len(candidates) == len(self.seconds)
            close_s = factor * np.array(self.seconds)
            return Predictions(
                close_s=close_s, error_s=np.zeros(len(close_s)), infeasible=np.full(len(close_s), int(Infeasible.NO))
            )

        return predict


class TestScore:
    """Five shapes that take 10, 20, 30, 40 and 50 s."""

    FOUND = tuple([asked(seconds), asked(seconds)] for seconds in (10.0, 20.0, 30.0, 40.0, 50.0))

    @pytest.fixture
    def predictors(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = {"pearl": Says((12, 18, 30, 40, 11)), "paper": Says((math.inf, 18, 9, 40, 50))}
        monkeypatch.setattr(_scores, "PREDICTORS", found)

    def test_predictions_and_choices(self, predictors: None) -> None:
        """Ours takes the fifth for the fastest, which takes five times as long as the first; the paper's the third."""
        found = score(cell(), self.FOUND)
        assert [each.truth_s for each in found.shapes] == [10, 20, 30, 40, 50]
        assert [each.predicted_s["pearl"] for each in found.shapes] == [12, 18, 30, 40, 11]
        assert [each.error("paper") for each in found.shapes] == pytest.approx(
            [math.nan, -0.1, -0.7, 0, 0], nan_ok=True
        )
        assert found.regrets == {"pearl": pytest.approx((4.0,) * 5), "paper": pytest.approx((2.0,) * 5)}
        assert found.shapes[0].shape == "4C"

    def test_no_batch_ends_before_the_update_under_way(self, predictors: None) -> None:
        """With 25 s left of it three shapes are alike, of which the first is taken."""
        update = Progress(
            batch_trajectories=8, unfinished=8, live_groups=2, needed_groups=2, running={0: 6, 2: 2}, coming_s=25.0
        )
        found = score(cell(), [[asked(each[0].close_s, update)] for each in self.FOUND])
        assert [each.predicted_s["pearl"] for each in found.shapes] == [25, 25, 30, 40, 25]
        assert found.regret("pearl") == 0.0

    def test_each_question_with_what_was_known_then(self, predictors: None) -> None:
        """Iterations of 1 and of 3 times what tables say: twice the time, mean."""
        slow = Asked(
            workload=WORK,
            time_scale=MappingProxyType({1: 3.0}),
            progress=BEGUN,
            close_s=10.0,
            alone_s=1.0,
            usual_s=1.0,
        )
        found = score(cell(), [[asked(10.0), slow] for _ in range(5)])
        assert [each.predicted_s["pearl"] for each in found.shapes] == [24, 36, 60, 80, 22]
        assert found.regret("pearl") == 0.0


def test_what_is_asked_of_all_and_of_those_held_out() -> None:
    """Errors of 10 % and 20 % on what was tuned on, of 30 % on what was not."""
    scores = [
        scored([shape(10, 11, 20), shape(10, 8, 20)], [0.0, 0.04]),
        scored([shape(10, 13, 20)], [0.06], cell("game")),
    ]
    found = {check.name: check for check in checks_of(scores)}
    values = {name: check.value for name, check in found.items()}
    assert values == pytest.approx(
        {
            "mape": 0.15,
            "mape_heldout": 0.3,
            "regret_mean": 0.04,
            "regret_max": 0.06,
            "bias": 0.2 / 3,
            "truth_noise": 0.0,
            "mape_paper": 1.0,
            "regret_mean_paper": 0.5,
        }
    )
    targets = {name: check.target for name, check in found.items() if check.target}
    assert targets == {
        "mape": "<= 0.10",
        "mape_heldout": "<= 0.12",
        "regret_mean": "<= 0.02",
        "regret_max": "<= 0.08",
    }
    assert {
        name: check.target for name, check in zip(found, checks_of(scores, quick=True), strict=True) if check.target
    } == {
        "mape": "<= 0.20",
        "mape_heldout": "<= 0.24",
        "regret_mean": "<= 0.04",
        "regret_max": "<= 0.16",
    }


def test_a_table_for_people() -> None:
    """A row for each workload and bound on staleness, one for each side of the line; the worst ones by name."""
    scores = [
        scored([shape(10, 11), shape(10, 8)], [0.0, 0.04]),
        scored([shape(10, 13)], [0.06], cell("game", 1)),
    ]
    lines = table(scores).splitlines()
    rows = {tuple(line.split("  ")[0].split()): line.split() for line in lines if line.split()[1:2] in (["0"], ["1"])}
    assert rows["webshop",][1:5] == ["0", "1", "0.150", "-0.050"]
    assert rows["game",][1:5] == ["1", "1", "0.300", "0.300"]
    totals = [line.split() for line in lines if " any " in line]
    assert [(row[0], row[-6], row[-5]) for row in totals] == [("held", "0.300", "0.300"), ("tuned", "0.150", "-0.050")]
    # By place among the shapes of a cell, without and with staleness: there is no second one with it.
    assert [line.split() for line in lines if line.startswith("  4C ")] == [
        ["4C", "0.100", "0.300"],
        ["4C", "-0.200", "-"],
    ]
    worst = lines[lines.index("worst predictions") + 1 :]
    assert worst[0].startswith("  +0.30  10.0 s")
    assert "qwen3-8b-h100 game" in worst[0]
    assert lines[lines.index("worst choices") + 1].startswith("  0.060  qwen3-8b-h100 game")
