"""Recorded trajectories (JSONL) as a workload profile: `[workload] trajectories` of a recipe.

One trajectory a line, counts and times only; other keys are ignored, and so are empty lines:

    {"id": "a", "turns": [{"input_tokens": 900, "output_tokens": 120, "env_s": 0.4}, ...]}

- `input_tokens`: new at this turn; of the first turn, the prompt.
- `output_tokens`: generated.
- `env_s`: seconds from the end of the turn until the environment's reply; null or absent where it was not recorded. Such
  turns say nothing about waits; where no turn of the file does, waits are those that the caller gives.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pearl.core.distribution import LARGEST, Distribution, constant, distribution_of
from pearl.core.priors import DECODE_TOKEN_S
from pearl.core.workload import WorkloadProfile, bubble_ratio
from pearl.errors import ProfileError
from pearl.text_file import Unreadable, read_text
from pearl.units import MIB

_LONGEST_BYTES = 256 * MIB
"""Some four million turns; more says nothing more of their distributions."""


@dataclass(slots=True)
class _Seen:
    turns: list[float] = field(default_factory=list)
    prompt_tokens: list[float] = field(default_factory=list)
    new_tokens: list[float] = field(default_factory=list)
    generated_tokens: list[float] = field(default_factory=list)
    env_s: list[float] = field(default_factory=list)


def read_workload(path: Path, *, env_s: Distribution | None = None) -> WorkloadProfile:
    """The workload of a file of trajectories; `env_s`: waits where the file records none, by default 0.

    All that was generated counts as staying in the context. The bubble ratio is assumed, as for the priors.

    Raises:
        ProfileError: no such file, no regular one, one of more than 256 MiB, or the first line that is not a trajectory.
    """
    seen = _Seen()
    for number, line in _lines(path):
        try:
            _add(seen, _trajectory(line))
        except ProfileError as error:
            raise ProfileError(f"{path}: line {number}: {error}") from None
    if not seen.turns:
        raise ProfileError(f"{path}: got no trajectory, want at least one line")
    if not any(seen.generated_tokens):
        raise ProfileError(f"{path}: output_tokens: got 0 everywhere, want turns that generate something")
    generated = distribution_of(seen.generated_tokens)
    waits = distribution_of(seen.env_s) if seen.env_s else env_s or constant(0.0)
    decoding_s = generated.mean * DECODE_TOKEN_S
    return WorkloadProfile(
        turns=distribution_of(seen.turns),
        prompt_tokens=distribution_of(seen.prompt_tokens),
        # Where every trajectory has one turn, nothing ever comes later.
        new_tokens=distribution_of(seen.new_tokens) if seen.new_tokens else constant(0.0),
        generated_tokens=generated,
        env_s=waits,
        theta=bubble_ratio(decoding_s / (decoding_s + waits.mean)),
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        text = read_text(path, most_bytes=_LONGEST_BYTES)
    except Unreadable as error:
        raise ProfileError(f"{error}; want a file of trajectories (JSONL)") from None
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def _trajectory(line: str) -> list[object]:
    try:
        document = json.loads(line, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ProfileError(f"not JSON: {reason}; want one trajectory a line") from None
    turns = document.get("turns") if isinstance(document, dict) else None
    if not isinstance(turns, list) or not turns:
        raise ProfileError(f'got {_got(document)}, want an object with "turns": a list of at least one')
    return turns


def _no_constant(name: str) -> float:
    raise ProfileError(f"got {name}, want finite numbers")


def _add(seen: _Seen, turns: list[object]) -> None:
    for index, turn in enumerate(turns):
        where = f"turns[{index}]"
        if not isinstance(turn, dict):
            raise ProfileError(f"{where}: got {_got(turn)}, want an object")
        new = _whole(f"{where}.input_tokens", turn.get("input_tokens"))
        (seen.new_tokens if index else seen.prompt_tokens).append(new)
        seen.generated_tokens.append(_whole(f"{where}.output_tokens", turn.get("output_tokens")))
        if turn.get("env_s") is not None:
            seen.env_s.append(_seconds(f"{where}.env_s", turn["env_s"]))
    seen.turns.append(len(turns))


def _whole(where: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST:
        raise ProfileError(f"{where}: got {_got(value)}, want a whole number >= 0")
    return value


def _seconds(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= LARGEST:
        raise ProfileError(f"{where}: got {_got(value)}, want seconds >= 0, or null")
    return value


def _got(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
