"""What every benchmark ends with: a table for people, one JSON object as the last line of stdout, an exit status."""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_COMPARISONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "==": operator.eq}
_TARGET = re.compile(r"(<=|>=|<|>|==) (-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One number, and what is asked of it."""

    name: str
    """Ends with its unit: `turns_per_s`, `bytes_per_turn`."""
    value: float | None
    """None: it could not be measured, which fails a check."""
    target: str | None = None
    """`>= 2000`; None: the value is information, and passes."""

    def __post_init__(self) -> None:
        if self.target is not None and not _TARGET.fullmatch(self.target):
            raise ValueError(f"check {self.name}: target: got {self.target!r}, want e.g. '>= 2000' or None")

    @property
    def passed(self) -> bool:
        """Whether the value meets the target."""
        if self.target is None:
            return True
        found = _TARGET.fullmatch(self.target)
        assert found is not None
        return self.value is not None and bool(_COMPARISONS[found[1]](self.value, float(found[2])))


def report(benchmark: str, checks: Sequence[Check], settings: Mapping[str, str | int | float | bool]) -> int:
    """Print the result; returns the exit status, 1 when a check fails."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        value = "not measured" if check.value is None else f"{check.value:,.3f}".rstrip("0").rstrip(".")
        mark = "    " if check.target is None else "ok  " if check.passed else "FAIL"
        print(f"{mark} {check.name:<{width}}  {value:>14}  {check.target or ''}".rstrip())
    document = {
        "benchmark": benchmark,
        "checks": [
            {"name": check.name, "value": check.value, "target": check.target, "pass": check.passed} for check in checks
        ],
        "settings": dict(settings),
    }
    print(json.dumps(document, allow_nan=False))
    return 0 if all(check.passed for check in checks) else 1
