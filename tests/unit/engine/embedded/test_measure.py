"""What a profile measures in one process, on a clock that only the work moves."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.measure import (
    GridSpec,
    device_name,
    free_model,
    grid_spec,
    kv_budget_bytes,
    kv_bytes_per_token,
    measure_iterations,
    measure_states,
    read_model,
    synthetic_batch,
)
from pearl.engine.embedded.model import Model
from pearl.errors import ConfigError, ModelError, WeightsError

SPEC = GridSpec(prefill_tokens=(0, 6, 40), decoding=(0, 1, 5), context_tokens=(8, 32), passes=5)


@pytest.fixture
def model(folder: Path) -> Model:
    return read_model(folder, EngineConfig(device="cpu"))


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def seconds_of(batch: Batch) -> float:
    """Different for every cell, found from the batch alone."""
    decoding = batch.counts == 1
    return 1e4 * batch.counts[~decoding].sum() + 100 * decoding.sum() + float((batch.starts + batch.counts).max())


class TestSyntheticBatch:
    @pytest.mark.parametrize(
        ("cell", "want"),
        [
            ((0, 3, 8), [(7, 1)] * 3),
            ((6, 0, 8), [(2, 6)]),
            ((8, 0, 8), [(0, 8)]),
            ((20, 0, 8), [(4, 4), (0, 8), (0, 8)]),
            ((20, 2, 8), [(7, 1), (7, 1), (4, 4), (0, 8), (0, 8)]),
        ],
    )
    def test_sequences(self, cell: tuple[int, int, int], want: list[tuple[int, int]]) -> None:
        batch = synthetic_batch(*cell)
        assert list(zip(batch.starts.tolist(), batch.counts.tolist(), strict=True)) == want
        assert len(set(batch.slots.tolist())) == len(want)


class TestGrid:
    def test_full(self) -> None:
        spec = grid_spec(1024, 6, quick=False)
        assert spec.prefill_tokens == (0, 8, 32, 128, 512, 2048)
        assert spec.decoding == (0, 1, 2, 4, 6)
        assert spec.context_tokens == (64, 256, 512, 1024)

    def test_quick(self) -> None:
        spec = grid_spec(1024, 64, quick=True)
        assert (spec.prefill_tokens, spec.decoding, spec.context_tokens) == ((0, 512), (0, 1, 64), (128, 1024))

    def test_no_more_prefill_than_all_sequences_hold(self) -> None:
        assert grid_spec(50, 2, quick=False).prefill_tokens == (0, 8, 32, 100)
        assert grid_spec(50, 2, quick=True).prefill_tokens == (0, 100)

    @pytest.mark.parametrize("quick", [True, False])
    def test_the_smallest(self, quick: bool) -> None:
        spec = grid_spec(2, 1, quick=quick)
        assert (spec.prefill_tokens, spec.decoding, spec.context_tokens) == ((0, 2), (0, 1), (1, 2))

    def test_slots_hold_every_cell(self) -> None:
        most = max(len(synthetic_batch(*cell).slots) for cell in SPEC.cells)
        assert SPEC.slots == most == 5 + 5


class TestIterations:
    def test_every_cell_gets_its_median(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        clock, noise, seen = Clock(), random.Random(1), []

        def forward(_: Model, cache: KvCache, batch: Batch, token_ids: Ints, wanted: Ints) -> torch.Tensor:
            seen.append(seconds_of(batch))
            assert len(token_ids) == batch.counts.sum()
            # Two of five values and the warm-up are far off: medians do not show it.
            passed = (len(seen) - 1) // 16
            clock.now_s += seconds_of(batch) * (noise.uniform(10, 99) if passed in (0, 2, 5) else 1)
            return torch.zeros(len(wanted), model.architecture.vocabulary)

        monkeypatch.setattr(Model, "forward", forward)
        said: list[str] = []
        times = measure_iterations(model, SPEC, tell=said.append, clock=clock)
        assert (times.prefill_tokens, times.decoding, times.context_tokens) == ((0, 6, 40), (0, 1, 5), (8, 32))
        for p, prefill in enumerate(times.prefill_tokens):
            for d, decoding in enumerate(times.decoding):
                for c, context in enumerate(times.context_tokens):
                    # A batch of nothing has no time of its own; the smallest stands in.
                    want = 1e4 * prefill + 100 * decoding + context if prefill or decoding else 108
                    assert times.cells_s[p][d][c] == pytest.approx(want)
        assert [text.split(":")[0] for text in said] == ["warm-up", *(f"pass {n} of 5" for n in range(1, 6))]
        assert said[1].startswith("pass 1 of 5: 16 cells, ")

    def test_cells_take_turns(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each pass holds every cell once, in an order of its own."""
        seen: list[float] = []
        clock = Clock()

        def forward(_: Model, cache: KvCache, batch: Batch, token_ids: Ints, wanted: Ints) -> torch.Tensor:
            seen.append(seconds_of(batch))
            clock.now_s += 1
            return torch.zeros(len(wanted), model.architecture.vocabulary)

        monkeypatch.setattr(Model, "forward", forward)
        measure_iterations(model, SPEC, clock=clock)
        passes = [tuple(seen[start : start + 16]) for start in range(0, len(seen), 16)]
        assert len(passes) == 6
        assert len(set(passes)) == 6
        assert {tuple(sorted(one)) for one in passes} == {tuple(sorted(set(seen)))}

    def test_short_iterations_run_several_times_a_visit_and_the_fastest_counts(
        self, model: Model, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        spec = GridSpec(prefill_tokens=(0, 2), decoding=(0, 1), context_tokens=(2,), passes=3)
        clock, runs = Clock(), {(0, 1): 0, (1, 0): 0, (1, 1): 0}
        # Five short ones a visit; three until 30 ms are over; one that is longer by itself.
        costs = {(0, 1): [0.005, 0.004, 0.001, 0.002, 0.003], (1, 0): [0.02, 0.005, 0.006], (1, 1): [0.5]}

        def forward(_: Model, cache: KvCache, batch: Batch, token_ids: Ints, wanted: Ints) -> torch.Tensor:
            cell = (int((batch.counts > 1).any()), int((batch.counts == 1).sum()))
            clock.now_s += costs[cell][runs[cell] % len(costs[cell])]
            runs[cell] += 1
            return torch.zeros(len(wanted), model.architecture.vocabulary)

        monkeypatch.setattr(Model, "forward", forward)
        times = measure_iterations(model, spec, clock=clock)
        assert times.cells_s == (((0.001,), (0.001,)), ((0.005,), (0.5,)))
        assert runs == {(0, 1): 20, (1, 0): 12, (1, 1): 4}

    def test_the_real_model_runs_every_cell(self, model: Model) -> None:
        times = measure_iterations(model, SPEC)
        assert all(seconds > 0 for plane in times.cells_s for row in plane for seconds in row)

    def test_too_much_kv_is_named(self, model: Model) -> None:
        spec = GridSpec(prefill_tokens=(0, 2), decoding=(0, 1 << 30), context_tokens=(1 << 20,), passes=1)
        with pytest.raises(ConfigError, match=r"of KV for the largest cell.* want a smaller --max-sequences"):
            measure_iterations(model, spec)

    def test_other_faults_are_not_hidden(self, model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
        def forward(*_: object) -> torch.Tensor:
            raise RuntimeError("shapes differ")

        monkeypatch.setattr(Model, "forward", forward)
        with pytest.raises(RuntimeError, match="shapes differ"):
            measure_iterations(model, SPEC)


class TestStates:
    def test_medians(
        self, model: Model, folder: Path, tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from pearl.engine.embedded.engine import EmbeddedEngine

        clock, calls = Clock(), []
        costs = {
            "load": iter([9.0, 2.0, 3.0, 1.0, 4.0, 2.5]),
            "sleep": iter([5.0, 50.0, 0.5]),
            "wake": iter([7.0, 6.0, 70.0]),
        }

        def costing(name: str) -> Callable[..., Any]:
            real = getattr(EmbeddedEngine, name)

            def method(engine: EmbeddedEngine, *arguments: Any) -> Any:
                clock.now_s += next(costs[name])
                calls.append(name)
                return real(engine, *arguments)

            return method

        for name in costs:
            monkeypatch.setattr(EmbeddedEngine, name, costing(name))
        manifest = kit.publish(tmp_path / "w.safetensors", load_file(folder / "model.safetensors"), 1)
        config = EngineConfig(max_sequences=2, max_context_tokens=16)
        times = measure_states(model, config, manifest, 3, clock)
        assert (times.weight_load_s, times.sleep_s, times.wake_s) == (2.75, 5, 7)
        assert calls == ["load", "sleep", "wake", "load"] * 3

    def test_weights_of_another_model_are_refused(self, model: Model, tmp_path: Path, kit: Any) -> None:
        manifest = kit.publish(tmp_path / "w.safetensors", {"x": torch.zeros(2)}, 1)
        with pytest.raises(WeightsError, match="model_hash"):
            measure_states(model, EngineConfig(max_sequences=2, max_context_tokens=16), manifest, 1)


def test_kv_of_a_token_is_what_the_cache_takes(model: Model) -> None:
    cache = KvCache(model.architecture, 3, 7, model.place)
    assert kv_bytes_per_token(model) * 3 * 7 == cache.size_bytes


def test_bfloat16_halves_it(folder: Path, model: Model) -> None:
    half = read_model(folder, EngineConfig(device="cpu", dtype="bfloat16"))
    assert 2 * kv_bytes_per_token(half) == kv_bytes_per_token(model)


def test_on_a_cpu_the_budget_is_what_was_asked_for(model: Model) -> None:
    assert (kv_budget_bytes(model, 0), kv_budget_bytes(model, 123)) == (0, 123)


def test_the_name_of_a_cpu_has_its_threads(model: Model) -> None:
    assert device_name(model, "cpu x") == "cpu x, 1 thread"


def test_a_freed_model_has_no_weights(model: Model) -> None:
    free_model(model)
    assert model.weights is None


def test_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        read_model(tmp_path / "none", EngineConfig())
