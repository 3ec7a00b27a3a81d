"""Scripts: what is left of a turn, by hand."""

from __future__ import annotations

import pytest

from pearl.errors import ProfileError
from pearl.records.tokens import TokenCount
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of

TURNS = (ScriptTurn(100, 20, 1.5), ScriptTurn(0, 1, 0.0), ScriptTurn(30, 5, 0.0))


def test_contexts_grow_by_what_is_read_and_generated() -> None:
    script = script_of(TURNS)
    assert script.starts == (100, 120, 151)
    assert [
        script.output_left(turn, tokens) for turn, tokens in ((0, 100), (0, 119), (1, 120), (2, 151), (2, 154))
    ] == [
        20,
        1,
        1,
        5,
        2,
    ]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        ((), r"script: got no turns, want at least 1"),
        ((ScriptTurn(0, 1, 0.0),), r"script: turn 0: input_tokens: got 0, want >= 1"),
        ((TURNS[0], ScriptTurn(-1, 1, 0.0)), r"script: turn 1: input_tokens: got -1, want >= 0"),
        ((ScriptTurn(1, 0, 0.0),), r"script: turn 0: output_tokens: got 0, want >= 1"),
        ((ScriptTurn(1, 1, float("nan")),), r"script: turn 0: env_s: got nan, want a finite number >= 0"),
        ((ScriptTurn(1, 1, float("inf")),), r"script: turn 0: env_s: got inf, want"),
        ((ScriptTurn(1, 1, -0.1),), r"script: turn 0: env_s: got -0.1, want"),
    ],
)
def test_what_cannot_be(turns: tuple[ScriptTurn, ...], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        script_of(turns)


def test_tokens_know_their_script() -> None:
    script = script_of(TURNS)
    tokens = ScriptedTokens(100, script) + TokenCount(20)
    assert (len(tokens), tokens.script) == (120, script)
    assert (len(tokens[:7]), tokens[:7].script) == (7, script)
    assert tokens == TokenCount(120)


def test_a_script_goes_on_from_where_it_really_is() -> None:
    script = script_of(TURNS)
    shorter = script.rebased(1, 108)
    assert shorter.starts == (88, 108, 139)
    assert (shorter.output_left(1, 108), shorter.output_left(2, 139)) == (1, 5)
    assert script.rebased(1, 120) is script


def test_what_is_added_last_says_which_script_it_is() -> None:
    script = script_of(TURNS)
    shorter = script.rebased(1, 108)
    assert (ScriptedTokens(107, script) + ScriptedTokens(1, shorter)).script is shorter
    assert (ScriptedTokens(107, shorter) + TokenCount(1)).script is shorter
