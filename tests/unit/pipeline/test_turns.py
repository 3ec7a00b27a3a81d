"""What the requests of a turn come to."""

from __future__ import annotations

import asyncio

import pytest

from pearl.pipeline.turns import Pending, Turn
from pearl.records.ids import RequestId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.turn import Chunk, EndReason, Mode, TurnRequest, Versions
from pearl.testing.virtual_time import run_virtual
from tests.unit.pipeline._router import PROMPT, job

STOP, LENGTH, INTERRUPTED, FAILED = EndReason.STOP, EndReason.LENGTH, EndReason.INTERRUPTED, EndReason.FAILED


def pending(turn: Turn, mode: Mode = Mode.COLOCATED, answers: list[str] | None = None) -> Pending:
    request = TurnRequest(
        id=RequestId("r"),
        trajectory=turn.job.trajectory,
        turn=0,
        context=turn.job.context + turn.token_ids,
        sampling=turn.job.sampling,
        max_new_tokens=turn.left,
        min_version=WeightVersion(0),
        mode=mode,
    )
    ended: asyncio.Future[EndReason] = asyncio.get_running_loop().create_future()
    said = None if answers is None else lambda: answers.append("answered")
    return Pending(request, 0.0, ended, TokenIds(), said)


def chunk(start: int, *ids: int, version: int = 0, end: EndReason | None = None, computed: int = 0) -> Chunk:
    return Chunk(
        request=RequestId("r"),
        start=start,
        token_ids=TokenIds(ids),
        logprobs=Floats([-token / 8 for token in ids]),
        versions=Versions.of([(version, len(ids))]),
        end=end,
        computed_prompt_tokens=computed,
    )


def test_a_turn_joins_its_requests() -> None:
    async def check() -> Turn:
        turn = Turn.of(job(tokens=9))
        for worker, (mode, *chunks) in enumerate(
            (
                (Mode.PREFILL, chunk(3, 1, end=LENGTH, computed=3)),
                (Mode.DECODE, chunk(4, 2, 3, computed=1), chunk(6, 4, version=1, end=INTERRUPTED, computed=6)),
            )
        ):
            one = pending(turn, mode)
            for part in chunks:
                one.take(part)
            turn.take(WorkerId(worker), one, await one.ended)
            assert turn.end is None
        return turn

    turn = run_virtual(check())
    assert turn.token_ids.tolist() == [1, 2, 3, 4]
    assert turn.logprobs.tolist() == [-1 / 8, -2 / 8, -3 / 8, -4 / 8]
    assert turn.versions == Versions.of([(0, 3), (1, 1)])
    assert (turn.workers, turn.computed, turn.tokens, turn.left) == ([0, 1], 3 + 6, len(PROMPT) + 4, 5)


@pytest.mark.parametrize(
    ("mode", "tokens", "end", "want"),
    [
        (Mode.COLOCATED, 1, STOP, STOP),
        (Mode.COLOCATED, 1, LENGTH, LENGTH),  # the context limit of the engine
        (Mode.DECODE, 1, LENGTH, LENGTH),
        (Mode.PREFILL, 1, STOP, STOP),
        (Mode.PREFILL, 1, LENGTH, None),
        (Mode.PREFILL, 2, LENGTH, LENGTH),
        (Mode.COLOCATED, 1, INTERRUPTED, None),
        (Mode.COLOCATED, 2, INTERRUPTED, LENGTH),  # complete, although nobody said so
        (Mode.COLOCATED, 1, FAILED, None),
    ],
)
def test_when_a_turn_is_complete(mode: Mode, tokens: int, end: EndReason, want: EndReason | None) -> None:
    async def check() -> Turn:
        turn = Turn.of(job(tokens=2))
        one = pending(turn, mode)
        one.take(chunk(3, *range(tokens), end=end))
        turn.take(WorkerId(0), one, await one.ended)
        return turn

    turn = run_virtual(check())
    assert turn.end is want
    if want is not None:
        assert turn.completion().end is want
        assert len(turn.completion().token_ids) == tokens


def test_the_first_chunk_is_the_answer_and_there_is_only_one() -> None:
    async def check() -> list[str]:
        answers: list[str] = []
        one = pending(Turn.of(job()), Mode.DECODE, answers)
        assert answers == []
        one.take(chunk(3, 1))
        one.take(chunk(4, 2, end=STOP))
        one.answer()
        return answers

    assert run_virtual(check()) == ["answered"]


def test_a_refused_request_is_over() -> None:
    async def check() -> Pending:
        one = pending(Turn.of(job()))
        one.refuse("ids in use")
        one.finish(INTERRUPTED)
        assert await one.ended is FAILED
        return one

    one = run_virtual(check())
    assert (one.error, one.working) == ("ids in use", False)
