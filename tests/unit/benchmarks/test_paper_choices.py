"""What a row of the table says: matched, not matched, or a tie."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from benchmarks.paper_choices import ROWS, Choice, Counts, Row, choice, main, print_choices
from pearl.core.makespan import Candidates, Forecast, Infeasible, Predictions, Profile
from pearl.core.progress import Progress


@dataclass(frozen=True)
class Told:
    """Predicts what it was told, and 1000 s for what it was not."""

    close_s: dict[str, float] = field(default_factory=dict)
    name: str = "told"
    appends: bool = False

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        def predict(candidates: Candidates) -> Predictions:
            shapes = [str(candidates.target(index).shape).removesuffix("@tp2") for index in range(len(candidates))]
            close = np.array([self.close_s.get(shape, 1000.0) for shape in shapes])
            return Predictions(close_s=close, error_s=close, infeasible=np.full(len(close), int(Infeasible.NO)))

        return predict


ROW = next(row for row in ROWS if row.best == ("3P3D",))
ANY = next(row for row in ROWS if row.best == ("PD",))


def made(row: Row, **close_s: float) -> Choice:
    return choice(Told({name.removeprefix("_"): second for name, second in close_s.items()}), row, row.model(None))


@pytest.mark.parametrize(
    ("row", "close_s", "shape", "margin", "ties"),
    [
        (ROW, {"_3P3D": 800.0}, "3P3D", 0.25, False),
        (ROW, {"_3P3D": 800.0, "_6C": 807.9}, "3P3D", 7.9 / 800, True),
        (ROW, {"_3P3D": 800.0, "_6C": 808.1}, "3P3D", 8.1 / 800, False),
        (ROW, {"_3P3D": 800.0, "_2P4D": 792.1}, "2P4D", -7.9 / 800, True),
        (ROW, {"_3P3D": 800.0, "_2P4D": 791.9}, "2P4D", -8.1 / 800, False),
        (ROW, {"_3P3D": np.inf, "_6C": 900.0}, "6C", -1.0, False),
        # Any disaggregated shape will do: only the colocated one is another.
        (ANY, {"_8C": 900.0, "_2P6D": 800.0, "_3P5D": 801.0}, "2P6D", 0.125, False),
        (ANY, {"_8C": 800.0, "_2P6D": 1000.0}, "8C", -0.2, False),
    ],
)
def test_the_margin_is_that_between_the_paper_and_all_else(
    row: Row, close_s: dict[str, float], shape: str, margin: float, ties: bool
) -> None:
    found = made(row, **close_s)
    assert found.shape == shape
    assert found.margin == pytest.approx(margin)
    assert found.ties is ties


def test_rows_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """All alike: a tie everywhere, and colocated chosen, which is right in the three rows that say so."""
    assert print_choices(Told()) == Counts(matches=3, ties=13, tied_matches=3)
    assert capsys.readouterr().out.endswith(
        "  0 matched, 0 not matched, 13 ties (margin below 1 %); strictly 3 of 13 match, 3 of them in ties\n\n"
    )
    # 8C is best in one row, and one of the shapes in the other rows of 8 workers: two ratios, and three where any will do.
    assert print_choices(Told({"8C": 500.0})) == Counts(matches=3, ties=7, tied_matches=2)
    assert "  1 matched, 5 not matched, 7 ties (margin" in capsys.readouterr().out


def test_what_programs_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--quick"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    values = {check["name"]: check["value"] for check in last["checks"]}
    assert list(values) == [
        *(f"{name}_{what}" for name in ("paper", "pearl") for what in ("matches", "ties", "tied_matches")),
        "rows",
    ]
    for name in ("paper", "pearl"):
        matches, ties, both = (values[f"{name}_{what}"] for what in ("matches", "ties", "tied_matches"))
        assert both <= min(matches, ties)
        assert matches + ties - both <= values["rows"] == 13
    assert all(check["pass"] and check["target"] is None for check in last["checks"])
