"""What is drawn; that it is drawn, where matplotlib is installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pearl.errors import RunFolderError
from pearl.sim.comparison import Outcome
from pearl.sim.plot import AREAS, areas_of, available_line, can_plot, plot_fleets
from pearl.sim.summary import figures_of
from pearl.sim.tally import Moment
from tests.unit.sim.test_summary import recipe, run

MOMENTS = (
    Moment(at_s=0.0, owned={"reserved": 4, "training": 8}, serving={"transition": 4}),
    Moment(
        at_s=10.0,
        owned={"reserved": 4, "training": 8, "external": 2},
        serving={"prefill": 2, "decode": 2, "colocated": 4, "borrowed": 4, "transition": 1},
    ),
    Moment(at_s=60.0, owned={"reserved": 4, "training": 8}, serving={"decode": 4, "updating": 8}),
)


def outcome(*availability: tuple[float, int]) -> Outcome:
    figures = figures_of(run("pearl", 30.0, 50.0, generated=850), recipe())
    return Outcome(figures=figures, timeline=MOMENTS, steps_s=(30.0, 50.0), availability=availability, wall_s=1.0)


def test_areas_add_up_to_the_gpus_that_there_are() -> None:
    first, second, third = map(areas_of, MOMENTS)
    assert [sum(areas.values()) for areas in (first, second, third)] == [12, 14, 12]
    assert second == {
        "decode": 2,
        "prefill": 2,
        "colocated": 0,
        "borrowed": 4,
        "in transition": 1,
        "training": 0,
        "idle": 5,
    }
    assert (first["idle"], third["training"], third["idle"]) == (8, 8, 0)
    assert set(AREAS) == set(second)


def test_available_are_the_own_and_those_from_outside_held_or_not() -> None:
    """12 of its own; the run ends at 100 s."""
    assert available_line(outcome((5.0, 2), (50.0, 0), (120.0, 9))) == ([0.0, 5.0, 50.0], [12, 14, 12])
    assert available_line(outcome((0.0, 2), (50.0, 0))) == ([0.0, 50.0], [14, 12])
    assert available_line(outcome()) == ([0.0], [14])


@pytest.mark.skipif(not can_plot(), reason="matplotlib (extra report) is not installed")
def test_it_is_drawn(tmp_path: Path) -> None:
    one = outcome((0.0, 2), (50.0, 0))
    silent = replace(one, timeline=(), steps_s=(), availability=())
    svg, png = plot_fleets([one, silent], tmp_path, "title")
    assert svg.read_text().count("pearl: 10 tokens/s") in (0, 2)  # as text or as paths
    assert png.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(RunFolderError, match="the plot cannot be written"):
        plot_fleets([one], tmp_path / "nowhere", "title")
