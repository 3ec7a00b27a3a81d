"""The paper's equations by hand, and the predictor around them.

The batch of most tests: B = 64 trajectories of S = 10 turns; dL = 100 new and r = 50 generated tokens, 3 s of environment per
turn; theta = 0.25. Workers: A = 10 ms, b = 2 ms, t_prefill = 1 ms.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, astuple, replace
from typing import Any

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.makespan import Candidates, Infeasible, Predictions, Predictor, Profile, Target, candidates_of
from pearl.core.paper_model import (
    ERROR,
    Batch,
    PaperPredictor,
    WorkerCosts,
    batch_of,
    coloc_s,
    costs_along,
    costs_by_tp,
    decode_line,
    decode_s,
    prefill_s,
    prefill_token_s,
    slowest_turns,
)
from pearl.core.platform import Platform
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.progress import Progress
from pearl.core.shape import Pool, Shape, parse_shape
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile

BATCH = Batch(
    trajectories=64,
    turns=10,
    new_tokens=100,
    generated_tokens=50,
    overhead_s=0.5,
    env_s=30,
    theta=0.25,
    context_tokens=800,
    final_tokens=1500,
)


def line(fixed_s: float, per_sequence_s: float, token_s: float) -> IterationTimes:
    """Iterations as the paper has them; prefilling 100 tokens alone takes 100 t_prefill."""
    prefill_100_s, decode_100_s = 100 * token_s, fixed_s + 100 * per_sequence_s
    return IterationTimes(
        prefill_tokens=(0, 100),
        decoding=(0, 100),
        context_tokens=(1,),
        cells_s=(((fixed_s,), (decode_100_s,)), ((prefill_100_s,), (prefill_100_s + decode_100_s,))),
    )


def worker(
    tp: int = 1, *, times: IterationTimes | None = None, capacity: int = 24_000, s_per_byte: float | None = None
) -> PlatformProfile:
    return PlatformProfile(
        model="m",
        model_hash="h",
        device="d",
        dtype="bfloat16",
        tp=tp,
        iterations=times or line(0.01, 0.002, 0.001),
        kv_capacity_tokens=capacity,
        kv_bytes_per_token=1000,
        # 7 s of fixed time is not the paper's and must not be seen anywhere.
        hand_off=None if s_per_byte is None else HandOff(fixed_s=7.0, s_per_byte=s_per_byte),
        weight_load_s=1,
        sleep_s=1,
        wake_s=1,
        engine_start_s=None,
    )


def workload(**changes: Any) -> WorkloadProfile:
    usual = WorkloadProfile(
        turns=constant(10),
        prompt_tokens=constant(100),
        new_tokens=constant(100),
        generated_tokens=constant(50),
        env_s=constant(3),
        turn_overhead_s=0.5,
        theta=0.25,
    )
    return replace(usual, **changes)


def progress(unfinished: int = 64, batch: int = 64) -> Progress:
    return Progress(batch_trajectories=batch, unfinished=unfinished, live_groups=4, needed_groups=4)


def predict(
    *shapes: str, platform: Platform | None = None, left: Progress | None = None, **changes: Any
) -> Predictions:
    candidates = candidates_of([Target(shape=parse_shape(shape)) for shape in shapes])
    profile = Profile(workload=workload(**changes), platform=platform or Platform(by_tp={1: worker()}))
    return PaperPredictor().forecast(profile, left or progress())(candidates)


# -- the equations --------------------------------------------------------------------------------------------------


def test_equation_1() -> None:
    # 8 sequences per worker: prefill 8 x 100 x 1 ms = 0.8 s; decode 50 x (10 + 2 x 8) ms = 1.3 s; 0.5 s beside them.
    # 10 turns x 2.6 s + 30 s.
    assert coloc_s(BATCH, workers=8.0, token_s=0.001, fixed_s=0.01, per_sequence_s=0.002) == pytest.approx(56)


def test_equation_2_shares_the_batch_over_fewer_decoding_and_stretches_each_iteration() -> None:
    # 64 / (4 x 1.25) = 12.8 sequences: 10 + 2 x 12.8 = 35.6 ms; 500 iterations 17.8 s; x 1.25.
    assert decode_s(BATCH, workers=4.0, fixed_s=0.01, per_sequence_s=0.002) == pytest.approx(22.25)


def test_equation_2_without_bubbles() -> None:
    # 16 sequences: 10 + 32 = 42 ms x 500.
    still = replace(BATCH, theta=0.0)
    assert decode_s(still, workers=4.0, fixed_s=0.01, per_sequence_s=0.002) == pytest.approx(21)


def test_equation_3_does_not_share_the_transfer() -> None:
    # 6,400 tokens a turn: over 4 workers 1.6 s; at 0.1 ms each between the pools 0.64 s; x 10 turns.
    assert prefill_s(BATCH, workers=4.0, token_s=0.001, transfer_s=0.0001) == pytest.approx(22.4)
    assert prefill_s(BATCH, workers=8.0, token_s=0.001, transfer_s=0.0001) == pytest.approx(14.4)


def test_equations_take_arrays() -> None:
    one = np.ones(2)
    workers = np.array([8.0, 4.0])
    # 4 workers: 16 sequences; 1.6 + 50 x (10 + 32) ms + 0.5 = 4.2 s a turn.
    colocated = coloc_s(BATCH, workers=workers, token_s=0.001 * one, fixed_s=0.01 * one, per_sequence_s=0.002 * one)
    assert colocated == pytest.approx([56, 72])
    # 8 workers: 6.4 sequences, 22.8 ms, 11.4 s, x 1.25.
    decoding = decode_s(BATCH, workers=workers, fixed_s=0.01 * one, per_sequence_s=0.002 * one)
    assert decoding == pytest.approx([14.25, 22.25])
    prefilling = prefill_s(BATCH, workers=workers, token_s=0.001 * one, transfer_s=0.0001 * one)
    assert prefilling == pytest.approx([14.4, 22.4])


def test_records_are_fixed_and_named() -> None:
    costs = WorkerCosts(fixed_s=1.0, per_sequence_s=1.0, token_s=1.0, transfer_s=1.0, capacity_tokens=1.0)
    for record, name in ((BATCH, "turns"), (costs, "fixed_s")):
        with pytest.raises(FrozenInstanceError):
            setattr(record, name, 0.0)
        assert not hasattr(record, "__dict__")
    with pytest.raises(TypeError):
        WorkerCosts(1.0, 1.0, 1.0, 1.0, 1.0)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Batch(1, 1, 1, 1, 1, 1, 1, 1, 1)  # type: ignore[call-arg]


# -- their terms ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trajectories", "turns"),
    # 1 - 1/(2 B) is 0.5, 0.75, 0.833, 0.95, 0.9545 against weights that add up to 0.75, 0.95, 1.
    [(1, 4), (2, 4), (3, 20), (10, 20), (11, 50), (1000, 50)],
)
def test_the_slowest_of_a_batch_is_a_quantile(trajectories: int, turns: float) -> None:
    seen = Distribution((4.0, 20.0, 50.0), (0.75, 0.2, 0.05))
    assert slowest_turns(seen, trajectories) == turns


def test_a_batch_is_read_off_the_workload() -> None:
    seen = workload(
        turns=Distribution((8.0, 28.0), (0.9, 0.1)),  # mean 10; the slowest of 64 has 28
        prompt_tokens=constant(1000),
        new_tokens=Distribution((50.0, 150.0), (0.5, 0.5)),
        generated_tokens=Distribution((20.0, 80.0), (0.5, 0.5)),
        env_s=Distribution((0.0, 6.0), (0.5, 0.5)),
        retained=0.5,
    )
    want = Batch(
        trajectories=64,
        turns=28,
        new_tokens=190,  # (1,000 + 9 x 100) / 10
        generated_tokens=50,
        overhead_s=0.5,
        env_s=84,  # 28 x 3
        theta=0.25,
        context_tokens=1587.5,  # growth 100 + 25; 1,000 + 4.5 x 125 and half of 50
        final_tokens=2175,  # 1,000 + 9 x 125 + 50
    )
    assert astuple(batch_of(seen, 64)) == pytest.approx(astuple(want))


def decoding(axis: tuple[int, ...], seconds: list[float]) -> IterationTimes:
    row = tuple((s,) for s in seconds)
    return IterationTimes(prefill_tokens=(0, 1), decoding=axis, context_tokens=(1,), cells_s=(row, row))


@pytest.mark.parametrize(
    ("axis", "seconds", "fixed", "per_sequence"),
    [
        # What stands at 0 sequences has no say where 1 is measured.
        ((0, 1, 2), [100, 3, 5], 1, 2),
        # One point: the line through 1 and, beyond it, 2.
        ((0, 1), [1, 3], 1, 2),
        # Between the points: 1 and 2 lie on the line from 0 to 4.
        ((0, 4), [1, 9], 1, 2),
        # 4, 5 (between 4 and 6), 6, 11 at 1, 2, 3, 4: means 2.5 and 6.5, 11 / 5.
        ((0, 1, 3, 4), [100, 4, 6, 11], 1, 2.2),
        # 3, 5, 7 (on the line from 1 to 7 at 3), 4 at 1, 2, 3, 6: means 3 and 4.75;
        # (-2)(-1.75) + (-1)(0.25) + 0 + 3 (-0.75) = 1 over 14.
        ((0, 3, 6), [1, 7, 4], 4.75 - 3 / 14, 1 / 14),
        # Rising ever faster: 1, 2, 6 have slope 2.5 and would begin at -2.
        ((0, 1, 2, 3), [0, 1, 2, 6], 0, 2.5),
        # Falling: slope -2.5.
        ((0, 1, 2, 3), [0, 6, 2, 1], 8, 0),
    ],
)
def test_a_and_b_are_the_line_through_decode_iterations(
    axis: tuple[int, ...], seconds: list[float], fixed: float, per_sequence: float
) -> None:
    assert decode_line(decoding(axis, seconds), 1) == pytest.approx((fixed, per_sequence), abs=1e-9)


def test_a_b_and_t_prefill_are_read_at_the_context_given() -> None:
    # At context 10 iterations take 1 + n, at 20 twice that; 4 prefilled tokens take 8 and 16.
    times = IterationTimes(
        prefill_tokens=(0, 4),
        decoding=(0, 2),
        context_tokens=(10, 20),
        cells_s=(((1, 2), (3, 6)), ((8, 16), (9, 18))),
    )
    assert decode_line(times, 10) == pytest.approx((1, 1))
    assert decode_line(times, 15) == pytest.approx((1.5, 1.5))
    assert prefill_token_s(times, 4, 10) == pytest.approx(2)
    assert prefill_token_s(times, 4, 15) == pytest.approx(3)


@pytest.mark.parametrize(
    ("tokens", "per_token"),
    # 2 tokens lie halfway between 1 and 8 s; 1 at 2.75 s; less is read as 1.
    [(4, 2), (2, 2.25), (1, 2.75), (0.5, 2.75), (0, 2.75)],
)
def test_t_prefill_is_of_an_iteration_of_one_turns_new_tokens(tokens: float, per_token: float) -> None:
    times = IterationTimes(
        prefill_tokens=(0, 4), decoding=(0, 1), context_tokens=(1,), cells_s=(((1,), (9,)), ((8,), (9,)))
    )
    assert prefill_token_s(times, tokens, 1) == pytest.approx(per_token)


def test_costs_are_those_of_the_tensor_parallelism_scaled() -> None:
    platform = Platform(
        by_tp={1: worker(1, s_per_byte=2e-6), 2: worker(2, times=line(0.006, 0.001, 0.0005), capacity=70_000)},
        time_scale={2: 1.5},
    )
    costs = costs_along(costs_by_tp(platform, BATCH), np.array([2, 1, 4]))
    assert costs.fixed_s == pytest.approx([0.009, 0.01, 0])
    assert costs.per_sequence_s == pytest.approx([0.0015, 0.002, 0])
    assert costs.token_s == pytest.approx([0.00075, 0.001, 0])
    assert costs.transfer_s == pytest.approx([0, 0.002, 0])  # 1,000 bytes; None: nothing; not scaled
    assert costs.capacity_tokens == pytest.approx([70_000, 24_000, 0])


def test_costs_are_read_at_the_batchs_tokens_and_context() -> None:
    times = IterationTimes(
        prefill_tokens=(0, 200),
        decoding=(0, 2),
        context_tokens=(400, 1200),
        cells_s=(((1, 3), (3, 9)), ((8, 16), (10, 20))),
    )
    costs = costs_by_tp(Platform(by_tp={1: worker(times=times)}), BATCH)[1]
    # Context 800 is halfway: 2 and 6 at 0 and 2 sequences; 100 of 200 tokens: halfway between 2 and 12.
    assert costs.fixed_s == pytest.approx(2)
    assert costs.per_sequence_s == pytest.approx(2)
    assert costs.token_s == pytest.approx(0.07)


# -- the predictor --------------------------------------------------------------------------------------------------


def test_it_is_a_predictor_that_knows_no_append_prefill() -> None:
    predictor: Predictor = PaperPredictor()
    assert predictor.name == "paper"
    assert predictor.appends is False


def test_colocated_is_equation_1() -> None:
    # One worker: 64 sequences; 6.4 + 50 x 138 ms + 0.5 = 13.8 s a turn.
    got = predict("8C", "4C", "1C")
    assert got.close_s == pytest.approx([56, 72, 168])
    assert got.error_s == pytest.approx([0.16 * 56, 0.16 * 72, 0.16 * 168])
    assert got.infeasible.tolist() == [Infeasible.NO, Infeasible.NO, Infeasible.NO]


def test_apart_is_the_slower_side_and_the_environment() -> None:
    # 4 decode workers 22.25 s; 1, 2, 4 prefill workers 64, 32, 16 s. Environment 30 s. T_over is not in equations 2 and 3.
    got = predict("1P4D", "2P4D", "4P4D")
    assert got.close_s == pytest.approx([94, 62, 52.25])
    assert got.infeasible.tolist() == [0, 0, 0]


def test_the_transfer_is_the_prefill_workers() -> None:
    # 1,000 bytes at 0.1 us: 0.1 ms per token, 6.4 s in all; 64 + 6.4 + 30.
    sends = worker(1, s_per_byte=1e-7)
    receives = worker(2, s_per_byte=1.0)
    got = predict("1P@tp1+4D@tp2", platform=Platform(by_tp={1: sends, 2: receives}))
    assert got.close_s == pytest.approx([100.4])


def test_each_role_has_the_costs_of_its_tensor_parallelism() -> None:
    platform = Platform(by_tp={1: worker(1), 2: worker(2, times=line(0.02, 0.004, 0.0005), capacity=96_000)})
    got = predict("1P@tp2+4D@tp1", "4P@tp1+4D@tp2", "8C@tp2", platform=platform)
    # Prefill 32 s at half the time per token; decode twice 22.25 s; colocated 10 (0.4 + 2.6 + 0.5) + 30.
    assert got.close_s == pytest.approx([62, 74.5, 65])


@pytest.mark.parametrize(("unfinished", "close"), [(64, 56), (32, 28), (1, 0.875), (0, 0)])
def test_the_rest_of_a_batch_takes_its_share(unfinished: int, close: float) -> None:
    got = predict("8C", left=progress(unfinished))
    assert got.close_s == pytest.approx([close])
    assert got.error_s == pytest.approx([ERROR * close])


def test_what_is_in_flight_beside_the_batch_does_not_count() -> None:
    more = replace(progress(), live_groups=8, running={0: 128})
    assert predict("8C", "4P4D", left=more).close_s.tolist() == predict("8C", "4P4D").close_s.tolist()


def test_decode_workers_hold_the_kv_of_the_batch() -> None:
    # A mean trajectory ends at 100 + 9 x 150 + 50 = 1,500 tokens: 64 of them 96,000, 4 workers of 24,000 just hold.
    fits = predict("4P4D", "1P4D", "5P3D")
    assert fits.infeasible.tolist() == [Infeasible.NO, Infeasible.NO, Infeasible.KV_CAPACITY]
    assert fits.close_s[2] == np.inf
    assert fits.error_s[2] == np.inf
    short = Platform(by_tp={1: worker(capacity=23_999)})
    assert predict("4P4D", "4P5D", platform=short).infeasible.tolist() == [Infeasible.KV_CAPACITY, Infeasible.NO]


def test_the_kv_of_the_batch_does_not_shrink_with_it() -> None:
    assert predict("5P3D", left=progress(1)).infeasible.tolist() == [Infeasible.KV_CAPACITY]
    assert predict("5P3D", left=progress(1, batch=48)).infeasible.tolist() == [Infeasible.NO]
    assert predict("5P3D", left=progress(0)).close_s.tolist() == [np.inf]


def test_kv_is_held_by_decode_workers_of_their_own_size() -> None:
    platform = Platform(by_tp={1: worker(1, capacity=1), 2: worker(2, capacity=96_000)})
    got = predict("1P@tp1+1D@tp2", "1P@tp2+1D@tp1", platform=platform)
    assert got.infeasible.tolist() == [Infeasible.NO, Infeasible.KV_CAPACITY]


def test_colocated_is_what_remains_when_nothing_fits() -> None:
    tiny = Platform(by_tp={1: worker(capacity=1)})
    assert predict("1C", "1P1D", platform=tiny).infeasible.tolist() == [Infeasible.NO, Infeasible.KV_CAPACITY]


def bare(**workers: int) -> Target:
    """A shape that the grammar refuses."""
    roles = {"prefill": Role.PREFILL, "decode": Role.DECODE, "colocated": Role.COLOCATED}
    return Target(shape=Shape(tuple(Pool(role=roles[name], workers=n) for name, n in workers.items())))


def test_shapes_that_cannot_serve_or_that_the_paper_does_not_have() -> None:
    targets = [
        bare(),
        bare(prefill=2),
        bare(decode=2),
        bare(prefill=1, colocated=1),
        bare(decode=1, colocated=1),
        bare(prefill=4, decode=4, colocated=1),
        bare(colocated=1),
    ]
    profile = Profile(workload=workload(), platform=Platform(by_tp={1: worker()}))
    got = PaperPredictor().forecast(profile, progress())(candidates_of(targets))
    assert got.infeasible.tolist() == [
        Infeasible.NO_WORKERS,
        Infeasible.NO_WORKERS,
        Infeasible.NO_WORKERS,
        Infeasible.NO_WORKERS,
        Infeasible.NO_WORKERS,
        Infeasible.UNSUPPORTED,
        Infeasible.NO,
    ]
    assert np.isinf(got.close_s).tolist() == [True] * 6 + [False]
    assert np.isinf(got.error_s).tolist() == [True] * 6 + [False]


def test_a_tensor_parallelism_must_be_the_platforms() -> None:
    platform = Platform(by_tp={2: worker(2), 4: worker(4)})
    shapes = ["8C@tp1", "8C@tp2", "4P@tp1+4D@tp2", "4P@tp2+4D@tp1", "4P@tp8+4D@tp8", "4P@tp2+4D@tp4"]
    got = predict(*shapes, platform=platform)
    unknown = Infeasible.UNKNOWN_TP
    assert got.infeasible.tolist() == [unknown, Infeasible.NO, unknown, unknown, unknown, Infeasible.NO]


def test_a_pair_of_tensor_parallelisms_must_be_allowed() -> None:
    platform = Platform(by_tp={1: worker(1), 2: worker(2)}, tp_pairs=frozenset({(1, 2)}))
    shapes = ["4P@tp1+4D@tp2", "4P@tp2+4D@tp1", "4P4D@tp1", "4P4D@tp2", "8C@tp1", "8C@tp2"]
    got = predict(*shapes, platform=platform)
    unknown = Infeasible.UNKNOWN_TP
    assert got.infeasible.tolist() == [Infeasible.NO, unknown, unknown, unknown, Infeasible.NO, Infeasible.NO]


def test_the_first_reason_counts() -> None:
    # No workers before an unknown tp, an unsupported shape before that, an unknown tp before KV that does not fit.
    platform = Platform(by_tp={2: worker(2, capacity=1)})
    targets = [bare(prefill=1), bare(prefill=1, decode=1, colocated=1), bare(prefill=1, decode=1)]
    profile = Profile(workload=workload(), platform=platform)
    got = PaperPredictor().forecast(profile, progress())(candidates_of(targets))
    assert got.infeasible.tolist() == [Infeasible.NO_WORKERS, Infeasible.UNSUPPORTED, Infeasible.UNKNOWN_TP]


def test_append_prefill_changes_nothing() -> None:
    shape = parse_shape("4P4D")
    candidates = candidates_of([Target(shape=shape), Target(shape=shape, append_tokens=512)])
    profile = Profile(workload=workload(), platform=Platform(by_tp={1: worker()}))
    assert PaperPredictor().forecast(profile, progress())(candidates).close_s == pytest.approx([52.25, 52.25])


def test_turns_without_new_tokens_or_environment_only_decode() -> None:
    # Colocated 10 x (50 x 26 ms + 0.5 s); apart nothing to prefill.
    nothing: dict[str, Any] = {name: constant(0) for name in ("prompt_tokens", "new_tokens", "env_s")}
    got = predict("8C", "4P4D", **nothing)
    assert got.close_s == pytest.approx([18, 22.25])
    assert got.infeasible.tolist() == [0, 0]


def test_all_at_once_is_one_by_one() -> None:
    platform = Platform(
        by_tp={1: worker(1, s_per_byte=1e-7), 2: worker(2, times=line(0.006, 0.001, 0.0006), capacity=70_000)},
        tp_pairs=frozenset({(1, 1), (1, 2), (2, 2)}),
        time_scale={1: 1.1},
    )
    shapes = [f"{x}P@tp{a}+{y}D@tp{b}" for x in (1, 3, 9) for y in (1, 2, 5) for a in (1, 2) for b in (1, 2, 4)]
    shapes += [f"{n}C@tp{a}" for n in (1, 2, 7) for a in (1, 2, 4)] + ["1P1D1C", "2P2D1C@tp2"]
    together = predict(*shapes, platform=platform)
    assert set(together.infeasible.tolist()) == {0, 2, 3, 4}
    for index, shape in enumerate(shapes):
        alone = predict(shape, platform=platform)
        assert together.close_s[index] == alone.close_s[0]
        assert together.error_s[index] == alone.error_s[0]
        assert together.infeasible[index] == alone.infeasible[0]


def test_a_thousand_shapes_are_predicted_in_one_go() -> None:
    shapes = [f"{x}P{y}D" for x in range(1, 33) for y in range(1, 33)]
    got = predict(*shapes)
    assert got.close_s.shape == got.error_s.shape == got.infeasible.shape == (1024,)
    # 32P32D: prefill takes 2 s; decode 64 / 40 = 1.6 sequences, 13.2 ms x 500 x 1.25 = 8.25 s; environment 30 s.
    assert got.close_s[-1] == pytest.approx(38.25)


def test_no_candidates_are_no_predictions() -> None:
    none: Candidates = candidates_of([])
    profile = Profile(workload=workload(), platform=Platform(by_tp={1: worker()}))
    got = PaperPredictor().forecast(profile, progress())(none)
    assert (len(got.close_s), len(got.error_s), len(got.infeasible)) == (0, 0, 0)


def test_a_forecast_can_be_asked_again() -> None:
    profile = Profile(workload=workload(), platform=Platform(by_tp={1: worker()}))
    forecast = PaperPredictor().forecast(profile, progress())
    for shape, close in (("8C", 56), ("4P4D", 52.25), ("8C", 56)):
        assert forecast(candidates_of([Target(shape=parse_shape(shape))])).close_s == pytest.approx([close])


def test_predicting_leaves_the_candidates_alone() -> None:
    candidates = candidates_of([Target(shape=parse_shape("4P4D")), Target(shape=parse_shape("8C"))])
    profile = Profile(workload=workload(), platform=Platform(by_tp={1: worker()}))
    PaperPredictor().forecast(profile, progress())(candidates)
    assert candidates.workers[Role.COLOCATED].tolist() == [0, 8]
    assert candidates.workers[Role.PREFILL].tolist() == [4, 0]
