"""What the stations of the fluid network take per turn, by tensor parallelism, along a drain.

Shapes: T tensor parallelisms, K slices of the drain, G points of sequences per worker, U bounds of append-prefill.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pearl.core.distribution import Distribution, Floats
from pearl.core.drain import SLICES, Drain
from pearl.core.lookup import Beside, table_of
from pearl.core.makespan import Ints
from pearl.core.platform import Platform
from pearl.core.workload import WorkloadProfile

SPARSE = (0.0, 1 / 4096, 1 / 512, 1 / 64, 1 / 16, 1 / 4, 1 / 2)
"""Sequences per worker, mean, where there are fewer trajectories than workers."""
POINTS = 33
"""G, a power of two and 1. Numbers of sequences per worker on the grid: the sparse ones, then from 1 to the most, each larger
than the last by the same factor."""
INSTANT_S = 1e-9
"""An iteration takes no less, even where a table says 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stations:
    """Times and tokens as arrays."""

    n: Floats
    """Sequences per worker, shape `[G]`."""
    most: Floats
    """Sequences that run at once: those whose KV fits, shape `[T, K]`."""
    per_s: Floats
    """Turns per second of a worker that only decodes, shape `[T, K, G]`. They rise with n: where more sequences would make fewer
    turns, a worker is taken not to run more."""
    bare_s: Floats
    """An iteration that only decodes, shape `[T, K, G]`."""
    beside_s: Floats
    """What a turn's new tokens add to the decode iterations that they share, shape `[T, K, G]`."""
    beside_token_s: Floats
    """The same for a token of a full chunk, shape `[T, K, G]`."""
    chunks: Floats
    """Chunks that a turn's new tokens fill, shape `[K]`: an iteration has one, of one turn or of several."""
    rides: Floats
    """Iterations that compute a turn's new tokens, but for the last one, which draws its first token, shape `[K]`."""
    chunk_tokens: float
    append_s: Floats
    """What append-prefill adds to decode iterations, per turn, shape `[U, T, K, G]`."""
    append_chunks: Floats
    """As `chunks`, shape `[U, K]`."""
    append_rides: Floats
    """As `rides`, shape `[U, K]`."""
    long_s: Floats
    """Prefill that goes to prefill workers always, per turn, each in iterations of its own, shape `[U, T, K]`."""
    short_s: Floats
    """Prefill that goes there only when a decode worker has lost the prefix, shape `[U, T, K]`."""
    long_tokens: Floats
    """Shape `[U, K]`."""
    short_tokens: Floats
    """Shape `[U, K]`."""
    appended: Floats
    """Share of later turns short enough for append-prefill, shape `[U]`."""
    prefill_token_s: Floats
    """Prefill of a token of a full chunk by itself, shape `[T, K]`."""
    prefix: Floats
    """Tokens of earlier turns in a context, mean, shape `[K]`."""
    lost_tokens: float
    """Generated in the last turn, and not in a prefill worker's cache."""
    capacity: Floats
    """KV of a worker in tokens, shape `[T]`."""
    apart_s: float
    """Away from the engines per turn; the environment answers the last turn too, be it with the end."""
    hand_off_s: Floats
    """Per hand-off, shape `[T]`; 0 where it was not measured."""
    hand_off_token_s: Floats
    """Per token moved, shape `[T]`."""


def stations_of(workload: WorkloadProfile, platform: Platform, drain: Drain, bounds: Ints) -> Stations:
    """The stations along a drain, for each bound of append-prefill in tokens, 0 for none."""
    prompt, new, generated = workload.prompt_tokens.mean, workload.new_tokens.mean, workload.generated_tokens.mean
    first = drain.first_share
    # Nothing before the first turn; from the second on, all but what is new.
    prefix = (1 - first) * (prompt - new) + drain.turns_done * workload.growth_tokens
    context = prefix + first * prompt + (1 - first) * new
    parts = [_parted(workload.new_tokens, float(bound)) for bound in bounds]
    appended, short, long = (np.array(side) for side in zip(*parts, strict=True))
    shares = appended[:, None] * (1 - first)
    times = _Times(platform, drain, context, generated)
    chunk = float(platform.prefill_chunk_tokens)
    beside = times.beside(np.array([prompt, new, chunk, *short]))
    rides = np.maximum(np.array([prompt, new, *short]) / chunk - 1.0, 0.0)
    alone = times.alone(np.array([prompt, chunk, *long, *short]))
    longs, shorts = alone[2 : 2 + len(long)], alone[2 + len(long) :]
    ends = [platform.by_tp[tp].hand_off for tp in platform.tps]
    kv_bytes = [platform.by_tp[tp].kv_bytes_per_token for tp in platform.tps]
    return Stations(
        n=times.n,
        most=times.running[..., -1],
        per_s=times.per_s,
        bare_s=times.bare,
        beside_s=first[:, None] * beside[0] + (1 - first)[:, None] * beside[1],
        beside_token_s=beside[2] / chunk,
        chunks=(first * prompt + (1 - first) * new) / chunk,
        rides=first * rides[0] + (1 - first) * rides[1],
        chunk_tokens=chunk,
        append_s=shares[:, None, :, None] * beside[3:],
        append_chunks=shares * short[:, None] / chunk,
        append_rides=shares * rides[2:, None],
        long_s=first * alone[0] + (1 - first - shares)[:, None] * longs,
        short_s=shares[:, None] * shorts,
        long_tokens=first * prompt + ((1 - first) - shares) * long[:, None],
        short_tokens=shares * short[:, None],
        appended=appended,
        prefill_token_s=alone[1] / chunk,
        prefix=prefix,
        lost_tokens=0.0 if platform.readback else workload.retained * generated,
        capacity=times.capacity,
        apart_s=workload.env_s.mean + workload.turn_overhead_s,
        hand_off_s=np.array([end.fixed_s if end else 0.0 for end in ends]),
        hand_off_token_s=np.array(
            [end.s_per_byte * size if end else 0.0 for end, size in zip(ends, kv_bytes, strict=True)]
        ),
    )


class _Times:
    """Iteration times at the contexts of a drain."""

    def __init__(self, platform: Platform, drain: Drain, context: Floats, generated: float) -> None:
        self._chunk = float(platform.prefill_chunk_tokens)
        context = np.maximum(context, 1.0)
        decoding = context + generated / 2
        self.capacity = np.array([float(platform.by_tp[tp].kv_capacity_tokens) for tp in platform.tps])
        most = max(2.0, min(float(platform.max_sequences), float(drain.population.max())))
        self.n = np.concatenate((SPARSE, np.geomspace(1.0, most, POINTS - len(SPARSE))))
        fits = np.maximum(self.capacity[:, None] / decoding, 1.0)
        self.running = np.minimum(self.n, fits[..., None])
        """Of n those whose KV fits, shape `[T, K, G]`."""
        busy = np.maximum(self.running, 1.0)  # a worker with half a sequence has one for half of the time
        nobody = np.zeros((SLICES, 1))
        tables = [table_of(platform.by_tp[tp].iterations) for tp in platform.tps]
        self._scales = [platform.scale(tp) for tp in platform.tps]
        self._busy = [table.at(busy[place], decoding) for place, table in enumerate(tables)]
        self._idle = [table.at(nobody, context) for table in tables]
        self.bare = np.maximum(self._seconds(self._busy, np.zeros(1))[0], INSTANT_S)
        """Iterations that only decode, shape `[T, K, G]`."""
        self.per_s = np.maximum.accumulate(self.running / (generated * self.bare), axis=-1)

    def beside(self, tokens: Floats) -> Floats:
        """What prompt tokens of a turn add to decode iterations, chunk after chunk; shape `[tokens, T, K, G]`."""
        chunks = np.minimum(np.maximum(tokens, 1.0), self._chunk)
        added = np.maximum(self._seconds(self._busy, chunks) - self.bare, 0.0)
        return np.asarray(added * (tokens / chunks)[:, None, None, None], dtype=np.float64)

    def alone(self, tokens: Floats) -> Floats:
        """Prefill of a turn in iterations of its own, chunk after chunk, shape `[tokens, T, K]`."""
        full = np.floor(tokens / self._chunk)
        taken = self._seconds(self._idle, np.append(tokens - full * self._chunk, self._chunk))[..., 0]
        return np.asarray(full[:, None, None] * taken[-1] + taken[:-1], dtype=np.float64)

    def _seconds(self, tables: Sequence[Beside], tokens: Floats) -> Floats:
        """Shape `[tokens, T, K, ...]`."""
        scaled = [table.seconds(tokens) * scale for table, scale in zip(tables, self._scales, strict=True)]
        return np.stack(scaled, axis=1)


def _parted(new_tokens: Distribution, bound: float) -> tuple[float, float, float]:
    """Share of turns with at most `bound` new tokens (none for a bound of 0), their mean, and the mean of the others."""
    pairs = list(zip(new_tokens.values, new_tokens.weights, strict=True))
    short = [pair for pair in pairs if pair[0] <= bound] if bound > 0 else []
    long = pairs[len(short) :]
    share = math.fsum(weight for _, weight in short)
    return share, _mean(short), _mean(long)


def _mean(pairs: Sequence[tuple[float, float]]) -> float:
    mass = math.fsum(weight for _, weight in pairs)
    return math.fsum(value * weight for value, weight in pairs) / mass if mass > 0 else 0.0
