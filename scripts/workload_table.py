"""Write the tables of docs/workloads.md: what the presets do, measured from the scripts that they generate.

python scripts/workload_table.py          # write them into the page
python scripts/workload_table.py --check  # exit status 1 when the page is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pearl.core.priors import WORKLOAD_PRIORS
from pearl.sim.presets import preset
from pearl.sim.script import Script

PAGE = Path(__file__).resolve().parents[1] / "docs" / "workloads.md"
BEGIN, END = (
    "<!-- Measured by scripts/workload_table.py; do not edit by hand. -->",
    "<!-- End of what was measured. -->",
)
GROUPS, GROUP_SIZE, SEED = 500, 4, 0
LIMIT_TOKENS = 32_768

Groups = Sequence[Sequence[Script]]


def tables() -> str:
    """Both tables."""
    made = {name: _made(name) for name in WORKLOAD_PRIORS}
    lines = [
        "| preset | turns mean / p50 / p95 | first prompt | new tokens mean / p50 / p95 | generated mean / p50 / p95 "
        "| waits, s: mean / p50 / p95 / p99 |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [_numbers(name, groups) for name, groups in made.items()]
    lines += [
        "",
        f"| preset | longest output over mean, {GROUP_SIZE} attempts | waiting held by the longest 5 % | context at the end, "
        f"mean | trajectories beyond {LIMIT_TOKENS:,} tokens |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [_shape(name, groups) for name, groups in made.items()]
    return "\n".join(lines)


def _made(name: str) -> Groups:
    work = preset(name, seed=SEED)
    return [[work.script(group, attempt) for attempt in range(GROUP_SIZE)] for group in range(GROUPS)]


def _numbers(name: str, groups: Groups) -> str:
    scripts = [script for group in groups for script in group]
    turns = [turn for script in scripts for turn in script.turns]
    later = [turn.input_tokens for script in scripts for turn in script.turns[1:]]
    cells = (
        f"`{name}`",
        _moments([len(script.turns) for script in scripts]),
        f"{np.mean([script.turns[0].input_tokens for script in scripts]):,.0f}",
        _moments(later),
        _moments([turn.output_tokens for turn in turns]),
        _moments([turn.env_s for turn in turns], (50, 95, 99)),
    )
    return f"| {' | '.join(cells)} |"


def _moments(values: Sequence[float], percents: Sequence[int] = (50, 95)) -> str:
    numbers = [float(np.mean(values)), *(float(number) for number in np.percentile(values, percents))]
    return " / ".join(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers)


def _shape(name: str, groups: Groups) -> str:
    scripts = [script for group in groups for script in group]
    outputs = np.array([[sum(turn.output_tokens for turn in script.turns) for script in group] for group in groups])
    ends = np.array([script.starts[-1] + script.turns[-1].output_tokens for script in scripts])
    waits = np.sort([turn.env_s for script in scripts for turn in script.turns])
    held = waits[int(0.95 * len(waits)) :].sum() / waits.sum()
    cells = (
        f"`{name}`",
        f"{np.median(outputs.max(axis=1) / outputs.mean(axis=1)):.2f}",
        f"{100 * held:.0f} %",
        f"{ends.mean():,.0f}",
        f"{100 * np.mean(ends > LIMIT_TOKENS):.0f} %",
    )
    return f"| {' | '.join(cells)} |"


def page(text: str) -> str:
    """The page with its tables replaced."""
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{PAGE.name}: want the lines {BEGIN!r} and {END!r}")
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


def main(arguments: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/workloads.md.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit status 1 when they are not up to date"
    )
    check: bool = parser.parse_args(arguments).check
    old = PAGE.read_text(encoding="utf-8")
    new = page(old)
    if not check:
        PAGE.write_text(new, encoding="utf-8")
        return 0
    if new == old:
        return 0
    print(f"{PAGE.name}: not up to date; run `python scripts/workload_table.py`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
