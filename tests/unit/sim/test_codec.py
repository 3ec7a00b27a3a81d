"""Scripts travel with texts and tokens, also where turns were cut short."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.records.tokens import TokenCount
from pearl.sim.codec import Action, Observation, SimCodec
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of

SCRIPT = script_of((ScriptTurn(100, 20, 1.5), ScriptTurn(0, 1, 0.0), ScriptTurn(30, 5, 0.0)))
CODEC = SimCodec()


def test_prompts_are_as_long_as_the_script_says() -> None:
    first = CODEC.first_prompt(Observation(SCRIPT, 0, 0))
    assert (len(first), first.script) == (100, SCRIPT)
    assert len(CODEC.append(Observation(SCRIPT, 1, 120), closed=True)) == 0
    third = CODEC.append(Observation(SCRIPT, 2, 121), closed=True)
    assert (len(third), third.script is SCRIPT) == (30, True)


def test_an_action_knows_its_length_and_script() -> None:
    action = CODEC.action(ScriptedTokens(20, SCRIPT))
    assert (str(action), action.tokens, action.script) == ("", 20, SCRIPT)


def test_a_turn_cut_short_leaves_the_others_as_long_as_they_are() -> None:
    # 7 of 20 tokens, not ended: one token closes the answer, and the second turn still generates its 1, the third its 5.
    context = CODEC.first_prompt(Observation(SCRIPT, 0, 0)) + ScriptedTokens(7, SCRIPT)
    context = context + CODEC.append(Observation(SCRIPT, 1, 107), closed=False)
    assert len(context) == 108
    assert context.script.output_left(1, len(context)) == 1
    context = context + TokenCount(1)
    action = CODEC.action(context[108:])
    behind = action.script.starts[1] + action.tokens
    assert behind == 109
    context = context + CODEC.append(Observation(action.script, 2, behind), closed=True)
    assert (len(context), context.script.output_left(2, len(context))) == (139, 5)


@given(st.data())
def test_every_turn_generates_what_it_says_whatever_was_cut_before(data: st.DataObject) -> None:
    turn = st.builds(ScriptTurn, st.integers(1, 50), st.integers(1, 50), st.just(0.0))
    script = script_of(tuple(data.draw(st.lists(turn, min_size=1, max_size=6))))
    context = CODEC.first_prompt(Observation(script, 0, 0))
    for number, part in enumerate(script.turns):
        assert context.script.output_left(number, len(context)) == part.output_tokens
        generated = data.draw(st.integers(1, part.output_tokens))
        start = len(context)
        context = context + TokenCount(generated)
        action = CODEC.action(context[start:])
        observation = Observation(action.script, number + 1, action.script.starts[number] + action.tokens)
        assert observation.context_tokens == len(context)
        if number + 1 < len(script.turns):
            context = context + CODEC.append(observation, closed=generated == part.output_tokens)


def test_other_texts_and_tokens_are_refused() -> None:
    with pytest.raises(TypeError, match=r"SimCodec: got str, want an Observation of a simulated environment"):
        CODEC.first_prompt("hello")
    with pytest.raises(TypeError, match=r"SimCodec: got Action, want an Observation"):
        CODEC.append(Action(SCRIPT, 1), closed=True)
    with pytest.raises(TypeError, match=r"SimCodec.action: got TokenCount, want ScriptedTokens"):
        CODEC.action(TokenCount(3))
