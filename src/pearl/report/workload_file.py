"""Recorded trajectories as a workload profile: `[workload] trajectories` of a recipe.

What a recording may be says `pearl.report.trajectories`. Turns whose wait was not recorded say nothing about waits; where no
turn does, waits are those that the caller gives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.priors import DECODE_TOKEN_S
from pearl.core.workload import WorkloadProfile, bubble_ratio
from pearl.errors import ProfileError
from pearl.report.trajectories import read_recording


class CountedTurn(Protocol):
    """What is counted of a turn."""

    @property
    def input_tokens(self) -> int:
        """New at this turn; of the first turn, the prompt."""

    @property
    def output_tokens(self) -> int:
        """Generated."""

    @property
    def env_s(self) -> float | None:
        """None: not known."""


@dataclass(slots=True)
class _Seen:
    turns: list[float] = field(default_factory=list)
    prompt_tokens: list[float] = field(default_factory=list)
    new_tokens: list[float] = field(default_factory=list)
    generated_tokens: list[float] = field(default_factory=list)
    env_s: list[float] = field(default_factory=list)


def read_workload(path: Path, *, env_s: Distribution | None = None) -> WorkloadProfile:
    """The workload of a file of trajectories, or of a run folder; `env_s`: waits where none was recorded, by default 0.

    Raises:
        ProfileError: as `read_recording`, or a file in which nothing is ever generated.
    """
    recording = read_recording(path)
    try:
        return counted_workload((trajectory.turns for trajectory in recording.trajectories), env_s=env_s)
    except ProfileError as error:
        raise ProfileError(f"{path}: {error}") from None


def counted_workload(
    trajectories: Iterable[Sequence[CountedTurn]], *, env_s: Distribution | None = None
) -> WorkloadProfile:
    """The workload of trajectories, each a sequence of turns; `env_s` as above.

    All that was generated counts as staying in the context. The bubble ratio is assumed, as for the priors.

    Raises:
        ProfileError: no trajectory, or one without turns, or none that generates anything.
    """
    seen = _Seen()
    for turns in trajectories:
        _add(seen, turns)
    if not seen.turns:
        raise ProfileError("got no trajectory, want at least one")
    if not any(seen.generated_tokens):
        raise ProfileError("output_tokens: got 0 everywhere, want turns that generate something")
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


def _add(seen: _Seen, turns: Sequence[CountedTurn]) -> None:
    if not turns:
        raise ProfileError("got a trajectory without turns, want at least one turn")
    seen.turns.append(len(turns))
    seen.prompt_tokens.append(turns[0].input_tokens)
    seen.new_tokens += [turn.input_tokens for turn in turns[1:]]
    seen.generated_tokens += [turn.output_tokens for turn in turns]
    seen.env_s += [turn.env_s for turn in turns if turn.env_s is not None]
