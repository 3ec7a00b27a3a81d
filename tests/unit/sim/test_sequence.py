"""Chunks of a request, and how long it was."""

from __future__ import annotations

from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.turn import EndReason, Sampling, TurnRequest, Versions
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of
from pearl.sim.sequence import Phase, Sequence, Stint

SCRIPT = script_of((ScriptTurn(10, 50, 0.0),))


def sequence() -> Sequence:
    request = TurnRequest(
        id=RequestId("r"),
        trajectory=TrajectoryId("t"),
        turn=0,
        context=ScriptedTokens(10, SCRIPT),
        sampling=Sampling(seed=0),
        max_new_tokens=50,
        min_version=WeightVersion(0),
    )
    return Sequence(
        request=request,
        script=SCRIPT,
        context=10,
        goal=60,
        end=EndReason.STOP,
        versions=[(10, WeightVersion(1))],
        kv_version=WeightVersion(1),
    )


def test_chunks_join_and_say_who_drew_their_tokens() -> None:
    one = sequence()
    one.mark_version(WeightVersion(2), 10)
    one.mark_version(WeightVersion(3), 14)
    one.mark_version(WeightVersion(4), 20)
    chunks = [one.chunk(length, None) for length in (12, 12, 16, 22, 25)]
    assert [(chunk.start, len(chunk.token_ids)) for chunk in chunks] == [(10, 2), (12, 0), (12, 4), (16, 6), (22, 3)]
    assert [chunk.versions for chunk in chunks] == [
        Versions.of(runs) for runs in ([(2, 2)], [], [(2, 2), (3, 2)], [(3, 4), (4, 2)], [(4, 3)])
    ]


def test_the_last_token_of_a_context_counts_as_computed_with_the_next_one() -> None:
    one = sequence()
    one.single = 10
    assert [one.computed_by(length) for length in (10, 11, 12)] == [0, 1, 1]


def test_how_long_it_was_at_a_moment() -> None:
    one = sequence()
    # Decoded from 2 s (11 tokens, at a count of 100) to 3 s, and again from 5 s.
    one.stints.append(Stint(2.0, -89, 3.0, 15))
    one.phase, one.since_s, one.offset = Phase.DECODING, 5.0, -100
    assert [one.length_at(at_s, counted) for at_s, counted in ((1.0, 90), (2.5, 102), (4.0, 110), (5.0, 116))] == [
        10, 13, 15, 16,
    ]  # fmt: skip
    one.told = 14
    assert one.length_at(2.5, 102) == 14
