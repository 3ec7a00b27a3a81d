"""Exports of KV: why they cannot be read."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenCount
from pearl.records.turn import KvHandle, Mode, Sampling, TurnRequest
from pearl.sim.kv import KvExports, kv_refusal
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.script import ScriptedTokens, ScriptTurn, script_of

SCRIPT = script_of((ScriptTurn(100, 50, 0.0),))
T = TrajectoryId("t")


def request(kv: KvHandle | None = None, tokens: int = 100) -> TurnRequest:
    return TurnRequest(
        id=RequestId("r"),
        trajectory=T,
        turn=0,
        context=ScriptedTokens(tokens, SCRIPT),
        sampling=Sampling(seed=0),
        max_new_tokens=9,
        min_version=WeightVersion(0),
        mode=Mode.DECODE,
        kv=kv,
        export_from=40,
    )


def exported() -> tuple[PrefixCache, KvExports, KvHandle]:
    cache = PrefixCache(1000)
    exports = KvExports(cache, worker=WorkerId(3), model_hash="h", bytes_per_token=7, ttl_s=60.0, epoch=2)
    return cache, exports, exports.export(request(), SCRIPT, 100, WeightVersion(5), 10.0)


def test_a_handle_says_what_it_is_of() -> None:
    cache, _, handle = exported()
    assert (handle.owner, handle.epoch, handle.start, handle.tokens, handle.version) == (3, 2, 40, 100, 5)
    assert (handle.size_bytes, handle.expires_s, cache.pinned_tokens) == (420, 70.0, 100)
    assert kv_refusal(request(handle), "h", 70.0) is None


def test_equal_scripts_are_the_same_context() -> None:
    _, _, handle = exported()
    twin = script_of((ScriptTurn(100, 50, 0.0),))
    assert kv_refusal(replace(request(handle), context=ScriptedTokens(100, twin)), "h", 20.0) is None
    other = script_of((ScriptTurn(100, 51, 0.0),))
    for context in (ScriptedTokens(100, other), TokenCount(100)):
        refused = kv_refusal(replace(request(handle), context=context), "h", 20.0)
        assert refused == "KV handle 3-2-1: got KV of another script than the context's; send the whole context"


def test_why_it_cannot_be_imported() -> None:
    _, exports, handle = exported()
    assert kv_refusal(request(), "h", 0.0) == "got no KV handle, want one with mode decode"
    assert kv_refusal(replace(request(), mode=Mode.COLOCATED), "h", 0.0) is None
    cases = [
        (replace(handle, payload=1), "got a payload of int, want one of a simulated engine"),
        (replace(handle, tokens=101), "got KV of tokens 40 .. 101, want a beginning of the 100 of the context"),
        (replace(handle, epoch=1), "got epoch 1, want 2; send the whole context"),
        (replace(handle, expires_s=19.0), "expired at 19 s, now 20 s; send the whole context"),
    ]
    for bad, message in cases:
        assert kv_refusal(request(bad), "h", 20.0) == f"KV handle {handle.id}: {message}"
    assert "got KV of model h, want other" in (kv_refusal(request(handle), "other", 20.0) or "")
    exports.lost = True
    assert "its owner, worker 3, is gone" in (kv_refusal(request(handle), "h", 20.0) or "")


@pytest.mark.parametrize("end", ["given back", "expired", "epoch"])
def test_what_is_over_is_over(end: str) -> None:
    cache, exports, handle = exported()
    match end:
        case "given back":
            exports.give_back(T, handle.id)
        case "expired":
            cache.expire(70.0)
        case "epoch":
            exports.invalidate()
            assert exports.epoch == 3
    assert cache.pinned_tokens == 0
    assert kv_refusal(request(handle), "h", 20.0) is not None
