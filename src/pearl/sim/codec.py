"""How a script gets from an environment into the tokens and back: in the texts, which say nothing else.

An `Observation` is the text "" and knows the script, its turn, and how long the context really is; the codec makes counted
tokens of it that carry the script (`ScriptedTokens`). An `Action` is a text that knows how many tokens it has and whose they
are. So neither engine nor environment has to ask anybody, and nothing is kept aside that could go stale.

A turn that was cut short leaves a shorter context behind than its script says; what is appended next carries the script as
it goes on from there (`Script.rebased`).
"""

from __future__ import annotations

from pearl.records.tokens import Tokens
from pearl.sim.script import Script, ScriptedTokens

_STOP = (0,)
"""Never drawn: a turn of a script ends by its length."""


class Observation(str):
    """What a simulated environment shows before a turn: no text."""

    __slots__ = ("context_tokens", "script", "turn")
    script: Script
    turn: int
    """The one to come."""
    context_tokens: int
    """Before its new tokens."""

    def __new__(cls, script: Script, turn: int, context_tokens: int) -> Observation:
        """An observation; of the last turn's answer, `turn` is past the script's end and nothing follows."""
        made = super().__new__(cls)
        made.script, made.turn, made.context_tokens = script, turn, context_tokens
        return made


class Action(str):
    """What a simulated model answers: so many tokens."""

    __slots__ = ("script", "tokens")
    script: Script
    """Whose; its `starts` are where outputs really began, up to this turn."""
    tokens: int

    def __new__(cls, script: Script, tokens: int) -> Action:
        """An action."""
        made = super().__new__(cls)
        made.script, made.tokens = script, tokens
        return made


class SimCodec:
    """A `Codec` of observations that carry scripts."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """One that is never seen."""
        return _STOP

    def first_prompt(self, observation: str) -> ScriptedTokens:
        """As many tokens as the script's first turn reads."""
        seen = _scripted(observation)
        return ScriptedTokens(seen.script.turns[0].input_tokens, seen.script)

    def append(self, observation: str, *, closed: bool) -> ScriptedTokens:
        """As many tokens as the script's next turn reads, and one where the answer before was not ended."""
        seen = _scripted(observation)
        count = seen.script.turns[seen.turn].input_tokens + (not closed)
        return ScriptedTokens(count, seen.script.rebased(seen.turn, seen.context_tokens + count))

    def action(self, token_ids: Tokens) -> Action:
        """The answer: its length, and its script."""
        if not isinstance(token_ids, ScriptedTokens):
            raise TypeError(
                f"SimCodec.action: got {type(token_ids).__name__}, want ScriptedTokens of a simulated engine"
            )
        return Action(token_ids.script, len(token_ids))


def _scripted(observation: str) -> Observation:
    if not isinstance(observation, Observation):
        raise TypeError(f"SimCodec: got {type(observation).__name__}, want an Observation of a simulated environment")
    return observation
