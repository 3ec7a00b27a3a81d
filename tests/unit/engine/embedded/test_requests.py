"""Requests that cannot be served: each ends as FAILED with what, got and allowed, and the engine goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.errors import EngineError
from pearl.records.ids import HandleId, WeightVersion, WorkerId
from pearl.records.tokens import TokenCount, TokenIds
from pearl.records.turn import EndReason, KvHandle, Mode, Sampling

MakeEngine = Callable[..., EmbeddedEngine]

HANDLE = KvHandle(
    id=HandleId("h"),
    owner=WorkerId(1),
    epoch=0,
    tokens=1,
    size_bytes=1,
    version=WeightVersion(0),
    expires_s=1.0,
)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"mode": Mode.DECODE}, "mode: got decode without kv"),
        ({"kv": HANDLE}, "kv: handle h: got a payload of NoneType"),
        ({"export_from": -1}, "export_from: got -1, want >= 0"),
        ({"context": TokenCount(3)}, "context: got TokenCount, want TokenIds"),
        ({"context": TokenIds()}, "context: got 0 tokens, want 1 .. 96"),
        ({"context": TokenIds([5] * 97)}, "context: got 97 tokens, want 1 .. 96"),
        ({"context": TokenIds([5, 98])}, "context: got token ids 5 .. 98, want 0 .. 97"),
        ({"context": TokenIds([-1, 5])}, "context: got token ids -1 .. 5, want 0 .. 97"),
        ({"max_new_tokens": 0}, "max_new_tokens: got 0, want >= 1"),
        ({"temperature": -0.5}, "sampling.temperature: got -0.5, want >= 0"),
        ({"temperature": float("nan")}, "sampling.temperature: got nan"),
        ({"temperature": float("inf")}, "sampling.temperature: got inf"),
        ({"sampling": Sampling(seed=-1)}, "sampling.seed: got -1, want 0 .. 2**63 - 1"),
        ({"sampling": Sampling(seed=2**63)}, "sampling.seed: got 9223372036854775808"),
        ({"stops": (98,)}, "sampling.stop_token_ids: got (98,), want 0 .. 97"),
        ({"stops": (-1,)}, "sampling.stop_token_ids: got (-1,), want 0 .. 97"),
        ({"min_version": WeightVersion(1)}, "min_version: got 1, want <= 0"),
        ({"max_new_tokens": None}, "got a value that cannot be used"),
        ({"stops": ("a",)}, "got a value that cannot be used"),
        ({"kv": object()}, "got a value that cannot be used"),
    ],
)
def test_refused_and_the_engine_goes_on(make_engine: MakeEngine, kit: Any, fields: dict[str, Any], says: str) -> None:
    engine = make_engine()
    values = {"context": TokenIds([5, 6]), **fields}
    for short, field in (("temperature", "temperature"), ("stops", "stop_token_ids")):
        if short in values:
            values["sampling"] = Sampling(**{"seed": 0, field: values.pop(short)})
    bad = dataclasses.replace(kit.request("bad", [5]), **values)
    results = kit.generate(engine, kit.request("before", [5]), bad, kit.request("after", [6]))
    assert results["bad"].end is EndReason.FAILED
    assert says in results["bad"].error
    assert "request bad" in results["bad"].error
    assert results["bad"].ids == []
    assert results["before"].end is EndReason.LENGTH
    assert results["after"].end is EndReason.LENGTH
    assert results["after"].error is None


def test_a_trajectory_has_one_request_at_a_time(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(max_sequences=1)
    engine.submit([kit.request("a", [5], trajectory="t"), kit.request("b", [5], trajectory="t")])
    engine.submit([kit.request("c", [5], trajectory="u"), kit.request("d", [5], trajectory="u")])
    results = kit.drain(engine)
    assert [results[name].end for name in "abcd"] == [EndReason.LENGTH, EndReason.FAILED] * 2
    assert "trajectory t: has a request here already" in results["b"].error


def test_an_id_in_use_is_refused_and_nothing_of_its_batch_is_taken(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(max_sequences=1)
    engine.submit([kit.request("a", [5]), kit.request("waits", [5])])
    engine.step()
    for taken in ("a", "waits"):
        with pytest.raises(EngineError, match=f"request {taken}: this id is in use"):
            engine.submit([kit.request("new", [5]), kit.request(taken, [5], trajectory="other")])
    with pytest.raises(EngineError, match="request twice: this id is in use"):
        engine.submit([kit.request("twice", [5]), kit.request("twice", [5])])
    assert sorted(kit.drain(engine)) == ["a", "waits"]
    assert kit.generate(engine, kit.request("a", [5]))["a"].end is EndReason.LENGTH


def test_logits_that_are_not_finite_fail_their_request_alone(make_engine: MakeEngine, kit: Any) -> None:
    """One embedding row is broken: requests that meet its token fail, others do not, and the slot is clean afterwards."""
    engine = make_engine(max_sequences=2)
    weights = engine._model.weights
    broken = weights.embedding.clone()  # of the input only: the tied head stays whole
    broken[50] = float("nan")
    engine._model.weights = dataclasses.replace(weights, embedding=broken)
    results = kit.generate(
        engine,
        kit.request("bad", [5, 50, 6], trajectory="t", temperature=0.0),
        kit.request("good", [5, 6, 7], seed=2, new=1),
    )
    assert results["bad"].end is EndReason.FAILED
    assert "logits are not finite" in results["bad"].error
    assert results["good"].end is EndReason.LENGTH
    engine._model.weights = weights
    # Decoding next to a longer sequence reads the slot beyond its own length, where the broken values were.
    longer = kit.request("longer", kit.tokens(1, 20))
    again = kit.generate(engine, kit.request("again", [5], trajectory="t"), longer)["again"]
    fresh = kit.generate(make_engine(), kit.request("again", [5]))["again"]
    assert again.end is EndReason.LENGTH
    assert again.ids == fresh.ids
    assert again.computed == 1
