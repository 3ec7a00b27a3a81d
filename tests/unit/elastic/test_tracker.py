"""What the tracker makes of a step's turns and trajectories, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from pearl.core.distribution import Distribution, constant
from pearl.core.makespan import Profile
from pearl.core.priors import platform_prior, workload_prior
from pearl.core.workload import OUTLIER, WorkloadProfile, WorkloadSample, likeness_of, refit_workload
from pearl.elastic.meter import Meter
from pearl.elastic.tracker import PRIOR_TRAJECTORIES, Tracker
from pearl.records.journal import GroupEntry, StepEntry, TrajectoryEntry, TurnEntry
from pearl.testing.journal import ListSink

PROFILE = Profile(workload=workload_prior("webshop"), platform=platform_prior("qwen3-8b-h100"))
SHARE = 0.25


def turn_entry(turn: int, prompt: int, generated: int, *, generate_s: float = 6.0, env_s: float = 2.0) -> TurnEntry:
    return TurnEntry(
        at_s=1.0,
        trajectory="g0.0",
        turn=turn,
        prompt=prompt,
        generated=generated,
        computed=0,
        end="stop",
        versions=[],
        workers=[],
        generate_s=generate_s,
        env_s=env_s,
    )


def end_entry(status: str, turns: int, group: str = "g0") -> TrajectoryEntry:
    return TrajectoryEntry(
        at_s=1.0,
        trajectory=f"{group}.0",
        group=group,
        status=status,
        turns=turns,
        generated=0,
        reward=0.0,
        success=None,
        started_s=0.0,
    )


def group_entry(group: str) -> GroupEntry:
    return GroupEntry(at_s=1.0, group=group, task="t", seed=0, status="complete", admitted_version=0, attempts=1)


def step_entry(train_s: float, publish_s: float) -> StepEntry:
    return StepEntry(
        at_s=2.0,
        version=1,
        groups=[],
        samples=0,
        trained_tokens=0,
        staleness_tokens={},
        wait_s=0,
        train_s=train_s,
        publish_s=publish_s,
        reward_mean=0,
        success_mean=None,
    )


def tracker(profile: Profile = PROFILE) -> Tracker:
    return Tracker(sink=ListSink(), profile=profile, share=SHARE)


def step(one: Tracker, trajectories: int, env_s: float, *, turns: int = 1) -> None:
    """So many trajectories of so many turns, each with the same wait; then a refit."""
    for _ in range(trajectories):
        for turn in range(turns):
            one.write(turn_entry(turn, 100, 10, env_s=env_s))
        one.write(end_entry("done", turns))
    one.refit()


def test_a_step_is_refitted_as_its_sample_says() -> None:
    one = tracker()
    for entry in (
        turn_entry(0, 500, 40),
        turn_entry(1, 70, 50, generate_s=2.0, env_s=6.0),
        turn_entry(0, 600, 30),
        end_entry("done", 2),
        end_entry("truncated_turns", 9),
        end_entry("cancelled", 1),  # says nothing of how long they are
        end_entry("env_lost", 1),
    ):
        one.write(entry)
    sample = WorkloadSample(
        turns=[2.0, 9.0],
        prompt_tokens=[500.0, 600.0],
        new_tokens=[70.0],
        generated_tokens=[40.0, 50.0, 30.0],
        env_s=[2.0, 6.0, 2.0],
        decoding_share=14 / 24,
    )
    one.refit()
    assert one.profile.workload == refit_workload(PROFILE.workload, sample, SHARE).profile
    assert one.profile.platform is PROFILE.platform
    before, after = PROFILE.workload, one.profile.workload
    assert after.prompt_tokens.mean == pytest.approx(0.75 * before.prompt_tokens.mean + 0.25 * 550)


def test_the_profile_stays_between_refits_and_without_anything_new() -> None:
    one = tracker()
    one.write(turn_entry(0, 5000, 4000))
    assert one.profile is PROFILE
    one.refit()
    refitted = one.profile
    one.refit()
    assert one.profile.workload == refitted.workload  # what was seen counts once


def test_everything_is_passed_on_in_order() -> None:
    sink = ListSink()
    one = Tracker(sink=sink, profile=PROFILE, share=SHARE)
    entries = [turn_entry(0, 1, 1), end_entry("done", 1), group_entry("g0"), step_entry(0, 0)]
    for entry in entries:
        one.write(entry)
    asyncio.run(one.flush())
    assert (sink.entries, sink.flushes) == (entries, 1)


def test_numbers_that_are_no_use_are_counted() -> None:
    one = tracker()
    one.write(turn_entry(0, 500, 40, env_s=float("nan")))
    one.refit()
    assert one.ignored > 0


GUESS = Profile(
    workload=WorkloadProfile(
        turns=Distribution((1.0, 50.0), (0.9, 0.1)),
        prompt_tokens=constant(1000),
        new_tokens=constant(100),
        generated_tokens=constant(10),
        env_s=Distribution((0.0, 100.0), (0.9, 0.1)),
    ),
    platform=platform_prior("qwen3-8b-h100"),
)
"""Mean wait 10 s."""


class TestPrior:
    def test_a_step_that_has_shown_enough_takes_its_place(self) -> None:
        """Of the tail of the guess nothing is left."""
        assert PRIOR_TRAJECTORIES == 8
        one = tracker(GUESS)
        step(one, 8, 3.0, turns=2)
        assert one.profile.workload.env_s == constant(3)
        assert one.profile.workload.turns == constant(2)
        assert one.profile.workload.prompt_tokens == constant(100)
        assert one.known == 8

    @pytest.mark.parametrize(("trajectories", "share"), [(7, 7 / 15), (4, 4 / 12), (2, SHARE), (1, SHARE)])
    def test_before_it_is_worth_eight_trajectories(self, trajectories: int, share: float) -> None:
        """But a step is never worth less than its share."""
        one = tracker(GUESS)
        step(one, trajectories, 3.0)
        assert one.profile.workload.env_s.mean == pytest.approx((1 - share) * 10 + share * 3)

    def test_it_is_dropped_as_well_after_a_step_with_less(self) -> None:
        one = tracker(GUESS)
        step(one, 7, 50.0)
        step(one, 8, 3.0)
        assert one.profile.workload.env_s == constant(3)

    def test_it_fades_where_no_step_shows_enough(self) -> None:
        """4 of 12, 4 of 12; then eight are known: 4 of 12; 4 of 16; then the share."""
        one, mean = tracker(GUESS), 10.0
        for share in (1 / 3, 1 / 3, 1 / 3, SHARE, SHARE):
            step(one, 4, 3.0)
            mean += share * (3 - mean)
            assert one.profile.workload.env_s.mean == pytest.approx(mean)

    def test_what_did_not_end_is_no_evidence(self) -> None:
        one = tracker(GUESS)
        for status in ("cancelled", "env_lost"):
            for _ in range(8):
                one.write(turn_entry(0, 100, 10, env_s=3.0))
                one.write(end_entry(status, 1))
        one.refit()
        assert one.known == 0
        assert one.profile.workload.env_s.mean == pytest.approx(0.75 * 10 + 0.25 * 3)
        assert one.profile.workload.turns == GUESS.workload.turns


class TestOddSteps:
    def test_one_hung_call_in_the_first_step(self) -> None:
        """It counts as four times the largest of the guess, 400 s of 3,600, and as one of 16 waits."""
        one = tracker(GUESS)
        one.write(turn_entry(0, 100, 10, env_s=3600.0))
        for _ in range(15):
            one.write(turn_entry(0, 100, 10, env_s=3.0))
        for _ in range(8):
            one.write(end_entry("done", 2))
        one.refit()
        assert one.profile.workload.env_s.largest == OUTLIER * 100.0
        assert one.profile.workload.env_s.mean == pytest.approx((400 + 15 * 3) / 16)

    def test_an_odd_first_step_is_forgotten_as_others_follow(self) -> None:
        """Half of it is left after a second one of its size, a third, a quarter after; then the share of a step stays."""
        one = tracker(GUESS)
        step(one, 16, 100.0)
        left = 1.0
        for keeps in (1 / 2, 2 / 3, 3 / 4, 3 / 4, 3 / 4):
            step(one, 16, 0.0)
            left *= keeps
            assert one.profile.workload.env_s.mean == pytest.approx(100 * left)

    def test_no_later_step_moves_anything_far(self) -> None:
        """However much it shows, and however odd: as much of the way as its trajectories among all, or the share."""
        one = tracker(GUESS)
        for _ in range(10):
            step(one, 16, 10.0)
        step(one, 16, 40.0)
        assert one.profile.workload.env_s.mean == pytest.approx(10 + SHARE * 30)
        for _ in range(20):
            step(one, 16, 10.0)
        before = one.profile.workload.env_s.mean
        step(one, 16, 1e9)  # a broken clock
        limit = OUTLIER * 100.0
        assert one.profile.workload.env_s.mean - before < SHARE * limit

    def test_a_step_with_much_more_than_all_before(self) -> None:
        """24 of 32."""
        one = tracker(GUESS)
        step(one, 8, 10.0)
        step(one, 24, 20.0)
        assert one.profile.workload.env_s.mean == pytest.approx(10 / 4 + 20 * 3 / 4)


class TestLikeness:
    def test_of_groups_that_ended(self) -> None:
        """Those that did not, and trajectories without an end that counts, say nothing."""
        one = tracker()
        groups = {"g0": [2, 3], "g1": [5, 5, 9], "g2": [4], "g3": [1, 1]}
        for group, turns in groups.items():
            for each in turns:
                one.write(end_entry("done", each, group))
            one.write(end_entry("cancelled", 77, group))
        for group in ("g2", "g1", "g0", "never begun"):
            one.write(group_entry(group))
        one.refit()
        want = likeness_of([[4], [5, 5, 9], [2, 3]])
        assert want is not None
        assert one.profile.workload.likeness == pytest.approx(want)  # eight ended: nothing of the prior

    def test_of_a_group_that_ends_a_step_later_all_of_it(self) -> None:
        one, other = tracker(), tracker()
        for each in (one, other):
            each.write(end_entry("done", 2, "g0"))
            if each is one:
                each.refit()
            for turns, group in ((7, "g0"), (3, "g1"), (4, "g1")):
                each.write(end_entry("done", turns, group))
            for group in ("g0", "g1"):
                each.write(group_entry(group))
            each.refit()
        want = likeness_of([[2, 7], [3, 4]])
        assert want is not None
        assert one.profile.workload.likeness == pytest.approx(3 / 11 * want)
        assert other.profile.workload.likeness == pytest.approx(4 / 12 * want)

    def test_of_one_group_nothing_is_known(self) -> None:
        one = tracker(replace(PROFILE, workload=replace(PROFILE.workload, likeness=0.4)))
        for turns in (2, 7):
            one.write(end_entry("done", turns))
        one.write(group_entry("g0"))
        one.refit()
        assert one.profile.workload.likeness == 0.4


def test_what_an_update_takes() -> None:
    """The first one as it is; then a quarter of the way."""
    one = tracker()
    assert (one.update_s, one.publish_s) == (0.0, 0.0)
    one.write(step_entry(30.0, 10.0))
    assert (one.update_s, one.publish_s) == (40.0, 10.0)
    one.write(step_entry(70.0, 50.0))
    assert (one.update_s, one.publish_s) == (60.0, 20.0)


class TestTimeScale:
    class Fixed:
        """In a meter's place."""

        def __init__(self, ratios: Mapping[int, float]) -> None:
            self.ratios, self.ended = ratios, list[float]()

        def turn_ended(self, at_s: float) -> None:
            self.ended.append(at_s)

        def take(self) -> Mapping[int, float]:
            return self.ratios

    def measured(self, ratios: Mapping[int, float]) -> tuple[Tracker, Fixed]:
        one, meter = tracker(GUESS), self.Fixed(ratios)
        one.meter = cast(Meter, meter)
        return one, meter

    def test_it_follows_what_iterations_took(self) -> None:
        """At once what the first step showed; of the same ratio to that half, as a logarithm, in the second step of its size."""
        one, meter = self.measured({1: 1.5})
        step(one, 8, 3.0)
        assert one.profile.platform.time_scale == pytest.approx({1: 1.5})
        step(one, 8, 3.0)
        assert one.profile.platform.time_scale == pytest.approx({1: 1.5 * 1.5**0.5})
        assert meter.ended == [1.0] * 16

    def test_one_odd_step_counts_as_four_times_what_is_known(self) -> None:
        one, _ = self.measured({1: 1e6})
        step(one, 8, 3.0)
        assert one.profile.platform.time_scale == pytest.approx({1: 4.0})

    def test_nothing_measured_and_nothing_that_is_there(self) -> None:
        for ratios in ({}, {64: 2.0}):
            one, _ = self.measured(ratios)
            step(one, 8, 3.0)
            assert one.profile.platform == GUESS.platform
