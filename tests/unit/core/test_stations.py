"""What stations take, by hand: iterations of 10 ms, 2 ms per sequence and 1 ms per prompt token; 20 tokens generated per turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.drain import SLICES, Drain
from pearl.core.platform import Platform
from pearl.core.profile import HandOff, IterationTimes
from pearl.core.stations import POINTS, SPARSE, Stations, stations_of
from pearl.core.workload import WorkloadProfile
from tests.platforms import engine_profile, linear_times

FIRST, LATER, MIXED = 0, 1, 2
WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(100),
    new_tokens=Distribution((20.0, 80.0), (0.5, 0.5)),
    generated_tokens=constant(20),
    env_s=constant(3),
    retained=0.5,
    turn_overhead_s=0.2,
)
BOUNDS = np.array([0, 32, 100])
NONE, SHORT, ALL = 0, 1, 2
TIMES = linear_times(0.01, 0.002, 0.001)
HAND_OFF = HandOff(fixed_s=0.5, s_per_byte=0.001)
PLATFORM = Platform(
    by_tp={1: engine_profile(1, TIMES, capacity=500, kv_bytes=4, hand_off=HAND_OFF)}, prefill_chunk_tokens=64
)


def drain(population: float = 8.0) -> Drain:
    """One slice of first turns only, one with a half of them first and a half after two turns, the others after two turns."""
    turns_done, first_share = np.full(SLICES, 2.0), np.zeros(SLICES)
    turns_done[FIRST], turns_done[MIXED] = 0.0, 1.0
    first_share[FIRST], first_share[MIXED] = 1.0, 0.5
    return Drain(
        turns=4.0,
        spread_turns=0.0,
        slice_turns=np.full(SLICES, 4 / SLICES),
        population=np.linspace(population, population / 2, SLICES),
        turns_done=turns_done,
        first_share=first_share,
    )


def stations(work: WorkloadProfile = WORK, platform: Platform = PLATFORM, population: float = 8.0) -> Stations:
    return stations_of(work, platform, drain(population), BOUNDS)


def slices(found: np.ndarray) -> list[float]:
    """Of the first tensor parallelism, at one sequence."""
    at = found[0, :, len(SPARSE)]
    return [float(at[each]) for each in (FIRST, LATER, MIXED)]


def test_the_grid_of_sequences() -> None:
    """A few below one, then by equal factors to as many as are in flight at most."""
    n = stations().n
    assert n.shape == (POINTS,)
    assert n[:8].tolist() == [0.0, 1 / 4096, 1 / 512, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0]
    assert n[-1] == pytest.approx(8)
    assert n[8:] / n[7:-1] == pytest.approx(np.full(POINTS - 8, 8 ** (1 / (POINTS - 8))))


@pytest.mark.parametrize(("most", "population", "want"), [(5, 8.0, 5), (9, 8.0, 8), (8, 1.0, 2), (1, 8.0, 2)])
def test_the_end_of_the_grid(most: int, population: float, want: float) -> None:
    found = stations(platform=replace(PLATFORM, max_sequences=most), population=population)
    assert found.n[-1] == pytest.approx(want)


def test_contexts() -> None:
    """A later turn follows 100 + 2 * (50 + 10) tokens less its own 50 new ones, half of the mixed ones follow nothing.

    Decoding contexts: half of the 20 on top of 100, 170 + 50 and 85 + 75 tokens; of 500 so many fit.
    """
    found = stations()
    assert found.prefix[[FIRST, LATER, MIXED]] == pytest.approx([0, 170, 85])
    assert found.most[0, [FIRST, LATER, MIXED]] == pytest.approx([500 / 110, 500 / 230, 500 / 170])
    assert found.capacity.tolist() == [500.0]


def test_at_least_one_fits_and_a_context_is_never_empty() -> None:
    """One token and half of the 20: 11; two of them fit into 22, and one into 10."""
    empty = replace(WORK, prompt_tokens=constant(0), new_tokens=constant(0), retained=0.0)
    for capacity, want in ((22, 2.0), (10, 1.0)):
        profile = engine_profile(1, TIMES, capacity=capacity)
        found = stations(empty, Platform(by_tp={1: profile}))
        assert found.most[0] == pytest.approx(np.full(SLICES, want))


def test_decoding() -> None:
    """20 iterations of 12 ms for one sequence, of which less than one has its share; of 10 + 2 * 500 / 110 for those that fit."""
    found = stations()
    assert found.per_s[0, FIRST, : len(SPARSE) + 1] == pytest.approx(found.n[: len(SPARSE) + 1] / 0.24)
    assert found.per_s[0, FIRST, -1] == pytest.approx(500 / 110 / (20 * (0.01 + 0.002 * 500 / 110)))


def test_more_sequences_are_never_slower_in_all() -> None:
    """From 8 sequences on a table takes ten times as long: no more of them are run at once."""
    cells = ((0.01,), (0.01,), (0.08,), (0.8,), (0.8,))
    times = IterationTimes(
        prefill_tokens=(0, 64), decoding=(0, 1, 8, 9, 16), context_tokens=(1,), cells_s=(cells, cells)
    )
    found = stations(platform=Platform(by_tp={1: engine_profile(1, times, capacity=4000)}), population=16)
    assert found.n[-1] == 16
    assert found.per_s[0, FIRST, -1] == pytest.approx(1 / (20 * 0.01))


def test_prefill_beside_decoding() -> None:
    """1 ms per token: 100 of a prompt, 50 of a reply."""
    found = stations()
    assert slices(found.beside_s) == pytest.approx([0.1, 0.05, 0.075])
    assert slices(found.beside_token_s) == pytest.approx([0.001] * 3)


def test_prefill_alone() -> None:
    """10 ms more for each chunk of 64. Bound 32: half of the replies, of 20 tokens, are short; the long ones have 80."""
    found = stations()
    places = [FIRST, LATER, MIXED]
    assert found.appended == pytest.approx([0, 0.5, 1])
    assert found.long_s[:, 0][:, places] == pytest.approx(
        np.array([[0.12, 0.06, 0.09], [0.12, 0.05, 0.085], [0.12, 0, 0.06]])
    )
    assert found.short_s[:, 0][:, places] == pytest.approx(np.array([[0, 0, 0], [0, 0.015, 0.0075], [0, 0.06, 0.03]]))
    assert found.long_tokens[:, places] == pytest.approx(np.array([[100, 50, 75], [100, 40, 70], [100, 0, 50]]))
    assert found.short_tokens[:, places] == pytest.approx(np.array([[0, 0, 0], [0, 10, 5], [0, 50, 25]]))
    assert found.prefill_token_s[0] == pytest.approx(np.full(SLICES, 0.074 / 64))


def test_iterations_that_chunks_ride_on() -> None:
    """Of 64: a prompt of 100 rides on 100 / 64, the last of which draws its first token; a reply of 50 on no other.

    Bound 32: half of the replies, of 20; the bound of all: of 50 on average.
    """
    found = stations()
    places = [FIRST, LATER, MIXED]
    assert found.chunk_tokens == 64
    assert found.bare_s[0, FIRST, len(SPARSE)] == pytest.approx(0.012)
    assert found.chunks[places] * 64 == pytest.approx([100, 50, 75])
    assert found.rides[places] * 64 == pytest.approx([36, 0, 18])
    assert found.append_chunks[:, places] * 64 == pytest.approx(np.array([[0, 0, 0], [0, 10, 5], [0, 50, 25]]))
    assert found.append_rides[:, places] == pytest.approx(np.zeros((3, 3)))
    short = stations(platform=replace(PLATFORM, prefill_chunk_tokens=10))
    assert short.append_rides[:, places] == pytest.approx(np.array([[0, 0, 0], [0, 0.5, 0.25], [0, 4, 2]]))


def test_append_prefill() -> None:
    """1 ms for each token of what is short."""
    found = stations().append_s[:, 0, :, len(SPARSE)]
    assert found[NONE] == pytest.approx(np.zeros(SLICES))
    assert found[SHORT][[FIRST, LATER, MIXED]] == pytest.approx([0, 0.01, 0.005])
    assert found[ALL][[FIRST, LATER, MIXED]] == pytest.approx([0, 0.05, 0.025])


@pytest.mark.parametrize(("bound", "share"), [(0, 0.0), (19, 0.25), (20, 0.5), (21, 0.5), (79, 0.5), (80, 1.0)])
def test_bounds_of_append_prefill(bound: int, share: float) -> None:
    """A reply of 0 tokens is short for every bound, but for none."""
    work = replace(WORK, new_tokens=Distribution((0.0, 20.0, 80.0), (0.25, 0.25, 0.5)))
    found = stations_of(work, PLATFORM, drain(), np.array([bound]))
    assert found.appended.tolist() == [pytest.approx(share)]


def test_values_without_weight() -> None:
    work = replace(WORK, new_tokens=Distribution((10.0, 50.0, 70.0), (0.0, 1.0, 0.0)))
    found = stations_of(work, PLATFORM, drain(), np.array([10, 60]))
    assert found.appended == pytest.approx([0, 1])
    assert found.short_tokens[:, LATER] == pytest.approx([0, 50])
    assert found.long_tokens[:, LATER] == pytest.approx([50, 0])


def kinked(slope: float) -> IterationTimes:
    """1 ms for each of the first 64 prompt tokens, `slope` ms for each further one."""
    cells = tuple(
        tuple((0.01 + 0.002 * n + prefill_s,) for n in (0, 512))
        for prefill_s in (0.0, 0.064, 0.064 + 0.001 * slope * 64)
    )
    return IterationTimes(prefill_tokens=(0, 64, 128), decoding=(0, 512), context_tokens=(1,), cells_s=cells)


@pytest.mark.parametrize(("chunk", "prompt_s", "token_s"), [(64, 0.1, 0.001), (128, 0.172, 0.002), (80, 0.14, 0.0014)])
def test_chunks(chunk: int, prompt_s: float, token_s: float) -> None:
    """100 tokens in chunks of 64 ms for 64; at once 64 + 3 * 36 ms; in chunks of 80: 64 + 3 * 16 = 112 ms each."""
    platform = Platform(by_tp={1: engine_profile(1, kinked(3.0))}, prefill_chunk_tokens=chunk)
    found = stations(platform=platform)
    assert slices(found.beside_s)[0] == pytest.approx(prompt_s)
    assert slices(found.beside_token_s)[0] == pytest.approx(token_s)
    assert found.prefill_token_s[0, 0] == pytest.approx((0.01 + token_s * chunk) / chunk)


def test_less_than_a_token() -> None:
    work = replace(WORK, prompt_tokens=constant(0.5), new_tokens=constant(0))
    found = stations(work)
    assert slices(found.beside_s) == pytest.approx([0.0005, 0, 0.00025])
    assert found.long_s[NONE, 0, [FIRST, LATER]] == pytest.approx([0.0105, 0])


def test_prefill_is_never_a_gain() -> None:
    """On a table where prompt tokens make iterations shorter."""
    cells = (((0.01,), (1.034,)), ((0.001,), (0.01,)))
    times = IterationTimes(prefill_tokens=(0, 64), decoding=(0, 512), context_tokens=(1,), cells_s=cells)
    found = stations(platform=Platform(by_tp={1: engine_profile(1, times)}, prefill_chunk_tokens=64))
    assert slices(found.beside_s) == [0.0, 0.0, 0.0]


def test_iterations_take_some_time() -> None:
    found = stations(platform=Platform(by_tp={1: engine_profile(1, linear_times(0.0, 0.0, 0.0))}))
    assert found.per_s[..., -1] == pytest.approx(found.most / 20e-9)
    assert found.beside_s == pytest.approx(np.zeros((1, SLICES, POINTS)))


def test_away_from_the_engines() -> None:
    """A wait of 3 s and 0.2 s of overhead in each turn, the last one too."""
    assert stations().apart_s == pytest.approx(3.2)


def test_hand_offs() -> None:
    found = stations()
    assert (found.hand_off_s.tolist(), found.hand_off_token_s.tolist()) == ([0.5], [pytest.approx(0.004)])


def test_generated_tokens_that_a_prefill_worker_lacks() -> None:
    assert stations().lost_tokens == 0.0
    assert stations(platform=replace(PLATFORM, readback=False)).lost_tokens == 10.0


def test_each_tensor_parallelism_has_its_own() -> None:
    """In ascending order, with their scales."""
    four = engine_profile(4, linear_times(0.01, 0.002, 0.002), capacity=900, kv_bytes=2, hand_off=None)
    platform = replace(PLATFORM, by_tp={4: four, 1: PLATFORM.by_tp[1]}, time_scale={4: 3.0})
    found = stations(platform=platform)
    place = len(SPARSE)
    assert found.capacity.tolist() == [500, 900]
    assert 1 / found.per_s[:, FIRST, place] == pytest.approx([0.24, 0.72])
    assert found.beside_s[:, FIRST, place] == pytest.approx([0.1, 0.6])
    assert found.beside_token_s[:, FIRST, place] == pytest.approx([0.001, 0.006])
    assert found.append_s[ALL, :, LATER, place] == pytest.approx([0.05, 0.3])
    assert found.long_s[NONE, :, FIRST] == pytest.approx([0.12, 3 * 0.22])
    assert found.short_s[ALL, :, LATER] == pytest.approx([0.06, 3 * 0.11])
    assert found.prefill_token_s[:, FIRST] == pytest.approx([0.074 / 64, 3 * 0.138 / 64])
    assert found.most[:, LATER] == pytest.approx([500 / 230, 900 / 230])
    assert found.hand_off_s.tolist() == [0.5, 0.0]
    assert found.hand_off_token_s.tolist() == [pytest.approx(0.004), 0.0]


def test_times_at_the_context_of_the_slice() -> None:
    """At 8K a sequence costs a quarter more; decoding is at 230, of prefill alone the table says nothing."""
    profile = engine_profile(1, linear_times(0.01, 0.002, 0.001, contexts=(1, 8192)))
    found = stations(platform=Platform(by_tp={1: profile}))
    at = len(SPARSE)
    assert 1 / found.per_s[0, LATER, at] == pytest.approx(20 * (0.01 + 0.002 * (1 + 230 / 32768)))
    assert 1 / found.per_s[0, FIRST, at] == pytest.approx(20 * (0.01 + 0.002 * (1 + 110 / 32768)))


def test_prefill_alone_at_its_context() -> None:
    """A token takes 1 us more per token of context: 170 + 50."""
    cells = tuple(tuple(tuple(0.01 + p * (0.001 + 1e-6 * c) for c in (1, 1001)) for _ in (0, 1)) for p in (0, 64))
    times = IterationTimes(prefill_tokens=(0, 64), decoding=(0, 1), context_tokens=(1, 1001), cells_s=cells)
    found = stations(platform=Platform(by_tp={1: engine_profile(1, times)}))
    assert found.long_s[NONE, 0, LATER] == pytest.approx(0.01 + 50 * 0.00122)
