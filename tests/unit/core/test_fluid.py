"""The fluid network at its limits, by hand; `test_fluid_accuracy` measures it in between.

Engines: iterations of 10 ms, 2 ms per sequence and 1 ms per prompt token. Work: 4 turns; a prompt of 100 tokens, replies of 50;
20 tokens generated per turn, alone in 20 * 12 = 240 ms; 3 s of environment after each turn but the last, 0.2 s of overhead.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.fluid import APPEND_TOKENS, BLOCK, RELATIVE_ERROR, FluidPredictor
from pearl.core.makespan import Candidates, Infeasible, Predictions, Profile, Target, candidates_of
from pearl.core.platform import Platform
from pearl.core.profile import HandOff
from pearl.core.progress import Progress, fresh_batch
from pearl.core.shape import Shape
from pearl.core.workload import WorkloadProfile
from tests.platforms import engine_profile, linear_times, platform_of, target

TIMES, SLOW = linear_times(0.01, 0.002, 0.001), linear_times(1.0, 0.2, 0.1)
WORK = WorkloadProfile(
    turns=constant(4),
    prompt_tokens=constant(100),
    new_tokens=constant(50),
    generated_tokens=constant(20),
    env_s=constant(3),
    turn_overhead_s=0.2,
)
BUSY = replace(WORK, env_s=constant(0), turn_overhead_s=0.0)
"""Engines and nothing else."""
STATIC = replace(BUSY, prompt_tokens=constant(1000), new_tokens=constant(0), retained=0.0)
"""Contexts of 1,000 tokens and what a turn generates, from the first turn to the last."""
PLATFORM = platform_of({1: TIMES, 2: TIMES}, 2048)
TOKEN_S = (0.01 + 2.048) / 2048
"""Prefill of a token in a full chunk."""
ALONE_S = 4 * 0.24 + 4 * 3 + 4 * 0.2
"""Of all turns, but for prefill."""


def predict(
    targets: list[Target] | Candidates,
    work: WorkloadProfile = WORK,
    platform: Platform = PLATFORM,
    progress: Progress | None = None,
    predictor: FluidPredictor | None = None,
) -> Predictions:
    candidates = targets if isinstance(targets, Candidates) else candidates_of(targets)
    forecast = (predictor or FluidPredictor()).forecast(
        Profile(workload=work, platform=platform), progress or fresh_batch(1, 1)
    )
    return forecast(candidates)


def close_s(text: str, trajectories: int = 1, append: int = 0, **given: WorkloadProfile | Platform) -> float:
    found = predict([target(text, append)], progress=fresh_batch(1, trajectories), **given)  # type: ignore[arg-type]
    assert found.infeasible.tolist() == [Infeasible.NO]
    return float(found.close_s[0])


def room(capacity: int, *, decode: int = 10**8, hand_off: HandOff | None = None) -> Platform:
    """KV of so many tokens on workers of tp 1, and of tp 2."""
    return Platform(
        by_tp={
            1: engine_profile(1, TIMES, capacity=capacity, hand_off=hand_off),
            2: engine_profile(2, TIMES, capacity=decode, hand_off=hand_off),
        }
    )


def test_what_it_says_of_itself() -> None:
    predictor = FluidPredictor()
    assert (predictor.name, predictor.appends) == ("pearl", True)
    assert (predictor.relative_error, predictor.bounds) == (RELATIVE_ERROR, APPEND_TOKENS) == (0.1, (0, 256, 2048))


class TestOneAlone:
    @pytest.mark.parametrize("text", ["1C", "8C", "1C@tp2"])
    def test_colocated(self, text: str) -> None:
        """The sum of its turns, whatever stands beside it: 100 + 3 * 50 ms of prefill."""
        assert close_s(text) == pytest.approx(ALONE_S + 0.25, rel=3e-3)

    @pytest.mark.parametrize("text", ["1P1D", "5P3D", "1P@tp2+2D@tp1"])
    def test_disaggregated(self, text: str) -> None:
        """Prefill in iterations of its own takes 10 ms more each time."""
        assert close_s(text) == pytest.approx(ALONE_S + 0.29, rel=1e-3)

    def test_many_decode_workers_do_not_keep_it_waiting(self) -> None:
        assert close_s("1P32D") == pytest.approx(ALONE_S + 0.29, rel=5e-3)

    def test_hand_offs(self) -> None:
        """4 hand-offs of 0.5 s, and 250 tokens of 2 bytes that take a millisecond each."""
        platform = Platform(
            by_tp={1: engine_profile(1, TIMES, kv_bytes=2, hand_off=HandOff(fixed_s=0.5, s_per_byte=0.001))}
        )
        assert close_s("1P1D", platform=platform) == pytest.approx(ALONE_S + 0.29 + 2 + 0.5, rel=1e-3)
        assert close_s("1C", platform=platform) == pytest.approx(ALONE_S + 0.25, rel=3e-3)

    def test_append_prefill(self) -> None:
        """Only the prompt is handed off; replies take 50 ms on the decode worker."""
        platform = platform_of({1: TIMES}, 2048, HandOff(fixed_s=0.5, s_per_byte=0.001))
        assert close_s("1P1D", append=50, platform=platform) == pytest.approx(
            ALONE_S + 0.11 + 0.15 + 0.5 + 0.1, rel=1e-3
        )
        handed = ALONE_S + 0.29 + 2 + 0.25
        assert close_s("1P1D", append=49, platform=platform) == pytest.approx(handed, rel=1e-3)

    def test_without_readback_the_last_answer_is_computed_again(self) -> None:
        """20 tokens at the price of a full chunk, half of them where half is retained; not by append-prefill."""
        platform = replace(PLATFORM, readback=False)
        assert close_s("1P1D", platform=platform) == pytest.approx(ALONE_S + 0.29 + 60 * TOKEN_S, rel=1e-3)
        half = replace(WORK, retained=0.5)
        assert close_s("1P1D", work=half, platform=platform) == pytest.approx(ALONE_S + 0.29 + 30 * TOKEN_S, rel=1e-3)
        assert close_s("1P1D", append=50, platform=platform) == close_s("1P1D", append=50)
        assert close_s("1C", platform=platform) == close_s("1C")

    def test_huge_waits_are_all_there_is(self) -> None:
        patient = replace(WORK, env_s=constant(1e6))
        for text in ("1C", "3C", "1P1D", "1P3D", "3P1D"):
            assert close_s(text, 16, work=patient) == pytest.approx(4e6, rel=1e-4)


class TestManyAtOnce:
    def test_a_colocated_worker_is_never_beyond_its_work(self) -> None:
        """64 trajectories: a turn is at least 1/64 of 20 iterations of 138 ms, and its prefill."""
        least_s = 64 * 4 * (20 * 0.138 / 64) + 64 * 0.25
        assert least_s * 0.99 <= close_s("1C", 64, work=BUSY) <= least_s * 1.05

    def test_workers_share(self) -> None:
        one, four = close_s("1C", 16, work=BUSY), close_s("4C", 64, work=BUSY)
        assert four == pytest.approx(one, rel=0.02)

    def test_no_more_than_a_worker_runs_at_once(self) -> None:
        """At most 4: 20 iterations of 18 ms for 4 turns, and the prefill of 3 others; a quarter as many waves for 4 workers."""
        platform = replace(PLATFORM, max_sequences=4)
        want = 64 * (4 * 20 * 0.018 + 3 * 0.25) / 4
        assert close_s("1C", 64, work=BUSY, platform=platform) == pytest.approx(want, rel=0.02)
        assert close_s("4C", 64, work=BUSY, platform=platform) == pytest.approx(want / 4, rel=0.02)

    def test_no_more_than_fit_run_at_once(self) -> None:
        """Of contexts of 1,010 in decode: 4, in 18 ms per token. The prompts before fill the prefill pool."""
        found = close_s("1P@tp2+1D@tp1", 64, append=1, work=STATIC, platform=room(4040))
        assert found == pytest.approx(64 * 1000 * TOKEN_S / 0.97 + 3 * 64 * 20 * 0.018 / 4, rel=1e-3)

    @pytest.mark.parametrize("prefill", [1, 2])
    def test_a_full_prefill_pool(self, prefill: int) -> None:
        """512 * 4 turns of 1,000 tokens packed into full chunks, at 97 % of the time of the pool."""
        heavy = replace(BUSY, prompt_tokens=constant(1000), new_tokens=constant(1000))
        want = 512 * 4 * 1000 * TOKEN_S / 0.97 / prefill
        assert close_s(f"{prefill}P{7 * prefill}D", 512, work=heavy) == pytest.approx(want, rel=1e-6)

    def test_a_full_decode_pool(self) -> None:
        """Prefill hides behind it: 64 sequences, but for the one in prefill."""
        light = replace(BUSY, prompt_tokens=constant(1), new_tokens=constant(1))
        assert close_s("4P1D", 64, work=light) == pytest.approx(4 * 20 * 0.138, rel=0.01)

    def test_append_prefill_relieves_a_full_prefill_pool(self) -> None:
        """Only prompts, 100 tokens each, are left to it; with 2,000 of 32 workers it is all there is."""
        work = replace(BUSY, prompt_tokens=constant(1000))
        with_append, without = (close_s("1P31D", 512, append=append, work=work) for append in (50, 0))
        assert without == pytest.approx(512 * (1000 + 150) * TOKEN_S / 0.97, rel=0.05)
        assert with_append == pytest.approx(512 * 1000 * TOKEN_S / 0.97 + 3 * 20 * 0.045, rel=0.05)

    def test_fewer_trajectories_go_faster(self) -> None:
        """Half of 64 end after 4 turns, half after 8: the second half runs at the pace of 32."""
        halves = replace(BUSY, turns=Distribution((4.0, 8.0), (0.5, 0.5)))
        found, all_64, all_32 = (
            close_s("1C", 64, work=halves),
            close_s("1C", 64, work=BUSY),
            close_s("1C", 32, work=BUSY),
        )
        assert found == pytest.approx(all_64 + all_32 - 32 * 0.05, rel=0.02)


class TestKvCapacity:
    """Need of 64 contexts whose prefix has 1,000 tokens: 64,000."""

    @pytest.mark.parametrize(
        ("capacity", "lost"), [(64_000, 0), (53_333, 500), (48_000, 750), (42_667, 1000), (30_000, 1000)]
    )
    def test_colocated_workers_compute_again_what_no_longer_fits(self, capacity: int, lost: int) -> None:
        """5/6 of the need: a half, 3/4: three quarters, 2/3: all; as if so many more tokens were new."""
        more = replace(STATIC, new_tokens=constant(lost))
        found = close_s("1C", 64, work=STATIC, platform=room(capacity, decode=capacity))
        running = replace(PLATFORM, max_sequences=min(64, int(capacity / 1010)))
        assert found == pytest.approx(close_s("1C", 64, work=more, platform=running), rel=0.04)

    def test_twice_the_workers_hold_twice_as_much(self) -> None:
        tight = close_s("2C", 64, work=STATIC, platform=room(32_000))
        assert tight == pytest.approx(close_s("2C", 64, work=STATIC), rel=2e-3)
        assert close_s("2C", 64, work=STATIC, platform=room(30_000)) > 1.2 * tight

    @pytest.mark.parametrize(("capacity", "lost"), [(53_333, 500), (48_000, 750), (42_667, 1000), (30_000, 1000)])
    def test_prefill_workers_too(self, capacity: int, lost: int) -> None:
        """A prompt of 1,000 tokens and three times what was lost, at 97 % of the time of the pool."""
        found = close_s("1P@tp1+15D@tp2", 64, work=STATIC, platform=room(capacity))
        assert found == pytest.approx(64 * (1000 + 3 * lost) * TOKEN_S / 0.97, rel=2e-3)

    def test_prefill_workers_hold_all_that_fits(self) -> None:
        fits = close_s("1P@tp1+15D@tp2", 64, work=STATIC, platform=room(64_000))
        assert fits == close_s("1P@tp1+15D@tp2", 64, work=STATIC)
        assert fits == close_s("1P@tp1+15D@tp2", 64, work=STATIC, platform=room(90_000))
        assert fits < close_s("1P@tp1+15D@tp2", 64, work=STATIC, platform=room(63_000))

    def test_what_a_decode_worker_lost_is_moved_again(self) -> None:
        """Two contexts of 1,000 tokens, each a second in transit: only the first ones while 2,000 fit, else all four times."""
        slow = HandOff(fixed_s=0.0, s_per_byte=1.0)
        fits, half, lost = (
            close_s("1P@tp2+1D@tp1", 2, work=STATIC, platform=room(capacity, hand_off=slow))
            for capacity in (2000, 1667, 1330)
        )
        assert fits == pytest.approx(1000, abs=5)
        assert half == pytest.approx(1000 + 3 * 500, abs=5)
        assert lost == pytest.approx(4000, abs=5)

    def test_replies_whose_context_a_decode_worker_lost_go_to_prefill_workers(self) -> None:
        """Then append-prefill is none."""
        work = replace(WORK, prompt_tokens=constant(1000), env_s=constant(0))
        tight, wide = room(1300), room(10**7)
        assert close_s("1P@tp2+1D@tp1", 4, append=50, work=work, platform=tight) == pytest.approx(
            close_s("1P@tp2+1D@tp1", 4, work=work, platform=tight), rel=1e-9
        )
        assert close_s("1P@tp2+1D@tp1", 4, append=50, work=work, platform=wide) != pytest.approx(
            close_s("1P@tp2+1D@tp1", 4, work=work, platform=wide), rel=1e-3
        )


class TestTwoSides:
    def test_workers_alike_in_two_pools(self) -> None:
        """Of two tensor parallelisms with the same times."""
        assert close_s("1C@tp1+1C@tp2", 32) == pytest.approx(close_s("2C", 32), rel=1e-9)
        assert close_s("2C@tp1+2C@tp2", 32, work=BUSY) == pytest.approx(close_s("4C", 32, work=BUSY), rel=1e-9)

    @pytest.mark.parametrize(
        ("text", "alone"),
        [
            ("2C@tp1+2C@tp4", "2C@tp1"),
            ("2C@tp4+2C@tp1", "2C@tp1"),
            ("1P@tp1+2D@tp1+1C@tp4", "1P2D@tp1"),
            ("1P@tp4+1D@tp4+3C@tp1", "3C@tp1"),
        ],
    )
    def test_a_side_that_is_no_help_gets_nobody(self, text: str, alone: str) -> None:
        """A hundred times slower: one in ten on it would be too many, unless they only queue for prefill elsewhere."""
        platform = platform_of({1: TIMES, 4: SLOW}, 2048)
        assert close_s(text, 8, work=BUSY, platform=platform) == pytest.approx(
            close_s(alone, 8, work=BUSY, platform=platform), rel=2e-3 if "P" in alone else 1e-9
        )

    def test_both_help(self) -> None:
        """30 + 30 sequences instead of 60 on one side."""
        pair, colocated = close_s("2P3D", 60, work=BUSY), close_s("3C", 60, work=BUSY)
        both = close_s("2P3D+3C@tp2".replace("2P3D", "2P@tp1+3D@tp1"), 60, work=BUSY)
        assert both < 0.8 * min(pair, colocated)
        assert both > 0.4 * min(pair, colocated)

    @pytest.mark.parametrize("text", ["1C@tp1+1C@tp2", "1P@tp1+15D@tp2+1C@tp2"])
    @pytest.mark.parametrize(("held", "lost"), [(1.0, 0), (5 / 6, 500), (3 / 4, 750), (2 / 3, 1000), (0.5, 1000)])
    def test_prefixes_lie_where_there_is_room_for_them(self, text: str, held: float, lost: int) -> None:
        """Of the need of 64,000 both sides hold the same share, a quarter and three quarters of it, though they are as fast."""
        tight = room(int(16_000 * held + 1), decode=int(48_000 * held + 1))
        more = replace(STATIC, new_tokens=constant(lost))
        assert close_s(text, 64, work=STATIC, platform=tight) == pytest.approx(close_s(text, 64, work=more), rel=0.02)

    def test_shares_follow_what_a_side_can_do(self) -> None:
        """Three workers and one: three quarters and a quarter, of which 0.7 and 0.3 come within a tenth."""
        uneven = close_s("3C@tp1+1C@tp2", 64, work=BUSY)
        even = close_s("4C", 64, work=BUSY)
        assert even * (1 - 1e-9) <= uneven <= 1.1 * even


class TestTimeScale:
    @pytest.mark.parametrize("text", ["3C", "2P3D", "2P@tp1+3D@tp1+1C@tp1"])
    def test_twice_the_iteration_is_twice_the_time(self, text: str) -> None:
        slow = replace(PLATFORM, time_scale={1: 2.0})
        assert close_s(text, 24, work=BUSY, platform=slow) == pytest.approx(2 * close_s(text, 24, work=BUSY), rel=1e-9)

    def test_each_tensor_parallelism_has_its_own(self) -> None:
        slow = replace(PLATFORM, time_scale={1: 2.0})
        assert close_s("3C@tp2", 24, work=BUSY, platform=slow) == close_s("3C@tp2", 24, work=BUSY)
        assert close_s("1P@tp1+1D@tp2", platform=slow) == pytest.approx(ALONE_S + 2 * 0.29, rel=2e-3)
        assert close_s("1P@tp2+1D@tp1", platform=slow) == pytest.approx(ALONE_S + 0.96 + 0.29, rel=1e-3)

    def test_tables_of_nothing_leave_the_environment(self) -> None:
        nothing = platform_of({1: linear_times(0.0, 0.0, 0.0)}, 2048)
        assert close_s("1C", platform=nothing) == pytest.approx(12.8, rel=1e-6)
        assert close_s("1P1D", platform=nothing) == pytest.approx(12.8, rel=1e-6)


class TestPrefillBound:
    """A worker's time is all that there is, however little is generated: 1 s of prefill per turn, 12 ms of decode."""

    WORK = replace(BUSY, prompt_tokens=constant(1000), new_tokens=constant(1000), generated_tokens=constant(1))

    @pytest.mark.parametrize(("workers", "trajectories"), [(1, 1), (1, 2), (1, 8), (2, 8), (4, 64)])
    def test_colocated(self, workers: int, trajectories: int) -> None:
        least_s = max(4.0, 4 * trajectories / workers)
        found = close_s(f"{workers}C", trajectories, work=self.WORK)
        assert least_s <= found <= 1.2 * least_s

    def test_waits_do_not_make_it_less(self) -> None:
        """8 trajectories and a wait of 1 s: 32 s of prefill."""
        assert close_s("1C", 8, work=replace(self.WORK, env_s=constant(1))) >= 32

    def test_append_prefill_is_bound_too(self) -> None:
        """All later turns are short enough: 3 s of each of 8 on one decode worker."""
        assert close_s("8P1D", 8, append=1000, work=self.WORK) >= 24


class TestError:
    def test_of_the_model(self) -> None:
        """Of constant lengths and durations there is no luck."""
        found = predict([target("1C")])
        assert found.error_s[0] == pytest.approx(0.1 * found.close_s[0], rel=1e-4)
        found = predict([target("1C")], predictor=FluidPredictor(relative_error=0.25))
        assert found.error_s[0] == pytest.approx(0.25 * found.close_s[0], rel=1e-4)

    def test_of_the_luck_of_lengths(self) -> None:
        """One trajectory of 1, 5 or 9 turns: deviation 4 sqrt(0.4) turns, each 0.24 + 0.05 + 0.2 s and 4/5 of a wait."""
        work = replace(WORK, turns=Distribution((1.0, 5.0, 9.0), (0.2, 0.6, 0.2)))
        found = predict([target("1C")], work=work)
        turn_s = 0.49 + 3
        assert found.close_s[0] == pytest.approx(0.05 + 5 * turn_s, rel=5e-3)
        assert found.error_s[0] == pytest.approx(
            math.hypot(0.1 * found.close_s[0], 4 * math.sqrt(0.4) * turn_s), rel=0.02
        )

    @pytest.mark.parametrize(
        ("env_s", "generated", "cv"),
        [
            # Over 3 + 0.24 s: a wait of 0 or 6 s; 10 or 30 tokens, 120 or 360 ms; both.
            (Distribution((0.0, 6.0), (0.5, 0.5)), constant(20), 3 / 3.24),
            (constant(3), Distribution((10.0, 30.0), (0.5, 0.5)), 0.12 / 3.24),
            (
                Distribution((0.0, 6.0), (0.5, 0.5)),
                Distribution((10.0, 30.0), (0.5, 0.5)),
                math.hypot(3, 0.12) / 3.24,
            ),
        ],
    )
    def test_of_the_luck_of_durations(self, env_s: Distribution, generated: Distribution, cv: float) -> None:
        """Of 4 turns, cv * sqrt(4) turns. A turn: 3.49 s."""
        found = predict([target("1C")], work=replace(WORK, env_s=env_s, generated_tokens=generated))
        assert found.close_s[0] == pytest.approx(ALONE_S + 0.25, rel=3e-3)
        luck_s = cv * 2 * (0.24 + 0.05 + 0.2 + 3)
        assert found.error_s[0] == pytest.approx(math.hypot(0.1 * found.close_s[0], luck_s), rel=0.01)

    def test_durations_are_those_of_the_first_parallelism_at_half_the_turns(self) -> None:
        """Its scale included; at 4096 tokens a sequence costs an eighth more: 20 * (0.01 + 0.00225) s, all of it generation."""
        contexts = (1, 8192)
        times = linear_times(0.01, 0.002, 0.001, contexts=contexts)
        work = replace(
            BUSY,
            prompt_tokens=constant(4096 - 140),
            generated_tokens=Distribution((10.0, 30.0), (0.5, 0.5)),
            turn_overhead_s=0.49,
        )
        platform = replace(platform_of({2: TIMES, 1: times}, 2048), time_scale={1: 2.0})
        found = predict([target("1C@tp2")], work=work, platform=platform)
        cv = 0.5
        last_s = 0.24 + 0.05 + 0.49
        luck_s = math.sqrt(float(found.error_s[0]) ** 2 - (0.1 * float(found.close_s[0])) ** 2)
        assert luck_s == pytest.approx(cv * 2 * last_s, rel=1e-2)

    def test_without_any_time_there_is_no_luck(self) -> None:
        nothing = platform_of({1: linear_times(0.0, 0.0, 0.0)}, 2048)
        found = predict(
            [target("1C")], work=replace(BUSY, generated_tokens=Distribution((1.0, 9.0), (0.5, 0.5))), platform=nothing
        )
        assert found.close_s[0] == pytest.approx(0, abs=1e-6)
        assert found.error_s[0] == pytest.approx(0, abs=1e-6)


NOBODY = Target(shape=Shape(()))


def test_what_cannot_serve_takes_for_ever() -> None:
    """Beside what can, and in its place; `test_feasible` has the reasons."""
    only = Platform(by_tp={2: PLATFORM.by_tp[2], 4: engine_profile(4, TIMES, capacity=1)})
    fleets = [target("1C@tp2"), NOBODY, target("1P1D@tp2"), target("1C@tp1"), target("1C@tp4")]
    found = predict(fleets, platform=only)
    reasons = [Infeasible.NO, Infeasible.NO_WORKERS, Infeasible.NO, Infeasible.UNKNOWN_TP, Infeasible.KV_CAPACITY]
    assert found.infeasible.tolist() == reasons
    assert found.close_s.tolist() == pytest.approx(
        [ALONE_S + 0.25, math.inf, ALONE_S + 0.29, math.inf, math.inf], rel=5e-3
    )
    assert np.isfinite(found.error_s).tolist() == [True, False, True, False, False]


class TestWhoIsComing:
    """Others begin on the way, when an update ends: engines load weights, contexts are computed again, the fleet is shared.

    Contexts of 1,000 tokens from the first turn to the last; 8 after one of 4 turns, 2 1/2 turns left; 1 or 8 are coming.
    """

    @staticmethod
    def progress(coming: int, coming_s: float, pause_s: float = 0.0) -> Progress:
        return Progress(
            batch_trajectories=8,
            unfinished=8,
            live_groups=1,
            needed_groups=1,
            running={1: 8},
            coming=coming,
            coming_s=coming_s,
            pause_s=pause_s,
        )

    def close_s(self, text: str, work: WorkloadProfile, *args: float, platform: Platform = PLATFORM) -> float:
        return float(predict([target(text)], work, platform, self.progress(*args)).close_s[0])  # type: ignore[arg-type]

    WAITING = replace(STATIC, env_s=constant(1e4))
    """All time is waiting: whoever shares the fleet does not matter, so that what is left is pauses and contexts."""
    SHARED = replace(STATIC, prompt_tokens=constant(1))
    """Nothing to compute again, and nobody waits: what is left is who shares the fleet."""

    @pytest.mark.parametrize(
        ("text", "theta", "factor", "prompt"),
        [
            ("1C", 1.0, 1.0, 1.0),
            ("4C", 0.0, 1 / 4, 1 / 4),
            ("1C@tp1+3C@tp2", 1.0, 1 / 4, 1 / 4),
            # A half generates and is computed again on 3 decode workers, the other half and those who come wait for 2.
            ("2P3D", 1.0, 0.5 * 0.5 / 3 + 0.5 * 0.5 / 2, 0.5 / 2),
            # f = 1/4.
            ("1P2D", 3.0, 0.25 * 0.25 / 2 + 0.75 * 0.75, 0.75),
            ("1P2D", 0.0, 1 / 2, 0.0),
        ],
    )
    def test_contexts_are_computed_again(self, text: str, theta: float, factor: float, prompt: float) -> None:
        """8 of 1,000 tokens, and 1 or 2 prompts of 1,000, at the price of a full chunk."""
        work = replace(self.WAITING, theta=theta)
        alone = self.close_s(text, work, 0, 12_000.0)
        for coming in (1, 2):
            more = self.close_s(text, work, coming, 12_000.0) - alone
            assert more == pytest.approx((8_000 * factor + coming * 1_000 * prompt) * TOKEN_S, rel=0.02)

    def test_each_parallelism_at_its_own_pace(self) -> None:
        """Prefill and decode workers of which one kind is twice as slow; a half generates."""
        work = replace(self.WAITING, theta=1.0)
        slow = replace(PLATFORM, time_scale={2: 2.0})
        for text, there, queue in (("1P@tp1+1D@tp2", 2.0, 1.0), ("1P@tp2+1D@tp1", 1.0, 2.0)):
            more = self.close_s(text, work, 1, 12_000.0, platform=slow) - self.close_s(
                text, work, 0, 12_000.0, platform=slow
            )
            want = 0.5 * 0.5 * 8_000 * there + 0.5 * (0.5 * 8_000 + 1_000) * queue
            assert more == pytest.approx(want * TOKEN_S, rel=0.02)

    @pytest.mark.parametrize(
        ("coming_s", "pause_s", "stands_s"),
        [
            (12_000.0, 500.0, 500.0),
            (12_000.0, 0.0, 0.0),
            # All that is left of an update may be its pause, and no more of it is left than of the update.
            (300.0, 300.0, 300.0),
            (100.0, 400.0, 100.0),
            # It begins before the close, after 25,000 s, though it would end later.
            (25_300.0, 500.0, 500.0),
        ],
    )
    @pytest.mark.parametrize("text", ["2C", "1P1D"])
    def test_engines_stand_still(self, text: str, coming_s: float, pause_s: float, stands_s: float) -> None:
        refilled = self.close_s(text, self.WAITING, 1, 12_000.0)
        assert self.close_s(text, self.WAITING, 1, coming_s, pause_s) - refilled == pytest.approx(stands_s, abs=2.0)

    @pytest.mark.parametrize(("coming_s", "pause_s"), [(26_000.0, 0.0), (26_000.0, 500.0), (1e9, 1e3)])
    def test_who_comes_after_the_close_is_nobody(self, coming_s: float, pause_s: float) -> None:
        alone = self.close_s("2C", self.WAITING, 0, 0.0)
        assert 25_000 < alone < 25_500
        assert self.close_s("2C", self.WAITING, 1, coming_s, pause_s) == alone

    @pytest.mark.parametrize("when", [0.0, 0.2, 0.5, 0.9])
    @pytest.mark.parametrize("text", ["1C", "2P1D"])
    def test_the_fleet_is_shared_from_then_on(self, text: str, when: float) -> None:
        """At the pace of 8 until then, at that of 16 for the turns that are left then."""
        eight = self.close_s(text, self.SHARED, 0, 0.0)
        sixteen = float(
            predict([target(text)], self.SHARED, progress=replace(self.progress(0, 0.0), running={1: 16})).close_s[0]
        )
        assert sixteen > 1.2 * eight
        found = self.close_s(text, self.SHARED, 8, when * eight)
        assert found == pytest.approx(when * eight + (1 - when) * sixteen, rel=0.02)

    def test_bounds_that_were_not_declared(self) -> None:
        """Those who come are worked out anew with them."""
        progress = self.progress(8, 0.2)
        forecast = FluidPredictor(bounds=(0,)).forecast(Profile(workload=BUSY, platform=PLATFORM), progress)
        first = forecast(candidates_of([target("1P1D")])).close_s[0]
        append = forecast(candidates_of([target("1P1D", 64)])).close_s[0]
        assert append == predict([target("1P1D", 64)], BUSY, progress=progress).close_s[0] != first
        assert forecast(candidates_of([target("1P1D")])).close_s[0] == first


FLEETS = [
    target(text, append)
    for text in ("1C", "3C@tp2", "1C@tp1+2C@tp2", "1P3D", "2P@tp2+2D@tp1", "1P1D+1C", "4P1D", "2C@tp4", "7C")
    for append in (0, 64, 256, 2048)
]


class TestAtOnce:
    def test_many_like_one_by_one(self) -> None:
        """More than a block of each kind, shuffled with those that cannot serve."""
        fleets = FLEETS * 65
        hybrids, apart = (sum(str(fleet.shape) == text for fleet in fleets) for text in ("1P1D1C", "1C@tp1+2C@tp2"))
        assert hybrids == apart == 260 > BLOCK == 256
        progress = fresh_batch(4, 8)
        found = predict(fleets, progress=progress)
        for place, fleet in enumerate(FLEETS):
            alone = predict([fleet], progress=progress)
            for every in range(place, len(fleets), len(FLEETS)):
                assert found.infeasible[every] == alone.infeasible[0]
                assert found.close_s[every] == pytest.approx(alone.close_s[0], rel=1e-12)
                assert found.error_s[every] == pytest.approx(alone.error_s[0], rel=1e-12)

    def test_bounds_that_were_not_declared(self) -> None:
        """The same as if they were, and then again."""
        forecast = FluidPredictor(bounds=(0,)).forecast(Profile(workload=WORK, platform=PLATFORM), fresh_batch(1, 8))
        declared = FluidPredictor(bounds=(64,)).forecast(Profile(workload=WORK, platform=PLATFORM), fresh_batch(1, 8))
        plain, append = candidates_of([target("1P1D")]), candidates_of([target("1P1D", 64)])
        first = forecast(plain).close_s[0]
        assert forecast(append).close_s[0] == declared(append).close_s[0] != first
        assert forecast(plain).close_s[0] == declared(plain).close_s[0] == first

    def test_no_candidates(self) -> None:
        found = predict([])
        assert (len(found.close_s), len(found.error_s), len(found.infeasible)) == (0, 0, 0)

    def test_a_closed_batch_takes_no_time(self) -> None:
        closed = Progress(batch_trajectories=4, unfinished=0, live_groups=2, needed_groups=0, running={1: 3})
        found = predict([target("1C"), NOBODY], progress=closed)
        assert found.close_s.tolist() == found.error_s.tolist() == [0.0, 0.0]
        assert found.infeasible.tolist() == [Infeasible.NO, Infeasible.NO_WORKERS]
