"""Priors: published numbers come out again, what lies between behaves, and workloads have the quantiles they were given.

The numbers here are the published ones, in milliseconds or tokens, written down a second time.
"""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.platform import TransitionCosts
from pearl.core.priors import (
    LEASE_MEAN_S,
    PLATFORM_PRIORS,
    QUANTILES,
    WORKLOAD_PRIORS,
    distribution_through,
    platform_prior,
    workload_prior,
)
from pearl.core.profile import PlatformProfile, parse_profile
from pearl.errors import ProfileError

DATA = Path(__file__).resolve().parents[4] / "shared" / "data" / "workloads"


def profile(name: str, tp: int) -> PlatformProfile:
    return platform_prior(name).by_tp[tp]


def milliseconds(name: str, tp: int, prefill: float, decoding: float, context: float) -> float:
    return 1e3 * profile(name, tp).iterations.seconds(prefill, decoding, context)


class TestPlatformNames:
    def test_there_are_four(self) -> None:
        names = ("qwen3-8b-h100", "qwen3-8b-h200", "qwen3-30b-a3b-h100", "qwen3-30b-a3b-h200")
        assert names == PLATFORM_PRIORS
        assert [platform_prior(name).tps for name in names] == [(1, 2, 4)] * 4

    def test_another_is_refused_with_the_names(self) -> None:
        with pytest.raises(
            ProfileError, match=r"^platform: got 'gpt', want one of qwen3-8b-h100, .*qwen3-30b-a3b-h200$"
        ):
            platform_prior("gpt")


class TestIterations:
    @pytest.mark.parametrize(
        ("model", "tp", "published"),
        [
            ("qwen3-8b", 1, (6.5, 10.7, 19.4, 11.2, 51.0)),
            ("qwen3-8b", 2, (4.3, 6.1, 10.6, 6.9, 32.8)),
            ("qwen3-8b", 4, (3.0, 3.9, 6.8, 4.8, 22.6)),
            ("qwen3-30b-a3b", 1, (4.8, 14.6, 30.3, 26.1, 49.9)),
            ("qwen3-30b-a3b", 2, (3.8, 9.6, 17.3, 15.3, 34.1)),
            # Scaled: 3.8 * 3.0 / 4.3, 9.6 * 3.9 / 6.1, 17.3 * 6.8 / 10.6, 15.3 * 4.8 / 6.9, 34.1 * 22.6 / 32.8.
            ("qwen3-30b-a3b", 4, (2.7, 6.1, 11.1, 10.6, 23.5)),
        ],
    )
    @pytest.mark.parametrize("device", ["h100", "h200"])
    def test_published_times_come_out_again(
        self, model: str, tp: int, published: tuple[float, ...], device: str
    ) -> None:
        points = [(0, 1), (0, 16), (0, 64), (128, 16), (2048, 16)]
        found = [milliseconds(f"{model}-{device}", tp, prefill, decoding, 4096) for prefill, decoding in points]
        assert found == pytest.approx(list(published))

    @pytest.mark.parametrize(
        ("name", "prefix", "new", "published"),
        [
            ("qwen3-8b-h100", 8192, 512, 16.3),
            ("qwen3-30b-a3b-h100", 8192, 512, 33.2),
            ("qwen3-8b-h200", 8192, 2048, 57),
            ("qwen3-8b-h200", 32768, 2048, 102),
        ],
    )
    def test_appending_comes_near_what_is_published_for_it(
        self, name: str, prefix: int, new: int, published: float
    ) -> None:
        assert milliseconds(name, 1, new, 0, prefix + new) == pytest.approx(published, rel=0.05)

    def test_context_costs_the_reading_of_its_kv(self) -> None:
        """16 * 147,456 bytes * 10,000 tokens at 3.35 TB/s: 7.0427 ms on one GPU, half of it each on two."""
        for tp in (1, 2):
            more = milliseconds("qwen3-8b-h100", tp, 0, 16, 14096) - milliseconds("qwen3-8b-h100", tp, 0, 16, 4096)
            assert more == pytest.approx(7.0427 / tp, rel=1e-4)

    def test_beyond_the_published_batch_a_sequence_costs_its_kv(self) -> None:
        """32 * 98,304 bytes * 4,096 tokens at 3.35 TB/s: 3.8463 ms; without end, since the last slope goes on."""
        for many in (64, 96, 224, 256, 400):
            more = milliseconds("qwen3-30b-a3b-h100", 1, 0, many + 32, 4096)
            more -= milliseconds("qwen3-30b-a3b-h100", 1, 0, many, 4096)
            assert more == pytest.approx(3.8463, rel=1e-4)

    def test_prefill_alone_reads_the_weights_of_a_dense_model(self) -> None:
        """By the line through 1 and 16 sequences, 6.5 - 4.2 / 15 = 6.22 ms; 128 tokens add 0.5 ms, as beside 16."""
        assert milliseconds("qwen3-8b-h100", 1, 128, 0, 4096) == pytest.approx(6.72)
        assert milliseconds("qwen3-8b-h100", 1, 1e-9, 0, 4096) == pytest.approx(6.22)

    def test_prefill_alone_loads_every_expert(self) -> None:
        """26.1 ms less the KV of 16 sequences, 16 * 98,304 * 4,096 / 3.35e12 = 1.9232 ms; 64 beside it add 4 times that."""
        assert milliseconds("qwen3-30b-a3b-h100", 1, 128, 0, 4096) == pytest.approx(24.1768, rel=1e-5)
        assert milliseconds("qwen3-30b-a3b-h100", 1, 128, 64, 4096) == pytest.approx(24.1768 + 7.6927, rel=1e-5)

    def test_attention_of_prefill(self) -> None:
        """45 ms for 2,048 * 24,576 pairs on one GPU: 1,024 tokens with 8,192 more before them take 7.5 ms; two GPUs, half.

        Qwen3-30B-A3B has a third more layers.
        """
        for name, tp, want in (("qwen3-8b", 1, 7.5), ("qwen3-8b", 2, 3.75), ("qwen3-30b-a3b", 2, 5.0)):
            more = milliseconds(f"{name}-h100", tp, 1024, 0, 12288) - milliseconds(f"{name}-h100", tp, 1024, 0, 4096)
            assert more == pytest.approx(want)

    @pytest.mark.parametrize("name", PLATFORM_PRIORS)
    @pytest.mark.parametrize("tp", [1, 2, 4])
    def test_more_work_takes_longer(self, name: str, tp: int) -> None:
        times = np.array(profile(name, tp).iterations.cells_s)
        assert (times > 0).all()
        assert (np.diff(times, axis=0) > 0).all()
        assert (np.diff(times, axis=1) > 0).all()
        assert (np.diff(times, axis=2) >= 0).all()

    @pytest.mark.parametrize("name", PLATFORM_PRIORS)
    def test_a_wider_worker_is_faster_and_less_efficient(self, name: str) -> None:
        for narrow, wide in ((1, 2), (2, 4)):
            for point in itertools.product((0, 128, 2048), (1, 16, 64), (4096, 32768)):
                one, two = milliseconds(name, narrow, *point), milliseconds(name, wide, *point)
                assert one / 2.01 < two < one, point

    def test_the_paper_s_decoding_rate_of_qwen3_30b_a3b_is_near(self) -> None:
        """Fig. 2b: about 400 tokens/s per GPU between prefills at tp 2: 8 sequences on a worker give 800 in all."""
        per_gpu = 8 / milliseconds("qwen3-30b-a3b-h100", 2, 0, 8, 16384) * 1e3 / 2
        assert 400 < per_gpu < 700


class TestPlatform:
    @pytest.mark.parametrize(
        ("name", "capacities"),
        [
            # On two GPUs twice as many, and what the second copy of the weights took: 16.38e9 bytes / 147,456 = 111,083.
            ("qwen3-8b-h100", (383_000, 877_083, 1_865_251)),
            ("qwen3-8b-h200", (782_000, 1_675_083, 3_461_251)),
            # 61.06e9 / 98,304 = 621,134.4 tokens for a copy of the weights.
            ("qwen3-30b-a3b-h100", (118_000, 857_134, 2_335_403)),
            ("qwen3-30b-a3b-h200", (718_000, 2_057_134, 4_735_403)),
        ],
    )
    def test_kv_capacity(self, name: str, capacities: tuple[int, ...]) -> None:
        assert tuple(profile(name, tp).kv_capacity_tokens for tp in (1, 2, 4)) == capacities

    def test_kv_bytes(self) -> None:
        assert profile("qwen3-8b-h100", 2).kv_bytes_per_token == 147_456
        assert profile("qwen3-30b-a3b-h100", 2).kv_bytes_per_token == 98_304

    @pytest.mark.parametrize("name", PLATFORM_PRIORS)
    def test_hand_offs(self, name: str) -> None:
        """8,192 tokens of Qwen3-8B, 1.208 GB, take 24 ms at 50 GB/s besides the 27.5 ms that each takes."""
        hand_off = profile(name, 4).hand_off
        assert hand_off is not None
        assert hand_off.seconds(0) == 0.0275
        assert hand_off.seconds(8192 * 147_456) == pytest.approx(0.0275 + 0.02416, rel=1e-3)

    @pytest.mark.parametrize(
        ("model", "costs", "load"),
        [
            ("qwen3-8b", TransitionCosts(start_s=56.29, finalise_s=11.05, activate_s=6.26, return_s=3.18), 0.23),
            ("qwen3-30b-a3b", TransitionCosts(start_s=67.06, finalise_s=17.89, activate_s=6.09, return_s=4.38), 0.85),
        ],
    )
    def test_costs_of_change_are_those_of_the_paper(self, model: str, costs: TransitionCosts, load: float) -> None:
        platform = platform_prior(f"{model}-h100")
        assert platform.costs == costs
        for found in platform.by_tp.values():
            assert found.engine_start_s == costs.start_s
            assert found.sleep_s == costs.return_s
            assert found.weight_load_s == load
            assert found.wake_s + found.weight_load_s == pytest.approx(costs.activate_s)

    @pytest.mark.parametrize("name", PLATFORM_PRIORS)
    def test_each_is_a_profile_that_says_that_it_is_a_prior(self, name: str) -> None:
        for tp in (1, 2, 4):
            found = profile(name, tp)
            assert parse_profile(found.to_json()) == found
            assert found.device == f"NVIDIA {name[-4:].upper()} (prior)"
            assert found.model.lower() == name[:-5]
            assert found.model_hash == f"prior-{name[:-5]}"
            assert found.dtype == "bfloat16"

    def test_limits_are_the_usual_ones(self) -> None:
        platform = platform_prior("qwen3-8b-h100")
        assert (platform.max_sequences, platform.prefill_chunk_tokens, platform.tp_pairs) == (256, 2048, None)


class TestThrough:
    VALUES = (0.0, 1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 20.0)

    def test_quantiles_are_exact(self) -> None:
        for mean in (2.4, 2.7, 3.6):
            found = distribution_through(self.VALUES, mean)
            assert found.mean == pytest.approx(mean, rel=1e-6)
            assert [found.quantile(share) for share in QUANTILES[1:]] == pytest.approx(self.VALUES[1:])

    def test_points_rise_evenly_where_the_mean_says_so(self) -> None:
        """With k = 1, upper ends: means of parts are begin + (end - begin) * (n + 1) / 2n, n = 6, 6, 6, 4, 4, 4, 10.

        0.25 * (7/12 + 19/12 + 38/12) + 0.15 * 5.25 + 0.05 * 7.25 + 0.04 * 9.25 + 0.01 * 15.5 = 3.00833
        """
        want = 0.25 * 64 / 12 + 0.7875 + 0.3625 + 0.37 + 0.155
        found = distribution_through(self.VALUES, want)
        assert found.values[:6] == pytest.approx([n / 6 for n in range(1, 7)])
        assert found.values[-10:] == pytest.approx(range(11, 21))
        assert found.weights[0] == pytest.approx(0.25 / 6)
        assert found.weights[-1] == pytest.approx(0.001)
        assert len(found.values) == 40

    @pytest.mark.parametrize("mean", [2.35, 3.66])
    def test_a_mean_out_of_reach_is_refused(self, mean: float) -> None:
        """2.366: all at the lower ends but for the last point of each part; 3.65: all at the upper ends."""
        with pytest.raises(ProfileError, match=rf"got mean {mean:g}, which values of \(0.0, 1.0, .*cannot have"):
            distribution_through(self.VALUES, mean)

    def test_values_that_meet_become_one(self) -> None:
        found = distribution_through((3.0,) * 8, 3.0)
        assert found.values == (3.0,)


class TestWorkloads:
    def test_there_are_five(self) -> None:
        assert WORKLOAD_PRIORS == ("swe", "terminal", "tau", "webshop", "game")

    def test_another_is_refused_with_the_names(self) -> None:
        with pytest.raises(
            ProfileError, match=r"^workload: got 'chess', want one of swe, terminal, tau, webshop, game$"
        ):
            workload_prior("chess")

    @pytest.mark.parametrize(
        ("name", "field", "mean", "p50", "p95"),
        [
            ("swe", "turns", 50.7, 45, 112),
            ("swe", "new_tokens", 701, 262, 2256),
            ("swe", "generated_tokens", 258, 145, 784),
            ("swe", "env_s", 3.41, 0.04, 11.1),
            ("tau", "turns", 12.3, 11, 23.1),
            ("tau", "new_tokens", 136, 34, 359),
            ("tau", "generated_tokens", 62, 43, 179),
            ("webshop", "turns", 6.9, 7, 14),
            ("webshop", "new_tokens", 59, 9, 200),
            ("webshop", "generated_tokens", 17, 10, 46),
        ],
    )
    def test_published_figures_come_out_again(self, name: str, field: str, mean: float, p50: float, p95: float) -> None:
        found: Distribution = getattr(workload_prior(name), field)
        assert found.mean == pytest.approx(mean, rel=0.01)
        assert found.quantile(0.5) == pytest.approx(p50, rel=0.03)
        assert found.quantile(0.95) == pytest.approx(p95, rel=0.01)

    def test_the_rare_long_waits_of_swe(self) -> None:
        env_s = workload_prior("swe").env_s
        assert env_s.quantile(0.99) == pytest.approx(20.4)
        assert env_s.largest == 308
        assert math.sqrt(env_s.variance) / env_s.mean > 2.5

    def test_a_terminal(self) -> None:
        """Published: lengths, median 20, mean 47.3; medians of 694 new and 223 generated tokens; moments of 8,110 waits."""
        found = workload_prior("terminal")
        assert (found.turns.quantile(0.5), found.turns.mean) == (20, pytest.approx(47.3))
        assert (found.new_tokens.quantile(0.5), found.generated_tokens.quantile(0.5)) == (694, 223)
        waits = found.env_s
        assert [waits.quantile(share) for share in (0.5, 0.9, 0.99)] == [0.04, 9.0, 20.6]
        assert (waits.mean, math.sqrt(waits.variance) / waits.mean) == (
            pytest.approx(2.9),
            pytest.approx(3.55, rel=0.03),
        )

    def test_lengths_in_a_terminal_are_lognormal(self) -> None:
        """Sigma from mean over median; 95 % are at exp(1.645 sigma) medians."""
        turns = workload_prior("terminal").turns
        sigma = math.sqrt(2 * math.log(47.3 / 20))
        for share, z in ((0.25, -0.6745), (0.75, 0.6745), (0.9, 1.2816), (0.95, 1.6449), (0.99, 2.3263)):
            assert turns.quantile(share) == pytest.approx(20 * math.exp(sigma * z), rel=0.04)

    def test_a_game_keeps_its_limits(self) -> None:
        game = workload_prior("game")
        assert (game.turns.largest, game.generated_tokens.largest) == (10, 100)

    def test_waits_that_were_not_recorded(self) -> None:
        """A user turn of tau: 0.34 s in the middle and 0.53 s at 95 %; 53 % of the turns are such."""
        tau = workload_prior("tau").env_s
        users = Distribution(tau.values[1:], tuple(weight / 0.53 for weight in tau.weights[1:]))
        assert tau.weights[0] == 0.47
        assert (users.quantile(0.5), users.quantile(0.95)) == (0.34, 0.53)
        assert workload_prior("webshop").env_s == constant(0.1)

    def test_first_prompts(self) -> None:
        assert [workload_prior(name).prompt_tokens.mean for name in WORKLOAD_PRIORS] == [
            13_480,
            862,
            3713,
            560,
            300,
        ]

    @pytest.mark.parametrize(
        ("name", "theta"),
        [
            ("swe", 3.41 / 2.58),
            ("tau", (0.5 * 0.34 + 0.03 * 0.53) / 0.618),
            ("webshop", 0.1 / 0.171),
            ("terminal", 2.9 / 3.97),
            ("game", 0.001 / 0.64),
        ],
    )
    def test_bubbles_are_waits_over_decoding(self, name: str, theta: float) -> None:
        """At 10 ms per generated token."""
        assert workload_prior(name).theta == pytest.approx(theta, rel=1e-5)

    def test_all_that_is_generated_stays(self) -> None:
        assert all(workload_prior(name).retained == 1.0 for name in WORKLOAD_PRIORS)

    @pytest.mark.parametrize(
        ("name", "file"),
        [
            ("swe", "swe_claudecode_glm47flash.jsonl"),
            ("tau", "tau_airline_gpt4o.jsonl"),
            ("webshop", "webshop_react.jsonl"),
        ],
    )
    def test_they_are_those_of_the_data(self, name: str, file: str) -> None:
        """Against the recorded trajectories themselves, where they are at hand: quantiles between the given ones too."""
        path = DATA / file
        if not path.exists():
            pytest.skip("no shared/data beside the project")
        with path.open(encoding="utf-8") as lines:
            trajectories = [json.loads(line)["turns"] for line in lines]
        seen = {
            "turns": [len(turns) for turns in trajectories],
            "new_tokens": [turn["input_tokens"] for turns in trajectories for turn in turns[1:]],
            "generated_tokens": [turn["output_tokens"] for turns in trajectories for turn in turns],
        }
        for field, values in seen.items():
            found: Distribution = getattr(workload_prior(name), field)
            assert found.mean == pytest.approx(np.mean(values), rel=0.01), field
            for share in QUANTILES[1:-1]:
                assert found.quantile(share) == pytest.approx(np.quantile(values, share), rel=0.02, abs=1), field
            spread = 0.35 * np.quantile(values, 0.95)
            for share in (0.125, 0.375, 0.625, 0.85):
                assert found.quantile(share) == pytest.approx(np.quantile(values, share), abs=spread), field
        first = [turns[0]["input_tokens"] for turns in trajectories]
        assert workload_prior(name).prompt_tokens.mean == pytest.approx(np.mean(first), rel=0.01)


def test_leases() -> None:
    """273.1 GPU-hours and 166 GPUs taken: 5,923 s each."""
    assert pytest.approx(273.1 * 3600 / 166, rel=0.01) == LEASE_MEAN_S
