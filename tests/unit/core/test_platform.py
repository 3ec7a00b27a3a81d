"""Platform and costs of change: what may be, and how they follow measurements."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest

from pearl.core.platform import Platform, TransitionCosts, refit_costs, refit_scale
from pearl.core.profile import IterationTimes, PlatformProfile
from pearl.errors import ProfileError


def profile(tp: int) -> PlatformProfile:
    return PlatformProfile(
        model="m",
        model_hash="h",
        device="d",
        dtype="bfloat16",
        tp=tp,
        iterations=IterationTimes(
            prefill_tokens=(0, 1), decoding=(0, 1), context_tokens=(1,), cells_s=(((1,), (1,)), ((1,), (1,)))
        ),
        kv_capacity_tokens=1,
        kv_bytes_per_token=1,
        hand_off=None,
        weight_load_s=0.0,
        sleep_s=0.0,
        wake_s=0.0,
        engine_start_s=None,
    )


PLATFORM = Platform(by_tp={4: profile(4), 1: profile(1), 2: profile(2)}, time_scale={2: 0.5})
COST_NAMES = ["start_s", "finalise_s", "activate_s", "return_s", "role_change_s", "stop_s"]


class TestCosts:
    def test_defaults_are_those_of_the_paper(self) -> None:
        """Table 3, Qwen3-8B: 56.29, 11.05, 6.26, 3.18 s; a role change takes tens of seconds."""
        costs = TransitionCosts()
        assert [getattr(costs, name) for name in COST_NAMES] == [56.3, 11.1, 6.3, 3.2, 20.0, 1.0]
        assert [each.name for each in fields(costs)] == COST_NAMES

    @pytest.mark.parametrize("name", COST_NAMES)
    @pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
    def test_refused_by_name(self, name: str, value: float) -> None:
        with pytest.raises(ProfileError, match=f"^costs: {name}: got {value}, want a finite number >= 0$"):
            replace(TransitionCosts(), **{name: value})

    def test_changes_may_be_free(self) -> None:
        assert TransitionCosts(**dict.fromkeys(COST_NAMES, 0.0)).role_change_s == 0.0


class TestPlatform:
    def test_parallelisms_rise(self) -> None:
        assert PLATFORM.tps == (1, 2, 4)

    def test_scale(self) -> None:
        assert (PLATFORM.scale(2), PLATFORM.scale(1), PLATFORM.scale(16)) == (0.5, 1.0, 1.0)

    def test_pairs(self) -> None:
        assert PLATFORM.allows(1, 4)
        narrow = replace(PLATFORM, tp_pairs=frozenset({(1, 4)}))
        assert narrow.allows(1, 4)
        assert not narrow.allows(4, 1)
        assert not replace(PLATFORM, tp_pairs=frozenset()).allows(1, 1)

    def test_what_is_not_said(self) -> None:
        plain = Platform(by_tp={1: profile(1)})
        assert (plain.max_sequences, plain.prefill_chunk_tokens, plain.readback) == (256, 2048, True)
        assert (plain.costs, plain.tp_pairs, dict(plain.time_scale)) == (TransitionCosts(), None, {})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"by_tp": {}}, "by_tp: got no profile, want one for each tensor parallelism"),
            ({"by_tp": {1: profile(1), 2: profile(4)}}, "by_tp: got a profile of tp 4 under 2, want its own"),
            ({"max_sequences": 0}, "max_sequences: got 0, want >= 1"),
            ({"prefill_chunk_tokens": 0}, "prefill_chunk_tokens: got 0, want >= 1"),
            ({"time_scale": {8: 1.0}}, r"time_scale: got 1.0 for tp 8, want > 0 for one of \(1, 2, 4\)"),
            ({"time_scale": {2: 0.0}}, "time_scale: got 0.0 for tp 2, want > 0"),
            ({"time_scale": {2: math.inf}}, "time_scale: got inf for tp 2, want > 0"),
            ({"time_scale": {2: math.nan}}, "time_scale: got nan for tp 2, want > 0"),
        ],
    )
    def test_refused_by_name(self, changes: dict[str, object], message: str) -> None:
        with pytest.raises(ProfileError, match=f"^platform: {message}"):
            replace(PLATFORM, **changes)  # type: ignore[arg-type]

    def test_one_is_enough(self) -> None:
        found = replace(PLATFORM, max_sequences=1, prefill_chunk_tokens=1)
        assert (found.max_sequences, found.prefill_chunk_tokens) == (1, 1)


class TestScale:
    @pytest.mark.parametrize(
        ("tp", "ratio", "share", "want"),
        [
            (2, 2.0, 1.0, 1.0),  # 0.5 * 2
            (2, 2.0, 0.5, 0.5 * math.sqrt(2)),
            (2, 1.0, 0.5, 0.5),
            (1, 0.5, 1.0, 0.5),  # from 1
            (1, 4.0, 1.0, 4.0),
            (1, 5.0, 1.0, 4.0),  # at most 4
            (1, 0.25, 1.0, 0.25),
            (1, 1e-9, 1.0, 0.25),  # at least a quarter
        ],
    )
    def test_follows_on_the_logarithm(self, tp: int, ratio: float, share: float, want: float) -> None:
        found = refit_scale(PLATFORM, tp, ratio, share)
        assert found.scale(tp) == pytest.approx(want)
        assert found.by_tp == PLATFORM.by_tp

    def test_the_others_stay(self) -> None:
        found = refit_scale(PLATFORM, 1, 3.0, 1.0)
        assert dict(found.time_scale) == pytest.approx({1: 3.0, 2: 0.5})
        assert dict(PLATFORM.time_scale) == {2: 0.5}

    @pytest.mark.parametrize(
        ("tp", "ratio"), [(8, 2.0), (1, 0.0), (1, -1.0), (1, math.nan), (1, math.inf), (1, -math.inf)]
    )
    def test_nonsense_teaches_nothing(self, tp: int, ratio: float) -> None:
        assert refit_scale(PLATFORM, tp, ratio, 0.3) is PLATFORM

    @pytest.mark.parametrize(("ratio", "want"), [(1e300, 1000.0), (1e-300, 0.001)])
    def test_surprises_without_end_stay_within_bounds(self, ratio: float, want: float) -> None:
        found = PLATFORM
        for _ in range(8):
            found = refit_scale(found, 2, ratio, 1.0)
        assert found.scale(2) == want


class TestCostsFollow:
    @pytest.mark.parametrize("name", COST_NAMES)
    def test_each_by_its_name(self, name: str) -> None:
        """A quarter of the way to twice as long."""
        costs = TransitionCosts()
        had = getattr(costs, name)
        found = refit_costs(costs, {name: 2 * had, "unknown_s": 7.0}, 0.25)
        assert getattr(found, name) == pytest.approx(1.25 * had)
        assert replace(found, **{name: had}) == costs

    @pytest.mark.parametrize(
        ("seconds", "want"),
        [
            (12.0, 11.0),
            (80.0, 25.0),  # at most 4 * 10
            (40.0, 25.0),
            (39.0, 24.5),
            (2.5, 6.25),
            (2.6, 6.3),
            (0.0, 6.25),  # at least a quarter
        ],
    )
    def test_surprises_are_bounded_on_both_sides(self, seconds: float, want: float) -> None:
        found = refit_costs(TransitionCosts(role_change_s=10.0), {"role_change_s": seconds}, 0.5)
        assert found.role_change_s == pytest.approx(want)

    def test_a_cheap_change_is_surprised_within_bounds_too(self) -> None:
        """Half of the way from 0.5 to 4 * 0.5."""
        assert refit_costs(TransitionCosts(stop_s=0.5), {"stop_s": 100.0}, 0.5).stop_s == 1.25

    def test_what_was_free_follows_what_it_took(self) -> None:
        free = TransitionCosts(stop_s=0.0)
        assert refit_costs(free, {"stop_s": 100.0}, 0.5).stop_s == 50.0
        assert refit_costs(free, {"stop_s": 0.0}, 0.5).stop_s == 0.0

    @pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
    def test_nonsense_teaches_nothing(self, seconds: float) -> None:
        assert refit_costs(TransitionCosts(), {"stop_s": seconds}, 0.5) == TransitionCosts()

    def test_nothing_measured(self) -> None:
        assert refit_costs(TransitionCosts(), {}, 0.5) == TransitionCosts()
