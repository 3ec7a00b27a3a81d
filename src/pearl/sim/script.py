"""What a simulated trajectory does, fixed beforehand: turn by turn how much it reads, generates and waits.

Scripts travel with the tokens: `ScriptedTokens` are counted, not drawn, and know whose they are, so that an engine can tell
how long a turn is without asking anybody.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from pearl.errors import ProfileError
from pearl.records.tokens import TokenCount


@dataclass(frozen=True, slots=True)
class ScriptTurn:
    """One turn: what is new to the engine, what it generates, and how long the environment takes to answer."""

    input_tokens: int
    """>= 0; of the first turn, the prompt, >= 1."""
    output_tokens: int
    """>= 1."""
    env_s: float
    """>= 0."""


@dataclass(frozen=True, slots=True)
class Script:
    """A trajectory, whole: it is done after its last turn."""

    turns: tuple[ScriptTurn, ...]
    starts: tuple[int, ...]
    """Tokens of the context before each turn's output."""

    def output_left(self, turn: int, context_tokens: int) -> int:
        """Tokens that a turn still generates behind a context, which may hold some of them already."""
        return self.starts[turn] + self.turns[turn].output_tokens - context_tokens

    def rebased(self, turn: int, context_tokens: int) -> Script:
        """The script as it goes on from a turn whose output begins elsewhere, since an earlier one was cut short."""
        shift = context_tokens - self.starts[turn]
        return self if not shift else Script(turns=self.turns, starts=tuple(start + shift for start in self.starts))


def script_of(turns: tuple[ScriptTurn, ...]) -> Script:
    """A script from its turns.

    Raises:
        ProfileError: no turn, or the first number out of range.
    """
    if not turns:
        raise ProfileError("script: got no turns, want at least 1")
    for number, turn in enumerate(turns):
        least = 1 if number == 0 else 0
        if turn.input_tokens < least:
            raise ProfileError(f"script: turn {number}: input_tokens: got {turn.input_tokens}, want >= {least}")
        if turn.output_tokens < 1:
            raise ProfileError(f"script: turn {number}: output_tokens: got {turn.output_tokens}, want >= 1")
        if not 0 <= turn.env_s < float("inf"):
            raise ProfileError(f"script: turn {number}: env_s: got {turn.env_s}, want a finite number >= 0")
    ends = list(accumulate(turn.input_tokens + turn.output_tokens for turn in turns))
    starts = tuple(end - turn.output_tokens for end, turn in zip(ends, turns, strict=True))
    return Script(turns=turns, starts=starts)


class ScriptedTokens(TokenCount):
    """Counted tokens of a script's trajectory; what is added last says which script it is by now."""

    __slots__ = ("script",)

    def __init__(self, count: int, script: Script) -> None:
        # As the base class does, without the call: ten of these are made per turn.
        if count < 0:
            raise ValueError(f"ScriptedTokens: got {count}, want >= 0")
        self._count = count
        self.script = script

    def __getitem__(self, key: slice, /) -> ScriptedTokens:
        return ScriptedTokens(len(range(*key.indices(self._count))), self.script)

    def __add__(self, other: TokenCount, /) -> ScriptedTokens:
        script = other.script if isinstance(other, ScriptedTokens) else self.script
        return ScriptedTokens(self._count + other._count, script)
