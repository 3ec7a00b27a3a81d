"""Every token of the context is accounted for, and the journal counts them."""

from __future__ import annotations

import pytest

from pearl.records.journal import TurnEntry
from pearl.records.trajectory import Trajectory
from pearl.records.turn import EndReason, TurnRequest
from pearl.testing.engine import fake_token
from pearl.testing.environment import Behaviour
from pearl.testing.tokens import FAKE_STOP
from pearl.testing.world import fake_task
from tests.unit.pipeline._agent_loop import BEGAN_S, Stage, on_stage, play


def text_ids(text: str) -> list[int]:
    """Ids of the fake codec: space .. tilde are 1 .. 95, newline is 96."""
    return [96 if character == "\n" else ord(character) - 31 for character in text]


def test_every_token_of_the_context_is_accounted_for() -> None:
    async def test(stage: Stage) -> tuple[Trajectory, list[TurnRequest], list[str]]:
        requests: list[TurnRequest] = []
        submit = stage.engine.submit

        async def noted(batch: list[TurnRequest]) -> None:
            requests.extend(batch)
            await submit(batch)

        stage.engine.submit = noted  # type: ignore[method-assign,assignment]
        trajectory = await play(stage)
        return trajectory, requests, stage.pool.actions(fake_task().id)

    # Turns of 8 (closed), 12 (cut at 10, not closed), 3 (closed) tokens.
    trajectory, requests, actions = on_stage(test, Behaviour(turns=3), output_tokens=lambda r: [8, 12, 3][r.turn])
    context: list[int] = []
    for number, (turn, request) in enumerate(zip(trajectory.turns, requests, strict=True)):
        context += turn.prompt.tolist()
        assert request.context.tolist() == context
        assert request.turn == number
        drawn = [fake_token(7, len(context) + n) for n in range(len(turn.completion.token_ids))]
        if turn.completion.end is EndReason.STOP:
            drawn[-1] = FAKE_STOP
        assert turn.completion.token_ids.tolist() == drawn
        context += drawn
    assert [turn.completion.end.value for turn in trajectory.turns] == ["stop", "length", "stop"]
    assert trajectory.turns[0].prompt.tolist() == text_ids("obs 0>")
    assert trajectory.turns[1].prompt.tolist() == text_ids("\nobs 1>")
    assert trajectory.turns[2].prompt.tolist() == [FAKE_STOP, *text_ids("\nobs 2>")]  # the answer was not closed
    texts = [[t for t in turn.completion.token_ids.tolist() if t != FAKE_STOP] for turn in trajectory.turns]
    assert [text_ids(action) for action in actions] == texts


def test_turns_are_journalled_with_their_counts_times_and_workers() -> None:
    async def test(stage: Stage) -> list[TurnEntry]:
        await play(stage)
        return stage.journal.of(TurnEntry)

    entries = on_stage(test, Behaviour(turns=2, reset_s=1, step_s=3))
    assert [(e.trajectory, e.turn, e.prompt, e.generated, e.end) for e in entries] == [
        ("g0.0", 0, 6, 8, "stop"),
        ("g0.0", 1, 7, 8, "stop"),
    ]
    assert [e.computed for e in entries] == [6, 8]  # the prefix is cached but for its last token
    assert [(e.versions, e.workers) for e in entries] == [([[0, 8]], [0])] * 2
    assert [e.generate_s for e in entries] == [pytest.approx(0.8)] * 2
    assert [e.env_s for e in entries] == [pytest.approx(3)] * 2
    assert [e.at_s for e in entries] == [pytest.approx(BEGAN_S + 4.8), pytest.approx(BEGAN_S + 8.6)]
