"""Policies side by side, by hand."""

from __future__ import annotations

import json

from pearl.sim.comparison import Outcome, comparison_json, comparison_text, means
from pearl.sim.summary import Figures, figures_of
from tests.unit.sim.test_summary import recipe, run


def figures(policy: str, *ends_s: float, generated: int, **sections: dict[str, object]) -> Figures:
    return figures_of(run(policy, *ends_s, generated=generated), recipe(**sections))


def rows(text: str) -> dict[str, list[str]]:
    """Name of a row -> its cells; columns are two spaces apart."""
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {line[0]: line[1:] for line in lines[1:]}


def test_each_is_told_beside_the_first() -> None:
    """50 + 50 + 100 and 50 + 150 + 200 tokens in 100 s."""
    text = comparison_text(
        {"roll": [figures("roll", 50.0, generated=50)], "pearl": [figures("pearl", 30.0, 50.0, generated=150)]}
    )
    assert text.splitlines()[0].split() == ["roll", "pearl"]
    found = rows(text)
    assert found["throughput, tokens/s"] == ["2", "4 (x2.00)"]
    assert found["step, mean"] == ["50.0 s", "20.0 s (x0.40)"]
    assert found["trajectories lost"] == ["3", "3 (x1.00)"]
    # Nothing is said of what nobody has.
    assert "price" not in found
    assert "roles changed" not in found


def test_seeds_are_averaged_and_their_range_is_told() -> None:
    runs = [figures("roll", 50.0, generated=seed) for seed in (50, 250)]
    assert rows(comparison_text({"roll": runs}))["throughput, tokens/s"] == ["3 [2 .. 4]"]
    assert means(runs, lambda one: one.generated_tokens) == 150
    assert means(runs, lambda one: one.price) is None


def test_who_failed_has_an_empty_column() -> None:
    text = comparison_text({"roll": "no worker", "pearl": [figures("pearl", 50.0, generated=50)]})
    assert rows(text)["throughput, tokens/s"] == ["failed", "2"]


def test_for_programs() -> None:
    def outcome(one: Figures) -> Outcome:
        return Outcome(figures=one, timeline=(), steps_s=(), availability=(), wall_s=1.0)

    told = comparison_json(
        {
            "roll": [outcome(figures("roll", 50.0, generated=50))],
            "pearl": [outcome(figures("pearl", 30.0, 50.0, generated=150))],
            "paper": "no worker",
        }
    )
    first, second, third = json.loads(json.dumps(told, allow_nan=False))
    assert first["over_first"]["throughput, tokens/s"] == 1.0
    assert second["mean"]["throughput, tokens/s"] == 4.0
    assert second["over_first"]["throughput, tokens/s"] == 2.0
    assert [one["policy"] for one in second["runs"]] == ["pearl"]
    assert third == {"policy": "paper", "failed": "no worker"}
