"""Continuous batching: against a naive engine that goes iteration by iteration, and by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from pearl.core.profile import IterationTimes
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason, Sampling, TurnRequest
from pearl.sim.batching import Batching
from pearl.sim.iterations import IterationCosts
from pearl.sim.kv import KvExports
from pearl.sim.limits import Limits, Mixing
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of
from pearl.sim.sequence import Sequence
from tests.platforms import linear_times

TIMES = linear_times(0.010, 0.001, 0.0001, (1, 64, 1024))
HAND = linear_times(0.010, 0.001, 0.0001)
"""10 ms, 1 ms per decoding request, 0.1 ms per prompt token."""


def batching(times: IterationTimes, limits: Limits, capacity: int = 10**6) -> Batching:
    cache = PrefixCache(capacity)
    exports = KvExports(cache, worker=WorkerId(0), model_hash="h", bytes_per_token=1, ttl_s=60.0)
    return Batching(IterationCosts(times), limits, cache, exports)


def sequence(number: int, prompt: int, output: int, trajectory: int | None = None) -> Sequence:
    script = script_of((ScriptTurn(prompt, output, 0.0),))
    request = TurnRequest(
        id=RequestId(f"r{number}"),
        trajectory=TrajectoryId(f"t{number if trajectory is None else trajectory}"),
        turn=0,
        context=ScriptedTokens(prompt, script),
        sampling=Sampling(seed=0),
        max_new_tokens=output,
        min_version=WeightVersion(0),
    )
    return Sequence(
        request=request,
        script=script,
        context=prompt,
        goal=prompt + output,
        end=EndReason.STOP,
        versions=[(prompt, WeightVersion(0))],
        kv_version=WeightVersion(0),
    )


def ends(engine: Batching, arrivals: list[tuple[float, Sequence]]) -> list[tuple[str, float]]:
    """Run it; which request ended when."""
    told: list[tuple[str, float]] = []

    def take(now_s: float) -> None:
        told.extend((one.sequence.request.id, now_s) for one in engine.roster.ended)
        engine.roster.ended.clear()

    for at_s, each in arrivals:
        while (due_s := engine.due_s) is not None and due_s < at_s:
            engine.advance(due_s)
            take(due_s)
        engine.submit([each], at_s)
    while (due_s := engine.due_s) is not None:
        engine.advance(due_s)
        take(due_s)
    return told


@dataclass
class Naive:
    name: str
    length: int
    goal: int
    cached: int = 0


def naive(  # noqa: C901 - one loop, as one would write it first
    times: IterationTimes, limits: Limits, arrivals: list[tuple[float, Sequence]], capacity: int
) -> list[tuple[str, float]]:
    """One iteration after the other, written down as the laws say; no prefixes are shared, and none is evicted."""
    todo = [(at, Naive(one.request.id, one.context, one.goal)) for at, one in arrivals]
    waiting: list[Naive] = []
    running: list[Naive] = []
    now_s, told = 0.0, []

    def held(one: Naive) -> int:
        return one.length if one.length - one.cached > 1 else one.length - 1

    while todo or waiting or running:
        if not running and not waiting:
            now_s = max(now_s, todo[0][0])
        while todo and todo[0][0] <= now_s:
            waiting.append(todo.pop(0)[1])
        decodes = [one for one in running if one.length - one.cached == 1]
        while waiting and len(running) < limits.max_sequences:
            decoding = sum(one.length - one.cached == 1 for one in running)
            if waiting[0].length + decoding > capacity - sum(map(held, running)):
                break
            running.append(waiting.pop(0))
        alone = limits.mixing is Mixing.ALONE and any(one.length - one.cached > 1 for one in running)
        while True:
            decodes = [one for one in running if one.length - one.cached == 1]
            if alone or len(decodes) <= capacity - sum(map(held, running)):
                break
            youngest = running.pop()
            youngest.cached = 0
            waiting.insert(0, youngest)
        left, shares = limits.chunk_tokens, []
        for one in running:
            if one.length - one.cached > 1 and left:
                shares.append((one, min(left, one.length - one.cached)))
                left -= shares[-1][1]
        decodes = [] if limits.mixing is Mixing.ALONE and shares else decodes
        contexts = [one.length for one in decodes] or [one.cached + tokens for one, tokens in shares]
        now_s += times.seconds(limits.chunk_tokens - left, len(decodes), sum(contexts) / len(contexts))
        for one in decodes:
            one.cached, one.length = one.length, one.length + 1
        for one, tokens in shares:
            one.cached += tokens
            one.length += one.cached == one.length
        told += [(one.name, now_s) for one in running if one.length == one.goal]
        running = [one for one in running if one.length < one.goal]
    return told


@examples(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 0.4), st.integers(2, 200), st.integers(1, 90)), min_size=1, max_size=14),
    st.integers(1, 6),
    st.sampled_from([16, 100]),
    st.sampled_from(list(Mixing)),
    st.integers(300, 900),
)
def test_it_does_what_a_naive_engine_does(
    requests: list[tuple[float, int, int]], seats: int, chunk: int, mixing: Mixing, capacity: int
) -> None:
    limits = Limits(max_sequences=seats, chunk_tokens=chunk, mixing=mixing)
    at_s, arrivals = 0.0, []
    for number, (wait_s, prompt, output) in enumerate(requests):
        at_s += wait_s * 0.71828
        arrivals.append((at_s, sequence(number, prompt, output)))
    expected = naive(TIMES, limits, arrivals, capacity)
    engine = batching(TIMES, limits, capacity)
    told = ends(engine, arrivals)
    assert sorted(name for name, _ in told) == sorted(name for name, _ in expected)
    wanted = dict(expected)
    assert [end_s for _, end_s in told] == pytest.approx([wanted[name] for name, _ in told], rel=1e-9)
    assert engine.stats(99.0).generated_tokens == sum(output for _, _, output in requests)


def test_chunked_prefill_by_hand() -> None:
    engine = batching(HAND, Limits(chunk_tokens=100))
    told = ends(engine, [(0.0, sequence(0, 2, 3)), (0.015, sequence(1, 150, 1))])
    # r0: 10 + 0.2 ms for its prompt; then 11 ms with one token; the arrival waits for 21.2 ms, and 100 of its tokens ride
    # along in 21 ms, in which r0 ends; 50 more take 15 ms.
    assert told == [("r0", pytest.approx(0.0422)), ("r1", pytest.approx(0.0572))]


def test_prefill_alone_by_hand() -> None:
    engine = batching(HAND, Limits(chunk_tokens=100, mixing=Mixing.ALONE))
    told = ends(engine, [(0.0, sequence(0, 2, 3)), (0.015, sequence(1, 150, 1))])
    # The decode waits for 20 + 15 ms of prefill.
    assert told == [("r1", pytest.approx(0.0562)), ("r0", pytest.approx(0.0672))]


def test_who_has_no_room_for_the_next_token_gives_way_and_is_computed_again() -> None:
    engine = batching(HAND, Limits(chunk_tokens=100), capacity=12)
    told = ends(engine, [(0.0, sequence(0, 5, 5)), (0.0, sequence(1, 5, 4))])
    # 10 tokens; both draw one (11 ms), both another one (12 ms, 12 tokens held), then r1 gives way. r0 draws its last three
    # (33 ms); r1 has 7 to compute, and 2 to draw: 10.7 and 11 ms.
    assert told == [("r0", pytest.approx(0.056)), ("r1", pytest.approx(0.0777))]
    assert engine.roster.counts.preemptions == 1
    assert engine.stats(1.0).computed_prompt_tokens == 5 + 5 + 7


def test_a_budget_of_tokens_is_for_those_that_decode_first() -> None:
    engine = batching(HAND, Limits(chunk_tokens=100, iteration_tokens=41))
    told = ends(engine, [(0.0, sequence(0, 2, 9)), (0.0102, sequence(1, 80, 1))])
    # After r0's prompt two iterations have room for 40 tokens beside it: 15 ms each.
    assert told[0] == ("r1", pytest.approx(0.0402))


def test_interrupts_pauses_and_new_weights_wait_for_the_boundary() -> None:
    engine = batching(HAND, Limits())
    engine.submit([sequence(0, 2, 100), sequence(1, 2, 100)], 0.0)
    # Prompts in 10.4 ms, then 12 ms per iteration.
    engine.advance(0.0200)
    engine.interrupt([RequestId("r1"), RequestId("nobody")], 0.0200)
    assert engine.due_s == pytest.approx(0.0224)
    engine.pause(0.0210)
    assert not engine.is_between
    engine.advance(0.0224)
    assert engine.is_between
    assert [one.sequence.request.id for one in engine.roster.ended] == ["r1"]
    assert engine.due_s is None
    # r0 has 2 + 2 tokens, and KV of all but the last.
    assert engine.reload(WeightVersion(1), LoadMode.RECOMPUTE, 0.5) == 3
    engine.resume(0.5)
    # 4 tokens again.
    assert engine.due_s == pytest.approx(0.5104)
    engine.advance(0.5104)
    assert engine.roster.requests[RequestId("r0")].versions == [(2, 0), (4, 1)]


def test_frozen_time_is_added() -> None:
    engine = batching(HAND, Limits())
    engine.submit([sequence(0, 2, 3)], 0.0)
    engine.freeze(0.0152)
    assert engine.due_s is None
    engine.advance(5.0)
    assert engine.stats(5.0).generated_tokens == 1
    engine.thaw(7.0152)
    # 5 ms of the iteration of 11 ms were over.
    assert engine.due_s == pytest.approx(7.0212)
    engine.advance(7.0212)
    assert engine.due_s == pytest.approx(7.0322)


def test_a_slower_pace_begins_at_the_boundary() -> None:
    engine = batching(HAND, Limits())
    engine.submit([sequence(0, 2, 3)], 0.0)
    engine.rescale(2.0, 0.0152)
    assert engine.due_s == pytest.approx(0.0212)
    engine.advance(0.0212)
    assert engine.due_s == pytest.approx(0.0432)
