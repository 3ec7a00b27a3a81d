"""KV from engine to engine: what is drawn is the same, what is computed is what was not handed over, faults are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.kv import KvPayload, Parcel, runs
from pearl.errors import ConfigError
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, TurnRequest

MakeEngine = Callable[..., EmbeddedEngine]

TOLERANCE = 1e-5
BLOCK = 16
"""Tokens that are damaged together in the test of damage."""


class Engines:
    """A prefill and a decode engine with equal weights, and one that does both."""

    def __init__(self, make: MakeEngine, kit: Any, **settings: Any) -> None:
        self.kit = kit
        self.now_s = 0.0
        self.prefill, self.decode, self.whole = (
            make(worker=WorkerId(n), clock=lambda: self.now_s, **settings) for n in range(3)
        )

    def run(self, engine: EmbeddedEngine, request: TurnRequest) -> tuple[Any, KvHandle | None]:
        engine.submit([request])
        chunks: list[Chunk] = []
        while engine.step():
            chunks += engine.take_chunks(0.0)
        chunks += engine.take_chunks(0.0, force=True)
        return self.kit.collect(chunks)[request.id], chunks[-1].kv

    def handed_over(
        self,
        name: str,
        context: Sequence[int],
        new: int,
        *,
        held: int = 0,
        readback: KvHandle | None = None,
        **fields: Any,
    ) -> tuple[Any, Any, KvHandle | None, KvHandle | None]:
        """A turn by prefill, hand-off and decode: both results, the handle between them, and that of the readback."""
        made = {"trajectory": "t", **fields}
        first, kv = self.run(
            self.prefill,
            self.kit.request(f"{name}p", context, new=new, mode=Mode.PREFILL, kv=readback, export_from=held, **made),
        )
        second, back = self.run(
            self.decode,
            self.kit.request(
                f"{name}d",
                [*context, *first.ids],
                new=new - 1,
                mode=Mode.DECODE,
                kv=kv,
                export_kv=True,
                export_from=len(context),
                **made,
            ),
        )
        return first, second, kv, back


@pytest.fixture
def engines(make_worker: MakeEngine, kit: Any) -> Engines:
    return Engines(make_worker, kit)


@pytest.fixture
def make_worker(folder: Path) -> MakeEngine:
    from pearl.config.engine import EngineConfig

    def make(
        model: Path | None = None, *, worker: WorkerId, clock: Callable[[], float], **settings: Any
    ) -> EmbeddedEngine:
        defaults = {"max_sequences": 8, "max_context_tokens": 256, "progress_interval_s": 0.0}
        config = EngineConfig(**{**defaults, **settings})
        return EmbeddedEngine(model or folder, config, worker=worker, clock=clock)

    return make


def entropy(logprobs: Sequence[float]) -> float:
    """Mean surprise of what was drawn, an estimate of the entropy per token in nats."""
    return -float(np.mean(logprobs))


def test_conversations_of_five_turns_are_those_of_one_engine(engines: Engines, kit: Any) -> None:
    context: list[int] = []
    readback: KvHandle | None = None
    held = 0
    surprise: list[float] = []
    for turn in range(5):
        context += kit.tokens(100 + turn, 11 + 3 * turn)
        want, _ = engines.run(engines.whole, kit.request(f"w{turn}", context, new=14, seed=9, trajectory="t"))
        first, second, kv, back = engines.handed_over(f"h{turn}", context, 14, held=held, readback=readback, seed=9)
        assert kv is not None
        assert (kv.start, kv.tokens) == (held, len(context))
        assert first.ids + second.ids == want.ids
        np.testing.assert_allclose(first.logprobs + second.logprobs, want.logprobs, atol=TOLERANCE, rtol=0)
        # The decode engine computes the one token that the prefill engine drew; that one, what is new and the last token.
        assert second.computed == 1
        assert first.computed == (len(context) if turn == 0 else 11 + 3 * turn + 1)
        assert back is not None
        assert (back.start, back.tokens) == (len(context), len(context) + 13)
        surprise += want.logprobs
        context += want.ids
        held, readback = len(context) - 1, back
    assert entropy(surprise) > 1, "a model that says the same whatever it reads tests nothing"


def test_a_damaged_block_shows(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 40)
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL))
    assert kv is not None
    decode = kit.request("d", context + first.ids, mode=Mode.DECODE, kv=kv, trajectory="a")
    sound, _ = engines.run(engines.decode, decode)
    assert isinstance(kv.payload, KvPayload)
    assert isinstance(kv.payload.data, Parcel)
    assert kv.payload.data.blocks is not None
    # Another order of tokens would not show: positions are part of the keys.
    kv.payload.data.blocks[..., BLOCK : 2 * BLOCK, :] *= -1
    damaged, _ = engines.run(engines.decode, replace(decode, id=RequestId("e"), trajectory=TrajectoryId("b")))
    assert damaged.end is EndReason.LENGTH
    same = [a == b for a, b in zip(damaged.ids, sound.ids, strict=True)]
    agreeing = same.index(False) if False in same else len(same)
    moved = np.abs(np.subtract(damaged.logprobs, sound.logprobs))[: agreeing + 1]
    assert moved.max() > 1e-2


def test_what_the_decode_engine_holds_is_not_sent_again(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    _, second, full, _ = engines.handed_over("a", context, 6)
    assert full is not None
    longer = [*context, *engines.decode._table.token_ids[0, 30:36].tolist(), *kit.tokens(2, 10)]
    _, again, part, _ = engines.handed_over("b", longer, 6, held=35)
    assert part is not None
    assert part.size_bytes * 30 == full.size_bytes * (len(longer) - 35)
    assert again.computed == 1
    assert second.computed == 1


def test_kv_behind_what_the_importer_holds_is_no_use(engines: Engines, kit: Any) -> None:
    """The decode engine was thought to hold 20 tokens and holds none: it computes all, and draws the same."""
    context = kit.tokens(1, 30)
    want, _ = engines.run(engines.whole, kit.request("w", context, new=8))
    first, second, _, _ = engines.handed_over("a", context, 8, held=20)
    assert first.ids + second.ids == want.ids
    assert second.computed == 31


def test_append_prefill_on_the_decode_engine(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    first, second, _, _ = engines.handed_over("a", context, 6)
    longer = context + first.ids + second.ids + kit.tokens(2, 5)
    want, _ = engines.run(engines.whole, kit.request("w", longer, new=6))
    third, _ = engines.run(engines.decode, kit.request("b", longer, new=6, trajectory="t"))
    assert third.ids == want.ids
    assert third.computed == 6, "the last token of the turn before, and five new ones"


def test_an_interrupted_request_hands_its_kv_over(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    want, _ = engines.run(engines.whole, kit.request("w", context, new=20))
    engines.prefill.submit([kit.request("a", context, new=20, export_kv=True)])
    for _ in range(8):
        engines.prefill.step()
    engines.prefill.interrupt([RequestId("a")])
    (chunk,) = engines.prefill.take_chunks(0.0)
    assert chunk.end is EndReason.INTERRUPTED
    assert chunk.kv is not None
    assert chunk.kv.tokens == 37
    done = chunk.token_ids.tolist()
    rest, _ = engines.run(engines.decode, kit.request("b", context + done, new=12, mode=Mode.DECODE, kv=chunk.kv))
    assert done + rest.ids == want.ids
    assert rest.computed == 1


@pytest.mark.parametrize("keep", [True, False])
def test_kv_of_older_weights(
    engines: Engines, make_worker: MakeEngine, tmp_path: Path, folder: Path, kit: Any, keep: bool
) -> None:
    """Taken by an engine that keeps KV over loads, computed again by one that does not."""
    manifest = kit.publish(tmp_path / "v1.safetensors", load_file(folder / "model.safetensors"), version=1)
    engines.decode.load(manifest, LoadMode.KEEP_KV if keep else LoadMode.RECOMPUTE)
    _, second, kv, back = engines.handed_over("a", kit.tokens(1, 30), 6)
    assert kv is not None
    assert kv.version == 0
    assert second.versions == [1] * 5
    assert second.computed == (1 if keep else 31)
    assert back is not None
    assert back.version == (0 if keep else 1)


# -- faults -----------------------------------------------------------------------------------------------------------


def test_handles_expire_and_are_released(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL))
    assert kv is not None
    assert kv.expires_s == 30.0
    decode = kit.request("d", context + first.ids, mode=Mode.DECODE, kv=kv)
    engines.now_s = 30.5
    late, _ = engines.run(engines.decode, decode)
    assert late.end is EndReason.FAILED
    assert "expired 0.5 s ago; send the whole context" in late.error
    engines.prefill.stats()
    assert len(engines.prefill._exports) == 0
    engines.now_s = 0.0
    gone, _ = engines.run(engines.decode, replace(decode, id=RequestId("e")))
    assert "was released" in gone.error
    good, _ = engines.run(engines.decode, replace(decode, id=RequestId("f"), mode=Mode.COLOCATED, kv=None))
    assert good.end is EndReason.LENGTH


def test_a_release_of_a_handle_keeps_the_prefix(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL, trajectory="t"))
    engines.prefill.release(TrajectoryId("t"), kv)
    engines.prefill.release(TrajectoryId("t"), kv)
    assert len(engines.prefill._exports) == 0
    again, _ = engines.run(engines.prefill, kit.request("q", context + first.ids, trajectory="t"))
    assert again.computed == 1
    engines.prefill.release(TrajectoryId("t"))
    cold, _ = engines.run(engines.prefill, kit.request("r", context + first.ids, trajectory="t"))
    assert cold.computed == 31


def test_what_was_imported_is_cleared_even_if_nothing_was_computed(engines: Engines, kit: Any) -> None:
    context = kit.tokens(1, 30)
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL))
    cache = engines.decode._cache
    assert cache is not None
    engines.decode.submit([kit.request("d", context + first.ids, mode=Mode.DECODE, kv=kv)])
    (slot,) = engines.decode._scheduler.admit()
    engines.decode._import(cache, slot)
    assert cache.blocks[:, :, slot, :, 29].all()
    cache.clear(slot)
    assert not cache.blocks.any()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda kv: replace(kv, epoch=3), "got epoch 3, want 0"),
        (lambda kv: replace(kv, payload=b"?"), "got a payload of bytes"),
        (lambda kv: replace(kv, payload=replace(kv.payload, model_hash="0" * 16)), "got KV of model 0000000000000000"),
        (lambda kv: replace(kv, payload=replace(kv.payload, layout="1x1x1 torch.float32")), "got layout 1x1x1"),
        (lambda kv: replace(kv, payload=replace(kv.payload, data=None)), "was released, or its owner is gone"),
        (lambda kv: replace(kv, payload=replace(kv.payload, data="ref")), "got str in the place of its blocks"),
        (lambda kv: replace(kv, payload=replace(kv.payload, data=[])), "its blocks are not float32 of shape"),
        (
            lambda kv: replace(kv, payload=replace(kv.payload, data=kv.payload.data.blocks.view(np.int32))),
            "its blocks are not float32 of shape",
        ),
        (
            lambda kv: replace(kv, payload=replace(kv.payload, data=kv.payload.data.blocks[:, :1])),
            "its blocks are not float32 of shape",
        ),
        (
            lambda kv: replace(kv, payload=replace(kv.payload, data=runs(kv.payload.data.blocks[..., :-1, :]))),
            "its blocks are not float32 of shape",
        ),
        (lambda kv: replace(kv, tokens=99), "got KV of tokens 0 .. 99, want a beginning of the context"),
        (lambda kv: replace(kv, start=31), "got KV of tokens 31 .. 30"),
        (lambda kv: replace(kv, tokens=29), "got KV of other tokens"),
    ],
)
def test_handles_that_are_refused(engines: Engines, kit: Any, change: Callable[[Any], KvHandle], says: str) -> None:
    context = kit.tokens(1, 30)
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL))
    decode = kit.request("d", context + first.ids, mode=Mode.DECODE, kv=change(kv), trajectory="t")
    result, _ = engines.run(engines.decode, decode)
    assert result.end is EndReason.FAILED
    assert says in result.error
    good, _ = engines.run(engines.decode, replace(decode, id=RequestId("e"), kv=kv))
    assert good.end is EndReason.LENGTH


@pytest.mark.parametrize("how", ["release", "expiry"])
def test_kv_that_goes_while_its_request_waits_is_computed(make_worker: MakeEngine, kit: Any, how: str) -> None:
    engines = Engines(make_worker, kit, max_sequences=1)
    context = kit.tokens(1, 30)
    want, _ = engines.run(engines.whole, kit.request("w", context, new=6))
    first, kv = engines.run(engines.prefill, kit.request("p", context, mode=Mode.PREFILL))
    assert kv is not None
    engines.decode.submit([kit.request("busy", kit.tokens(2, 5), new=20)])
    engines.decode.step()
    engines.decode.submit([kit.request("d", context + first.ids, new=5, mode=Mode.DECODE, kv=kv)])
    if how == "release":
        engines.prefill.release(TrajectoryId("t"), kv)
    else:
        engines.now_s = 31.0
        engines.prefill.stats()
    rest = kit.drain(engines.decode)["d"]
    assert first.ids + rest.ids == want.ids
    assert rest.computed == 31


def test_a_transport_that_fails_costs_the_handle_alone(
    engines: Engines, kit: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(blocks: object) -> object:
        raise MemoryError("the store is full")

    monkeypatch.setattr(engines.prefill._exports._transport, "put", full)
    result, kv = engines.run(engines.prefill, kit.request("p", kit.tokens(1, 30), mode=Mode.PREFILL))
    assert (result.end, len(result.ids), kv) == (EndReason.LENGTH, 1, None)
    assert "its KV was not exported" in caplog.text
    again, _ = engines.run(engines.prefill, kit.request("q", kit.tokens(1, 30), new=3))
    assert len(again.ids) == 3


def test_kv_of_another_context_is_refused(engines: Engines, kit: Any) -> None:
    _, kv = engines.run(engines.prefill, kit.request("p", kit.tokens(1, 30), mode=Mode.PREFILL))
    result, _ = engines.run(engines.decode, kit.request("d", kit.tokens(2, 31), mode=Mode.DECODE, kv=kv))
    assert "got KV of other tokens than the context's" in result.error


def test_a_budget_below_one_context(make_worker: MakeEngine, kit: Any) -> None:
    engines = Engines(make_worker, kit, kv_budget_tokens=20)
    assert engines.whole.info().kv_capacity_tokens == 20
    assert engines.whole.info().max_context_tokens == 20
    long, _ = engines.run(engines.whole, kit.request("a", kit.tokens(1, 21)))
    assert long.end is EndReason.FAILED
    assert "want 1 .. 20 (engine.max_context_tokens, and at most engine.kv_budget_tokens)" in long.error
    short, _ = engines.run(engines.whole, kit.request("b", kit.tokens(1, 15), new=10))
    assert (short.end, len(short.ids)) == (EndReason.LENGTH, 5)


def test_a_budget_beyond_the_memory(make_worker: MakeEngine, kit: Any) -> None:
    for tokens in (10**11, 10**16):
        with pytest.raises(ConfigError, match=r"engine\.kv_budget_tokens: .* do not fit into memory"):
            Engines(make_worker, kit, kv_budget_tokens=tokens)


def test_a_larger_budget_keeps_more_prefixes(make_worker: MakeEngine, kit: Any) -> None:
    contexts = {f"t{n}": kit.tokens(n, 10) for n in range(5)}
    computed = {}
    for budget in (0, 5 * 64 + 63):
        engine = Engines(make_worker, kit, max_sequences=2, max_context_tokens=64, kv_budget_tokens=budget).whole
        assert engine.info().kv_capacity_tokens == (5 * 64 if budget else 2 * 64)
        kit.generate(engine, *(kit.request(name, ids, trajectory=name, new=1) for name, ids in contexts.items()))
        again = [kit.request(f"{name}+", [*ids, 5], trajectory=name, new=1) for name, ids in contexts.items()]
        computed[budget] = sorted(result.computed for result in kit.generate(engine, *again).values())
    # Two slots hold the prefixes of the last two; whoever comes first evicts nobody that comes later but one.
    assert computed[0].count(11) >= 3
    assert computed[5 * 64 + 63] == [1] * 5


# -- sleep ------------------------------------------------------------------------------------------------------------


def test_sleep_ends_everything_and_a_load_after_waking_begins_anew(
    engines: Engines, folder: Path, tmp_path: Path, kit: Any
) -> None:
    engine = engines.prefill
    want, _ = engines.run(engines.whole, kit.request("w", kit.tokens(1, 30), new=8))
    _, kv = engines.run(engine, kit.request("p", kit.tokens(1, 30), mode=Mode.PREFILL))
    engine.submit([kit.request(name, kit.tokens(3, 5), new=50) for name in "ab"])
    engine.step()
    engine.submit([kit.request("c", kit.tokens(3, 5), new=50)])
    info = engine.sleep()
    assert info.epoch == 1
    ends = kit.collect(engine.take_chunks(0.0))
    assert {name: result.end for name, result in ends.items()} == dict.fromkeys("abc", EndReason.INTERRUPTED)
    assert len(ends["a"].ids) == 1
    assert engine.step() is False
    assert engine.stats().kv_used_tokens == 0
    asleep, _ = engines.run(engine, kit.request("d", [5]))
    assert "it sleeps; wake it and load weights" in asleep.error
    assert kv is not None
    assert kv.payload.data.blocks is None  # type: ignore[attr-defined]

    assert engine.wake().epoch == 1
    awake, _ = engines.run(engine, kit.request("e", [5]))
    assert "it woke without weights" in awake.error
    manifest = kit.publish(tmp_path / "v1.safetensors", load_file(folder / "model.safetensors"), version=1)
    engine.load(manifest, LoadMode.RECOMPUTE)
    again, _ = engines.run(engine, kit.request("f", kit.tokens(1, 30), new=8))
    assert again.ids == want.ids
    assert again.versions == [1] * 8


def test_weights_are_not_loaded_into_a_sleeping_engine(
    engines: Engines, folder: Path, tmp_path: Path, kit: Any
) -> None:
    from pearl.errors import WeightsError

    manifest = kit.publish(tmp_path / "v1.safetensors", load_file(folder / "model.safetensors"), version=1)
    engines.whole.sleep()
    with pytest.raises(WeightsError, match="it sleeps; wake it first"):
        engines.whole.load(manifest, LoadMode.RECOMPUTE)
    engines.whole.wake()
    engines.whole.load(manifest, LoadMode.RECOMPUTE)
    assert engines.whole.stats().version == WeightVersion(1)


def test_context_hash_is_of_the_ids(kit: Any) -> None:
    from pearl.engine.embedded.kv import context_hash

    ids = TokenIds(kit.tokens(1, 30))
    assert context_hash(ids) == context_hash(TokenIds(kit.tokens(1, 31))[:30]) != context_hash(ids[:29])
