from collections.abc import Callable
from dataclasses import replace

import pytest

from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenIds
from pearl.records.turn import Chunk, EndReason, Sampling, TurnRequest, Versions
from pearl.testing.contracts.engine_probe import EngineSubject, Log, Probe, Requests, token_context
from pearl.testing.engine import FakeEngine, FakeEngineConfig
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import fake_manifest

REQUEST = TurnRequest(
    id=RequestId("r"),
    trajectory=TrajectoryId("t"),
    turn=0,
    context=TokenIds([1, 2, 3]),
    sampling=Sampling(seed=0),
    max_new_tokens=9,
    min_version=WeightVersion(0),
)
GOOD = Chunk(
    request=RequestId("r"),
    start=3,
    token_ids=TokenIds([7, 8]),
    logprobs=Floats([-1.0, 0.0]),
    versions=Versions.of([(0, 2)]),
)
LAST = replace(GOOD, start=5, end=EndReason.STOP, computed_prompt_tokens=3)


def log() -> Log:
    return Log(REQUEST, REQUEST.context[:0])


def test_chunks_are_joined() -> None:
    one = log()
    one.add(GOOD)
    one.add(LAST)
    assert one.token_ids == TokenIds([7, 8, 7, 8])
    assert one.logprobs == Floats([-1, 0, -1, 0])
    assert one.versions == Versions.of([(0, 4)])
    assert (one.chunks, one.end, one.computed) == (2, EndReason.STOP, 3)


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (replace(GOOD, start=4), "want it at 3"),
        (replace(GOOD, start=2), "want it at 3"),
        (replace(GOOD, logprobs=Floats([-1])), "1 log-probabilities for 2 tokens"),
        (replace(GOOD, versions=Versions.of([(0, 3)])), "versions cover 3 of 2 tokens"),
        (replace(GOOD, logprobs=Floats([-1, 0.5])), "must be <= 0"),
        (replace(GOOD, logprobs=Floats([-1, float("-inf")])), "must be finite"),
        (replace(GOOD, logprobs=Floats([-1, float("nan")])), "must be finite"),
        (replace(GOOD, error="odd"), "an error comes with FAILED only"),
        (replace(GOOD, end=EndReason.FAILED), "an error comes with FAILED only"),
        (replace(GOOD, token_ids=TokenIds(), logprobs=Floats(), versions=Versions()), "an empty chunk says nothing"),
    ],
)
def test_a_chunk_that_breaks_a_law_is_named(bad: Chunk, why: str) -> None:
    with pytest.raises(AssertionError, match=f"request r: chunk at {bad.start}.*{why}"):
        log().add(bad)


def test_nothing_comes_behind_the_end() -> None:
    one = log()
    one.add(replace(LAST, start=3))
    with pytest.raises(AssertionError, match="behind the request's end"):
        one.add(LAST)


def probe(engine: FakeEngine) -> Probe:
    async def manifest(version: int):  # type: ignore[no-untyped-def]
        return fake_manifest(version)

    return Probe(EngineSubject(engine=engine, vocab=97, manifest=manifest, foreign_manifest=manifest))


def test_a_chunk_that_nobody_asked_for_is_noticed() -> None:
    async def check() -> None:
        one = probe(FakeEngine())
        await one.engine.submit([REQUEST])
        with pytest.raises(AssertionError, match="request r, which nobody asked for"):
            await one.read()

    run_virtual(check())


def test_a_request_that_ends_too_soon_is_no_good_for_interrupting() -> None:
    async def check() -> None:
        one = probe(FakeEngine())
        await one.submit(REQUEST)
        with pytest.raises(AssertionError, match="raise long_tokens"):
            await one.some_tokens(REQUEST)

    run_virtual(check())


def test_a_probe_follows_several_requests() -> None:
    async def check() -> None:
        one = probe(FakeEngine(FakeEngineConfig(token_s=0.25, progress_interval_s=0.5)))
        other = replace(REQUEST, id=RequestId("s"), max_new_tokens=2)
        await one.submit(REQUEST, other)
        assert len((await one.some_tokens(REQUEST)).token_ids) == 2
        assert len((await one.ended(REQUEST)).token_ids) == 9
        assert one.logs[other.id].end is EndReason.LENGTH

    run_virtual(check())


def test_requests_are_told_apart() -> None:
    requests = Requests(10, token_context)
    one, other = requests.make(), requests.make(salt=1)
    assert len({one.id, other.id}) == len({one.trajectory, other.trajectory}) == 2
    assert one.context != other.context


@pytest.mark.parametrize("make", [token_context])
def test_contexts_are_of_the_vocabulary(make: Callable[[int, int, int], TokenIds]) -> None:
    ids = make(8, 100, 3).tolist()
    assert set(ids) <= set(range(1, 8))
    assert len(set(ids)) > 1
