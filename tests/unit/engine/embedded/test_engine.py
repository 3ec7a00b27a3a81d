"""Generation: against transformers, across interruptions, in any company, with reused prefixes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.sampling import uniform
from pearl.errors import ConfigError
from pearl.records.ids import TrajectoryId
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason

MakeEngine = Callable[..., EmbeddedEngine]

LOGPROB_TOLERANCE = 1e-5


def next_logprobs(reference: Any, ids: list[int], temperature: float) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(reference(torch.tensor([ids])).logits[0, -1].double() / temperature, -1)


def number(seed: int, position: int) -> float:
    return float(uniform(np.array([seed], dtype=np.uint64), np.array([position], dtype=np.uint64))[0])


# -- against transformers -----------------------------------------------------------------------------------------------


def test_greedy_follows_transformers(make_engine: MakeEngine, reference: Any, kit: Any) -> None:
    context = kit.tokens(1, 9)
    result = kit.generate(make_engine(), kit.request("a", context, temperature=0.0, new=30))["a"]
    with torch.no_grad():
        want = reference.generate(
            torch.tensor([context]), do_sample=False, max_new_tokens=30, eos_token_id=None, pad_token_id=0
        )
    assert result.ids == want[0, 9:].tolist()
    assert result.logprobs == [0.0] * 30
    assert result.end is EndReason.LENGTH
    assert result.start == 9


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_each_token_is_the_inverse_of_the_exact_distribution(
    make_engine: MakeEngine, reference: Any, kit: Any, temperature: float
) -> None:
    """Walks the transformers distribution by hand with the number of (seed, position)."""
    context = kit.tokens(2, 11)
    result = kit.generate(make_engine(), kit.request("a", context, temperature=temperature, seed=77, new=20))["a"]
    ids = list(context)
    for token, logprob in zip(result.ids, result.logprobs, strict=True):
        exact = next_logprobs(reference, ids, temperature)
        want = int((exact.exp().cumsum(-1) <= number(77, len(ids))).sum())
        assert token == want
        assert logprob == pytest.approx(float(exact[token]), abs=1e-4)
        ids.append(token)


def test_sampled_tokens_follow_the_distribution_over_seeds(make_engine: MakeEngine, reference: Any, kit: Any) -> None:
    context, count = kit.tokens(3, 5), 4000
    engine = make_engine(max_sequences=64)
    requests = [kit.request(f"r{seed}", context, seed=seed, new=1) for seed in range(count)]
    drawn = [result.ids[0] for result in kit.generate(engine, *requests).values()]
    expected = next_logprobs(reference, context, 1.0).exp().numpy() * count
    counts = np.bincount(drawn, minlength=kit.vocabulary)
    # Rare tokens together, so that every cell expects at least five.
    rare = expected < 5
    cells = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    degrees = len(cells) - 1
    # 1 - 1e-4 quantile of chi-square, Wilson and Hilferty's approximation.
    limit = degrees * (1 - 2 / (9 * degrees) + 3.719 * (2 / (9 * degrees)) ** 0.5) ** 3
    assert degrees > 10
    assert ((cells - wanted) ** 2 / wanted).sum() < limit


# -- nothing around a request matters -------------------------------------------------------------------------------------


def assert_same(got: Any, want: Any) -> None:
    assert got.ids == want.ids
    assert got.end is want.end
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=LOGPROB_TOLERANCE, rtol=0)


def test_interrupted_anywhere_and_continued_elsewhere(make_engine: MakeEngine, kit: Any) -> None:
    """At every number of generated tokens; the second engine knows nothing but the request."""
    context, new = kit.tokens(4, 13), 16
    whole = kit.generate(make_engine(), kit.request("a", context, seed=5, new=new))["a"]
    assert len(whole.ids) == new
    for stop in range(new):
        first, second = make_engine(), make_engine(prefill_chunk_tokens=4)
        first.submit([kit.request("a", context, seed=5, new=new)])
        for _ in range(stop):
            first.step()
        first.interrupt(["a"])
        part = kit.collect(first.take_chunks(0.0))["a"]
        assert part.end is EndReason.INTERRUPTED
        assert len(part.ids) == stop
        rest = kit.generate(second, kit.request("b", context + part.ids, seed=5, new=new - stop))["b"]
        part.ids += rest.ids
        part.logprobs += rest.logprobs
        part.end = rest.end
        assert_same(part, whole)
        assert first.step() is False


def test_interrupted_in_the_middle_of_prefill(make_engine: MakeEngine, kit: Any) -> None:
    context = kit.tokens(4, 30)
    whole = kit.generate(make_engine(), kit.request("a", context))["a"]
    engine = make_engine(prefill_chunk_tokens=8)
    engine.submit([kit.request("a", context, trajectory="t")])
    engine.step()
    engine.interrupt(["a"])
    part = kit.collect(engine.take_chunks(0.0))["a"]
    assert (part.ids, part.computed, part.start) == ([], 8, 30)
    again = kit.generate(engine, kit.request("b", context, trajectory="t"))["b"]
    assert again.computed == 22
    assert_same(again, whole)


def test_interrupt_of_waiting_and_unknown_requests(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(max_sequences=1)
    engine.submit([kit.request("a", [5], new=3), kit.request("b", [5, 6])])
    engine.step()
    engine.interrupt(["b", "nobody"])
    results = kit.drain(engine)
    assert results["b"].end is EndReason.INTERRUPTED
    assert results["b"].start == 2
    assert results["b"].ids == []
    assert results["a"].end is EndReason.LENGTH


@pytest.mark.parametrize(("sequences", "chunk"), [(64, 512), (5, 16), (3, 1)])
def test_ragged_company_changes_nothing(make_engine: MakeEngine, kit: Any, sequences: int, chunk: int) -> None:
    """Arrivals spread over time, contexts and lengths of every size, more requests than slots."""
    rng = np.random.default_rng(8)
    requests = [
        kit.request(
            f"r{index}",
            kit.tokens(index, int(rng.integers(1, 60))),
            seed=index,
            temperature=float(rng.choice([0.0, 0.7, 1.0])),
            stops=(3, 4, 5, 6, 7, 8, 9),
            new=int(rng.integers(1, 30)),
        )
        for index in range(40)
    ]
    alone = {}
    for request in requests:
        alone |= kit.generate(make_engine(), request)
    engine = make_engine(max_sequences=sequences, prefill_chunk_tokens=chunk)
    together: dict[str, Any] = {}
    queue = list(requests)
    while queue:
        take = int(rng.integers(1, 6))
        engine.submit(queue[:take])
        del queue[:take]
        engine.step()
        kit.collect(engine.take_chunks(0.0), together)
    kit.drain(engine, together)
    assert {result.end for result in alone.values()} == {EndReason.STOP, EndReason.LENGTH}
    assert together.keys() == alone.keys()
    for name, result in alone.items():
        assert_same(together[name], result)


# -- ends -----------------------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_turn_and_is_kept(make_engine: MakeEngine, kit: Any) -> None:
    context = kit.tokens(6, 8)
    free = kit.generate(make_engine(), kit.request("a", context, seed=3, new=20))["a"]
    stop = free.ids[7]
    want = free.ids[: free.ids.index(stop) + 1]
    stopped = kit.generate(make_engine(), kit.request("a", context, seed=3, new=20, stops=(stop,)))["a"]
    assert stopped.ids == want
    assert stopped.end is EndReason.STOP


def test_a_stop_token_in_the_context_does_not_end_it(make_engine: MakeEngine, kit: Any) -> None:
    result = kit.generate(make_engine(), kit.request("a", [5, 1, 5], stops=(1,), temperature=0.0, new=4))["a"]
    assert len(result.ids) >= 1


def test_the_context_limit_ends_with_length(make_engine: MakeEngine, kit: Any) -> None:
    """96 positions: 90 of context leave room for six tokens, 95 for one."""
    engine = make_engine()
    results = kit.generate(
        engine, kit.request("a", kit.tokens(1, 90), new=50), kit.request("b", kit.tokens(1, 95), new=50)
    )
    assert (len(results["a"].ids), results["a"].end) == (6, EndReason.LENGTH)
    assert (len(results["b"].ids), results["b"].end) == (1, EndReason.LENGTH)


def test_stop_wins_over_length(make_engine: MakeEngine, kit: Any) -> None:
    every = tuple(range(kit.vocabulary))
    result = kit.generate(make_engine(), kit.request("a", [5], stops=every, new=1))["a"]
    assert result.end is EndReason.STOP


# -- prefixes ---------------------------------------------------------------------------------------------------------------


def turns(engine: EmbeddedEngine, kit: Any, count: int = 4, trajectory: str = "t") -> list[Any]:
    """Play turns in one trajectory: answers of six tokens, observations of five."""
    context, results = kit.tokens(20, 10), []
    for turn in range(count):
        name = f"{trajectory}{turn}"
        results += kit.generate(
            engine, kit.request(name, context, trajectory=trajectory, turn=turn, seed=9, new=6)
        ).values()
        context = context + results[-1].ids + kit.tokens(30 + turn, 5)
    return results


def test_a_next_turn_computes_only_what_is_new(make_engine: MakeEngine, kit: Any) -> None:
    engine, fresh = make_engine(), make_engine()
    results = turns(engine, kit)
    # The last token of an answer was never fed to the model: it counts with the five of the observation.
    assert [result.computed for result in results] == [10, 6, 6, 6]
    assert engine.stats().computed_prompt_tokens == 28
    assert engine.stats().kv_used_tokens == 10 + 3 * 11 + 5
    context = kit.tokens(20, 10)
    for turn, result in enumerate(results):
        alone = kit.generate(fresh, kit.request(f"f{turn}", context, seed=9, new=6))[f"f{turn}"]
        assert alone.computed == len(context)
        assert_same(result, alone)
        context = context + result.ids + kit.tokens(30 + turn, 5)


def test_release_forgets_the_prefix(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine()
    first = kit.generate(engine, kit.request("a", kit.tokens(1, 20), trajectory="t"))["a"]
    engine.release("t")
    engine.release("nobody")
    assert engine.stats().kv_used_tokens == 0
    second = kit.generate(engine, kit.request("b", kit.tokens(1, 20), trajectory="t"))["b"]
    assert second.computed == 20
    assert_same(second, first)


def test_eviction_costs_time_and_nothing_else(make_engine: MakeEngine, kit: Any) -> None:
    roomy, tight = make_engine(max_sequences=3), make_engine(max_sequences=2)
    for engine in (roomy, tight):
        kit.generate(engine, kit.request("a", kit.tokens(1, 20), trajectory="a"))
        kit.generate(engine, kit.request("b", kit.tokens(2, 20), trajectory="b"))
        kit.generate(engine, kit.request("c", kit.tokens(3, 20), trajectory="c"))
    context = kit.tokens(1, 25)
    context[:20] = kit.tokens(1, 20)
    kept = kit.generate(roomy, kit.request("d", context, trajectory="a"))["d"]
    evicted = kit.generate(tight, kit.request("d", context, trajectory="a"))["d"]
    assert (kept.computed, evicted.computed) == (5, 25)
    assert_same(evicted, kept)


def test_more_trajectories_than_slots_all_finish(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(max_sequences=2)
    engine.submit([kit.request(f"r{i}", kit.tokens(i, 5), new=4) for i in range(9)])
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 7)
    results = kit.drain(engine)
    assert sorted(results) == [f"r{i}" for i in range(9)]
    assert all(len(result.ids) == 4 for result in results.values())
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


# -- chunks and counters ------------------------------------------------------------------------------------------------------


def test_progress_is_reported_at_most_every_interval_and_ends_at_once(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(progress_interval_s=10.0)
    assert engine.take_chunks(99.0) == ()  # an empty look does not put off the first report
    engine.submit([kit.request("long", [5], new=9), kit.request("short", [5], new=3)])

    def step(now_s: float, force: bool = False) -> dict[str, int]:
        engine.step()
        return {c.request: len(c.token_ids) for c in engine.take_chunks(now_s, force)}

    assert step(100.0) == {"long": 1, "short": 1}
    assert step(105.0) == {}
    assert step(109.0) == {"short": 2}
    assert step(110.0) == {"long": 3}
    assert step(111.0) == {}
    assert step(112.0, force=True) == {"long": 2}
    assert step(121.0) == {}
    assert step(122.0) == {"long": 2}
    assert step(122.5) == {"long": 1}
    assert engine.take_chunks(1000.0, force=True) == ()


def test_stats_count(make_engine: MakeEngine, kit: Any) -> None:
    engine = make_engine(prefill_chunk_tokens=8)
    kit.generate(engine, kit.request("a", kit.tokens(1, 20), new=5))
    stats = engine.stats()
    # Prefill of 8 + 8 + 4, the last of which draws the first token, then four decodes.
    assert (stats.iterations, stats.generated_tokens, stats.computed_prompt_tokens) == (7, 5, 20)
    assert stats.busy_s > 0
    assert stats.version == 0


def test_info(make_engine: MakeEngine, folder: Any) -> None:
    engine = EmbeddedEngine(folder, EngineConfig(max_sequences=3, max_context_tokens=50), epoch=7)
    info = engine.info()
    assert (info.epoch, info.max_context_tokens, info.kv_capacity_tokens) == (7, 50, 150)


def test_idle_engine_does_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.step() is False
    assert engine.take_chunks(0.0, force=True) == ()
    assert engine.stats().iterations == 0


def test_longer_contexts_than_the_model_has_positions_are_refused(make_engine: MakeEngine) -> None:
    with pytest.raises(ConfigError, match=r"engine.max_context_tokens: got 513, want <= 512"):
        make_engine(max_context_tokens=513)


# -- what a slot held before --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["a", "c"], ids=["the same trajectory", "the next one"])
def test_what_a_slot_held_before_is_seen_by_nobody(make_engine: MakeEngine, kit: Any, who: str) -> None:
    """Not even as zero times what is not finite, which weights that have diverged may leave.

    The company makes attention look beyond the sequence's own end, because both chunks are about as long.
    """
    engine, new, long = make_engine(), kit.tokens(2, 20), kit.tokens(3, 79)
    kit.generate(engine, kit.request("b", long[:60], new=1, trajectory="b"))
    kit.generate(engine, kit.request("a", kit.tokens(1, 70), new=2, trajectory="a"))
    slot = engine._table.slot_of(TrajectoryId("a"))
    assert engine._cache is not None
    engine._cache.blocks[:, :, slot, :, 20:71] = np.nan
    if who == "c":
        engine.release(TrajectoryId("a"))
    got = kit.generate(engine, kit.request("c", new, trajectory=who), kit.request("d", long, trajectory="b"))["c"]
    assert engine._table.slot_of(TrajectoryId(who)) == slot
    want = kit.generate(make_engine(), kit.request("c", new))["c"]
    assert (got.error, got.ids) == (None, want.ids)


def test_what_old_weights_computed_is_not_seen_by_what_is_computed_again(
    folder: Path, make_engine: MakeEngine, kit: Any, tmp_path: Path
) -> None:
    """The second of two sequences is cut, and the first one's chunk reaches a little further."""
    engine = make_engine(prefill_chunk_tokens=100)
    first, second = kit.request("d", kit.tokens(1, 50)), kit.request("c", kit.tokens(2, 68))
    engine.submit([first, second])
    for _ in range(3):
        engine.step()
    slot = engine._table.slot_of(second.trajectory)
    assert engine._cache is not None
    engine._cache.blocks[:, :, slot, :, 48:69] = np.nan
    tensors = load_file(folder / "model.safetensors")
    engine.load(kit.publish(tmp_path / "w.safetensors", tensors, 1), LoadMode.RECOMPUTE)
    got = kit.drain(engine)["c"]
    want = kit.generate(make_engine(), second)["c"]
    assert (got.error, got.ids) == (None, want.ids)
