"""Each shape is asked for once, whoever asks and in whatever company."""

from __future__ import annotations

import numpy as np

from pearl.core.makespan import Candidates, Infeasible, Predictions, candidates_of
from pearl.core.remembered import Remembered
from tests.platforms import target


class Asked:
    """Closes after as many seconds as there are workers; notes what it was asked for."""

    def __init__(self) -> None:
        self.texts: list[list[str]] = []

    def __call__(self, candidates: Candidates) -> Predictions:
        targets = [candidates.target(index) for index in range(len(candidates))]
        self.texts.append([str(each) for each in targets])
        close_s = np.array([float(each.shape.workers) for each in targets])
        odd = close_s % 2 == 1
        return Predictions(
            close_s=np.where(odd, np.inf, close_s),
            error_s=close_s / 10,
            infeasible=np.where(odd, int(Infeasible.KV_CAPACITY), int(Infeasible.NO)),
        )


def test_what_was_asked_before_is_remembered() -> None:
    asked = Asked()
    forecast = Remembered(asked)
    forecast(candidates_of([target("2C"), target("1P1D", 64)]))
    again = forecast(candidates_of([target("1P2D"), target("2C"), target("1P1D"), target("1P1D", 64)]))
    assert asked.texts == [["2C", "1P1D append<=64"], ["1P2D", "1P1D"]]
    assert again.close_s.tolist() == [np.inf, 2.0, 2.0, 2.0]
    assert again.error_s.tolist() == [0.3, 0.2, 0.2, 0.2]
    assert again.infeasible.tolist() == [Infeasible.KV_CAPACITY, Infeasible.NO, Infeasible.NO, Infeasible.NO]


def test_twins_are_asked_for_once() -> None:
    asked = Asked()
    found = Remembered(asked)(candidates_of([target("4C"), target("4C")]))
    assert asked.texts == [["4C"]]
    assert found.close_s.tolist() == [4.0, 4.0]


def test_everything_about_a_shape_tells_it_apart() -> None:
    shapes = ["2C", "2C@tp2", "1P2D", "2P1D", "1P@tp2+2D@tp1", "1P@tp1+2D@tp2", "2C@tp1+1C@tp2", "1C@tp1+2C@tp2"]
    asked = Asked()
    forecast = Remembered(asked)
    for text in shapes:
        forecast(candidates_of([target(text)]))
    assert len(asked.texts) == len(shapes)


def test_nothing_is_asked_of_nothing() -> None:
    asked = Asked()
    forecast = Remembered(asked)
    forecast(candidates_of([target("2C")]))
    assert len(forecast(candidates_of([target("2C")])).close_s) == 1
    assert len(asked.texts) == 1
