"""What a platform profile measures inside one process: iterations over a grid, weight load, sleep and wake.

Iterations run through `Model.forward` and `draw` on synthetic batches, so nothing of scheduling is in them. The grid is
measured pass by pass, every cell visited once per pass in an order drawn anew: a noisy minute then touches all cells a
little and the medians of none much. Short iterations run several times a visit and the fastest counts, because what else
the machine does only ever adds to them. The first pass warms up and does not count.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from pearl.config.engine import EngineConfig
from pearl.core.profile import Axis, IterationTimes
from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.model import Model
from pearl.engine.embedded.sampling import draw
from pearl.engine.embedded.weights import Place, release_memory
from pearl.errors import ConfigError
from pearl.records.training import LoadMode, Manifest
from pearl.units import format_bytes

MAX_PREFILL_TOKENS = 2048
"""Largest chunk in the grid: engines cut longer ones."""
GPU_KV_SHARE = 0.9
"""Of the memory that is free beside the weights; the rest is for activations."""
VISIT_S = 0.03
"""A visit to a cell repeats its iteration for this long."""
VISIT_VALUES = 5
"""And not more often than this."""
DECIMALS = 9
"""Of seconds: no clock here is finer."""
SEED = 20260301
"""Of the order of cells."""

Clock = Callable[[], float]
Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSpec:
    """Points to measure, and how often."""

    prefill_tokens: Axis
    decoding: Axis
    context_tokens: Axis
    passes: int
    """Values per cell, >= 1; the warm-up not counted."""

    @property
    def cells(self) -> Iterator[tuple[int, int, int]]:
        """Every cell `(prefill tokens, decoding sequences, context tokens)` that has something to compute."""
        for prefill in self.prefill_tokens:
            for decoding in self.decoding:
                for context in self.context_tokens:
                    if prefill or decoding:
                        yield prefill, decoding, context

    @property
    def slots(self) -> int:
        """Sequences in the largest cell."""
        return self.decoding[-1] + -(-self.prefill_tokens[-1] // self.context_tokens[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTimes:
    """Medians of changes of an engine's state."""

    weight_load_s: float
    sleep_s: float
    wake_s: float


def read_model(folder: Path, config: EngineConfig) -> Model:
    """The model as an engine would have it; sets torch's thread count for the calling thread.

    Raises:
        ModelError: the folder does not hold a supported checkpoint.
        ConfigError: there is no such device.
    """
    torch.set_num_threads(config.threads)
    return Model.read(folder, Place.of(config.device, config.dtype))


def free_model(model: Model) -> None:
    """Free weights and what torch keeps of freed memory, for other processes."""
    model.unload()
    release_memory(model.place.device)


def grid_spec(max_context_tokens: int, max_sequences: int, *, quick: bool) -> GridSpec:
    """The grid up to a longest context and a largest batch; `quick` is coarse and takes few values."""
    most = min(MAX_PREFILL_TOKENS, max_context_tokens * max_sequences)
    prefill = (512,) if quick else (8, 32, 128, 512, 2048)
    decoding = (1,) if quick else tuple(2**n for n in range(20))
    parts = (8, 1) if quick else (16, 4, 2, 1)
    return GridSpec(
        prefill_tokens=_axis(0, *(tokens for tokens in prefill if tokens < most), min(prefill[-1], most)),
        decoding=_axis(0, *(count for count in decoding if count < max_sequences), max_sequences),
        context_tokens=_axis(*(max(1, max_context_tokens // part) for part in parts)),
        passes=3 if quick else 5,
    )


def synthetic_batch(prefill_tokens: int, decoding: int, context_tokens: int) -> Batch:
    """Sequences that are all `context_tokens` long afterwards; prefill is as few of them as can take its tokens."""
    whole, rest = divmod(prefill_tokens, context_tokens)
    counts = np.array([1] * decoding + [context_tokens] * whole + [rest] * (rest > 0), dtype=np.int64)
    return Batch.of(np.arange(len(counts), dtype=np.int64), context_tokens - counts, counts)


def measure_iterations(
    model: Model, spec: GridSpec, *, tell: Tell = lambda _: None, clock: Clock = time.perf_counter
) -> IterationTimes:
    """Median time of an iteration in every cell; `tell` hears of every pass.

    Raises:
        ConfigError: the KV of the largest cell does not fit into memory.
    """
    tokens = spec.slots * spec.context_tokens[-1]
    with _out_of_memory(tokens * kv_bytes_per_token(model)):
        cache = KvCache(model.architecture, spec.slots, spec.context_tokens[-1], model.place)
        medians = _medians(model, cache, spec, tell, clock)
    # What an iteration costs before its first token is not to be had without one; a single token comes closest.
    fixed_s = medians[0, spec.decoding[1], spec.context_tokens[0]]
    return IterationTimes(
        prefill_tokens=spec.prefill_tokens,
        decoding=spec.decoding,
        context_tokens=spec.context_tokens,
        cells_s=tuple(
            tuple(tuple(medians.get((p, d, c), fixed_s) for c in spec.context_tokens) for d in spec.decoding)
            for p in spec.prefill_tokens
        ),
    )


def measure_states(
    model: Model, config: EngineConfig, manifest: Manifest, repeats: int, clock: Clock = time.perf_counter
) -> StateTimes:
    """Load a published version, sleep, wake and load again, several times over; the model keeps the last load.

    Raises:
        WeightsError: the manifest is not of this model.
    """
    engine = EmbeddedEngine(model, config)
    load, sleep, wake = [], [], []
    for _ in range(repeats):
        load.append(_timed(model, clock, lambda: engine.load(manifest, LoadMode.RECOMPUTE)))
        sleep.append(_timed(model, clock, engine.sleep))
        wake.append(_timed(model, clock, engine.wake))
        load.append(_timed(model, clock, lambda: engine.load(manifest, LoadMode.RECOMPUTE)))
    return StateTimes(
        weight_load_s=round(statistics.median(load), DECIMALS),
        sleep_s=round(statistics.median(sleep), DECIMALS),
        wake_s=round(statistics.median(wake), DECIMALS),
    )


def kv_bytes_per_token(model: Model) -> int:
    """KV of one token, in bytes."""
    return model.architecture.kv_elements * model.place.dtype.itemsize


def kv_budget_bytes(model: Model, asked_bytes: int) -> int:
    """Memory for KV: what was asked for, or on a GPU most of what is free; call it before KV takes any."""
    device = model.place.device
    if asked_bytes or device.type != "cuda":
        return asked_bytes
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * GPU_KV_SHARE)


def device_name(model: Model, machine: str) -> str:
    """Name of the device for people; `machine` names the processor."""
    device = model.place.device
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{machine}, {threads} {'thread' if threads == 1 else 'threads'}"


def _medians(
    model: Model, cache: KvCache, spec: GridSpec, tell: Tell, clock: Clock
) -> dict[tuple[int, int, int], float]:
    cells, order = list(spec.cells), random.Random(SEED)
    values: dict[tuple[int, int, int], list[float]] = {cell: [] for cell in cells}
    began_s = clock()
    for number in range(spec.passes + 1):
        for cell in order.sample(cells, len(cells)):
            seconds = _visit(model, cache, synthetic_batch(*cell), clock)
            if number:
                values[cell].append(seconds)
        kind = f"pass {number} of {spec.passes}" if number else "warm-up"
        tell(f"{kind}: {len(cells)} cells, {clock() - began_s:.1f} s so far")
    return {cell: round(statistics.median(taken), DECIMALS) for cell, taken in values.items()}


def _axis(*points: int) -> Axis:
    return tuple(sorted(set(points)))


@contextmanager
def _out_of_memory(size_bytes: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
            raise
        raise ConfigError(
            f"profile: {format_bytes(size_bytes)} of KV for the largest cell, and what it computes, do not fit into memory; "
            "want a smaller --max-sequences or --max-context"
        ) from error


def _visit(model: Model, cache: KvCache, batch: Batch, clock: Clock) -> float:
    values: list[float] = []
    while len(values) < VISIT_VALUES and sum(values) < VISIT_S:
        values.append(_iteration(model, cache, batch, clock))
    return min(values)


def _iteration(model: Model, cache: KvCache, batch: Batch, clock: Clock) -> float:
    """One iteration as the engine does it: forward, and a token for every sequence."""
    tokens: Ints = np.arange(len(batch.token_slots), dtype=np.int64) % model.architecture.vocabulary
    ones, halves = np.ones(len(batch.slots)), np.full(len(batch.slots), 0.5)
    return _timed(model, clock, lambda: draw(model.forward(cache, batch, tokens, batch.lasts), ones, halves))


def _timed(model: Model, clock: Clock, work: Callable[[], object]) -> float:
    device = model.place.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began_s = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return clock() - began_s
