"""How a batch drains: by hand where lengths are few, else against drawing trajectories and groups at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, gamma, norm

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.drain import SLICES, Drain, drain_of, joined
from pearl.core.pace import Pace
from pearl.core.progress import Progress, fresh_batch
from pearl.core.workload import WorkloadProfile


def work(turns: Distribution, likeness: float = 0.0) -> WorkloadProfile:
    return WorkloadProfile(
        turns=turns,
        likeness=likeness,
        prompt_tokens=constant(100),
        new_tokens=constant(10),
        generated_tokens=constant(10),
        env_s=constant(1),
    )


def pace_of(varying: float, cv: float) -> Pace:
    """Turns of which so much varies, by a gamma distribution cut into parts of equal weight, those of the tail finer."""
    if not cv:
        return Pace(generates=constant(1.0), waits=constant(0.0))
    ends = np.concatenate((np.arange(36) / 36, 1 - np.geomspace(1 / 36, 1e-6, 11)[1:], [1.0]))
    shape, scale = 1 / cv**2, varying * cv**2
    below = gamma.cdf(gamma.ppf(ends, shape), shape + 1)
    weights = np.diff(ends)
    values = shape * scale * np.diff(below) / weights
    return Pace(generates=constant(1 - varying), waits=distribution_of(values, weights))


STEADY = pace_of(0.0, 0.0)
"""Turns all alike."""


def drain(turns: Distribution, progress: Progress, pace: Pace = STEADY, likeness: float = 0.0) -> Drain:
    found = drain_of(work(turns, likeness), progress, pace)
    assert found is not None
    return found


def running(counts: dict[int, int], groups: int = 1, needed: int | None = None) -> Progress:
    """So many trajectories after so many turns, in groups of about the same size."""
    total = sum(counts.values())
    return Progress(
        batch_trajectories=max(1, total),
        unfinished=total,
        live_groups=groups,
        needed_groups=groups if needed is None else needed,
        running=counts,
    )


def positions(found: Drain) -> np.ndarray:
    """Where the slices are, in turns since now, from how long they are: a rule of Gauss for what follows the first turn."""
    nodes, _ = np.polynomial.legendre.leggauss(SLICES - 1)
    first = float(found.slice_turns[0])
    return np.concatenate(([first / 2], first + (found.turns - first) * (nodes + 1) / 2))


LONG = distribution_of(np.maximum(1, np.random.default_rng(1).lognormal(2.5, 0.6, 3000)).round())
"""Mean 14.5, up to 116."""


class TestConstantLengths:
    def test_a_fresh_batch(self) -> None:
        """8 turns each; all 12 are in flight until all end. Whoever begins is half a turn behind where the clock is."""
        found = drain(constant(8), fresh_batch(3, 4))
        assert found.turns == pytest.approx(8, rel=1e-6)
        assert found.spread_turns == pytest.approx(0, abs=1e-6)
        assert found.slice_turns.sum() == pytest.approx(8, rel=1e-6)
        assert found.slice_turns[0] == 1.0
        assert found.slice_turns @ positions(found) == pytest.approx(32, rel=1e-6)
        assert found.population == pytest.approx(np.full(SLICES, 12.0))
        assert found.first_share.tolist() == [1.0] + [0.0] * (SLICES - 1)
        assert found.turns_done[0] == 0.0
        late = positions(found) > 1.5
        assert found.turns_done[late] == pytest.approx(positions(found)[late] - 0.5, rel=1e-6)
        assert found.turns_done[1:][~late[1:]].tolist() == [1.0] * int((~late[1:]).sum())

    def test_single_turns(self) -> None:
        found = drain(constant(1), fresh_batch(2, 2))
        assert found.turns == pytest.approx(1, rel=1e-6)
        assert found.slice_turns[0] == pytest.approx(1, rel=1e-6)
        assert found.slice_turns[1:] == pytest.approx(np.zeros(SLICES - 1), abs=1e-6)
        assert found.population[0] == 4.0

    def test_in_the_middle(self) -> None:
        """After 3 of 8 turns 4 1/2 are left: who has begun is half way through a turn. No turn is a first one."""
        found = drain(constant(8), running({3: 5}))
        assert found.turns == pytest.approx(4.5, rel=1e-6)
        assert found.first_share.tolist() == [0.0] * SLICES
        assert found.turns_done == pytest.approx(3 + positions(found), rel=1e-6)
        assert found.population == pytest.approx(np.full(SLICES, 5.0))

    @pytest.mark.parametrize("done", [8, 9, 30])
    def test_beyond_every_length_there_is_one_more_turn(self, done: int) -> None:
        """Half of it, as of every turn that is under way; less than one, so the first slice is all there is."""
        found = drain(constant(8), running({done: 5}))
        assert found.turns == pytest.approx(0.5, rel=1e-6)
        assert found.slice_turns[0] == pytest.approx(0.5, rel=1e-6)
        assert found.turns_done[0] == pytest.approx(done + 0.25, rel=1e-6)
        assert found.first_share[0] == 0.0

    def test_a_length_without_weight_is_none(self) -> None:
        lengths = Distribution((8.0, 90.0), (1.0, 0.0))
        assert drain(lengths, running({8: 5})).turns == pytest.approx(0.5, rel=1e-6)
        assert drain(lengths, running({0: 5})).turns == pytest.approx(8, rel=1e-6)

    def test_just_below_every_length(self) -> None:
        assert drain(constant(8), running({7: 5})).turns == pytest.approx(0.5, rel=1e-6)
        assert drain(constant(8), running({6: 5})).turns == pytest.approx(1.5, rel=1e-6)

    def test_two_cohorts(self) -> None:
        """6 begin and have 8 turns to go, 2 have done 5 and leave after 2 1/2. Done in the first slice: 0 and 5 1/2."""
        found = drain(constant(8), running({5: 2, 0: 6}))
        assert found.turns == pytest.approx(8, rel=1e-4)
        assert found.population == pytest.approx(np.where(positions(found) < 2.5, 8.0, 6.0))
        assert found.first_share[0] == pytest.approx(0.75)
        assert found.first_share[1:].tolist() == [0.0] * (SLICES - 1)
        assert found.turns_done[0] == pytest.approx(5.5 * 2 / 8)
        two = int(np.flatnonzero((positions(found) > 1.5) & (positions(found) < 2.5))[0])
        at = positions(found)[two]
        assert found.turns_done[two] == pytest.approx((6 * (at - 0.5) + 2 * (5 + at)) / 8)

    def test_counts_of_nobody_do_not_matter(self) -> None:
        one, other = drain(constant(8), running({2: 5})), drain(constant(8), running({2: 5, 0: 0, 7: 0}))
        assert one.turns == other.turns
        assert one.turns_done.tolist() == other.turns_done.tolist()

    def test_groups_of_which_nothing_is_known_count_as_one_that_begins(self) -> None:
        found = drain(constant(8), running({}, groups=2))
        assert found.turns == pytest.approx(8, rel=1e-6)
        assert found.population.tolist() == [1.0] * SLICES
        assert found.first_share[0] == 1.0


class TestFewLengths:
    HALVES = Distribution((2.0, 10.0), (0.5, 0.5))

    def test_who_is_left(self) -> None:
        """Half of 16 leave after 2 turns; the last group wants 10."""
        found = drain(self.HALVES, fresh_batch(1, 16))
        assert found.turns == pytest.approx(10, rel=1e-4)
        assert found.population == pytest.approx(np.where(positions(found) < 2, 16.0, 8.0))

    def test_the_last_one_is_never_less_than_one(self) -> None:
        """0.6 of four trajectories are long, on average; none is with a chance of 0.85 ** 4."""
        found = drain(Distribution((2.0, 10.0), (0.85, 0.15)), fresh_batch(4, 1))
        assert found.turns == pytest.approx(2 + 8 * (1 - 0.85**4), rel=0.01)
        assert found.spread_turns == pytest.approx(8 * math.sqrt(0.85**4 * (1 - 0.85**4)), rel=0.01)
        assert found.population == pytest.approx(np.where(positions(found) < 2, 4.0, 1.0))

    @pytest.mark.parametrize("weight", [0.0, 0.002, 0.1])
    def test_a_little_more_weight_is_a_little_later(self, weight: float) -> None:
        """Of 64, in groups of 8."""
        turns = [drain(Distribution((5.0, 50.0), (1 - w, w)), fresh_batch(8, 8)).turns for w in (weight, weight + 2e-4)]
        assert 0 < turns[1] - turns[0] < 1.5 * 45 * 64 * 2e-4

    def test_what_is_known_of_who_is_beyond_the_short_length(self) -> None:
        """After 2 turns it is a long one: 10 - 2 - 1/2."""
        assert drain(self.HALVES, running({2: 4})).turns == pytest.approx(7.5, rel=1e-6)

    @pytest.mark.parametrize(
        ("needed", "turns", "spread"),
        [
            # 4 groups of one, lengths 1, 2, 3, 4 alike. More than i turns it takes the first with a chance of ((4 - i) / 4) ** 4:
            # 1, 81, 16, 1 of 256, and the second with 256, 189, 80, 13 of 256. Sums of these, and of (2 i + 1) times them.
            (1, 354 / 256, math.sqrt(586 / 256 - (354 / 256) ** 2)),
            (2, 538 / 256, math.sqrt(1314 / 256 - (538 / 256) ** 2)),
            # And the other way round.
            (3, 5 - 538 / 256, math.sqrt(1314 / 256 - (538 / 256) ** 2)),
            (4, 5 - 354 / 256, math.sqrt(586 / 256 - (354 / 256) ** 2)),
        ],
    )
    def test_the_needed_group(self, needed: int, turns: float, spread: float) -> None:
        found = drain(distribution_of([1, 2, 3, 4]), running({0: 4}, groups=4, needed=needed))
        assert found.turns == pytest.approx(turns, rel=0.015)
        assert found.spread_turns == pytest.approx(spread, rel=0.03)

    def test_a_group_waits_for_its_last(self) -> None:
        """Two of a group have both ended after k of 4 turns with a chance of (k / 4) ** 2."""
        lengths = distribution_of([1, 2, 3, 4])
        assert drain(lengths, running({0: 2})).turns == pytest.approx(4 - (1 + 4 + 9) / 16, rel=0.01)
        assert drain(lengths, running({0: 1})).turns == pytest.approx(2.5, rel=0.01)

    @pytest.mark.parametrize("lengths", range(3, 40, 4))
    def test_groups_of_a_broken_number(self, lengths: int) -> None:
        """Shares whose sum is not 1 to the last digit stay shares: the close lies between the ends."""
        turns = distribution_of(range(1, lengths + 1), [1 / n for n in range(1, lengths + 1)])
        for cohorts in ({0: 7}, {0: 7, 1: 5}, {0: 3, 1: 4, 2: 9}):
            found = drain(turns, running(cohorts, groups=3), pace_of(1.0, 0.05))
            assert lengths / 2 < found.turns < lengths * 1.2

    @pytest.mark.parametrize("weights", [(0.15, 0.70, 0.15), (0.4, 0.5, 0.1), (0.0, 1.0, 0.0)])
    def test_spread_of_one(self, weights: tuple[float, float, float]) -> None:
        """Lengths 1, 5, 9."""
        found = drain(Distribution((1.0, 5.0, 9.0), weights), running({0: 1}))
        mean = weights[0] + 5 * weights[1] + 9 * weights[2]
        square = weights[0] + 25 * weights[1] + 81 * weights[2]
        assert found.turns == pytest.approx(mean, rel=0.02)
        assert found.spread_turns == pytest.approx(math.sqrt(square - mean**2), rel=0.02, abs=1e-5)


class TestTurnsOfDifferentDuration:
    @pytest.mark.parametrize("varying", [1.0, 0.5])
    def test_one_trajectory(self, varying: float) -> None:
        """Mean 9 turns, deviation 0.2 * sqrt(9) of what varies."""
        found = drain(constant(9), running({0: 1}), pace_of(varying, 0.2))
        assert found.turns == pytest.approx(9, rel=1e-3)
        assert found.spread_turns == pytest.approx(0.6 * varying, rel=0.01)

    def test_nobody_ends_before_what_does_not_vary(self) -> None:
        """Of 4 turns 3 pass at least; after these waits differ much: all are in flight until then, and some long after 4."""
        found = drain(constant(4), running({0: 64}), pace_of(0.25, 3.0))
        at = positions(found)
        assert found.population[at < 3] == pytest.approx(np.full(int((at < 3).sum()), 64.0))
        assert found.population[at > 4].max() < 32
        assert found.turns > 8

    @pytest.mark.parametrize(("left", "cv"), [(4, 0.5), (16, 0.25), (16, 2.0), (4, 2.0)])
    def test_the_last_of_many(self, left: int, cv: float) -> None:
        """One group of 64 with waits drawn from the gamma distribution."""
        found = drain(constant(left), running({0: 64}), pace_of(1.0, cv))
        shape = left / cv**2
        last = np.random.default_rng(3).gamma(shape, cv**2, (20_000, 64)).max(axis=1)
        assert found.turns == pytest.approx(float(last.mean()), rel=0.02)
        assert found.spread_turns == pytest.approx(float(last.std()), rel=0.1)

    @pytest.mark.parametrize("waits", [constant(1.0), Distribution((0.0, 4.0), (0.75, 0.25))])
    def test_the_end_of_a_last_turn_is_half_of_a_mean_one(self, waits: Distribution) -> None:
        """Of those beyond every length no whole turn is left, and nothing that could vary."""
        found = drain(constant(8), running({8: 5, 9: 2}), Pace(generates=constant(0.0), waits=waits))
        assert found.turns == pytest.approx(0.5, abs=0.02)

    def test_how_far_the_latest_may_be(self) -> None:
        """1000 groups of 100, of 16 turns each: sums of gamma-distributed turns have a shape of 16 / 0.25 ** 2."""
        found = drain(constant(16), running({0: 100_000}, groups=1000), pace_of(1.0, 0.25))
        last = np.random.default_rng(5).gamma(256, 1 / 16, (200, 100_000)).max(axis=1)
        assert found.turns == pytest.approx(float(last.mean()), rel=5e-3)
        assert found.spread_turns == pytest.approx(float(last.std()), rel=0.15)


SOME, MUCH = pace_of(0.8, 0.5), pace_of(0.6, 3.0)
CASES = {
    "one batch": (fresh_batch(4, 16), SOME),
    "two batches": (fresh_batch(4, 16, batches=2), SOME),
    "heavy tails": (fresh_batch(4, 16), MUCH),
    "two batches, heavy tails": (fresh_batch(4, 16, batches=2), MUCH),
    "groups of one": (fresh_batch(48, 1), SOME),
    "one group": (fresh_batch(1, 32), SOME),
    "partly done": (running({0: 30, 5: 60, 20: 38}, groups=8, needed=3), SOME),
    "older than any": (running({10: 20, 130: 12}, groups=2), SOME),
    "steady turns": (fresh_batch(4, 16, batches=2), STEADY),
    "many cohorts": (running(dict.fromkeys(range(0, 60, 2), 3), groups=9, needed=4), SOME),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [LONG, distribution_of(range(1, 31))])
def test_like_trajectories_drawn_at_random(name: str, lengths: Distribution) -> None:
    """The close within 4 % of the mean of draws, and its spread of theirs; the population within 6 %."""
    progress, pace = CASES[name]
    found = drain(lengths, progress, pace)
    left = drawn(lengths, progress, pace, draws=1500)
    groups = np.array_split(left, progress.live_groups, axis=1)
    completed = np.sort(np.stack([group.max(axis=1) for group in groups], axis=1), axis=1)
    closes = completed[:, progress.needed_groups - 1]
    assert found.turns == pytest.approx(float(closes.mean()), rel=0.04)
    # Of a mixture of cohorts as many are drawn as there are, which spreads less than the draws of single ones.
    assert found.spread_turns == pytest.approx(float(closes.std()), rel=0.2, abs=5 if name == "many cohorts" else 0.5)
    at = positions(found)
    # Who ends just then counts half.
    in_flight = ((left[:, :, None] > at).sum(axis=1) + (left[:, :, None] >= at).sum(axis=1)).mean(axis=0) / 2
    assert found.population == pytest.approx(np.maximum(in_flight, 1.0), rel=0.06, abs=0.02 * left.shape[1])


def drawn(lengths: Distribution, progress: Progress, pace: Pace, draws: int) -> np.ndarray:
    """Turns left of each trajectory, shape `[draws, trajectories]`, in random order."""
    rng = np.random.default_rng(7)
    values, weights = np.array(lengths.values), np.array(lengths.weights)
    columns = []
    for done, count in progress.running.items():
        longer = values > done
        if longer.any():
            odds = weights[longer] / weights[longer].sum()
            turns = rng.choice(values[longer], (draws, count), p=odds) - done - (0.5 if done else 0.0)
            turns = np.maximum(turns, 0.5)
        else:
            turns = np.full((draws, count), 0.5)
        if pace.waits.variance:
            # Sums of as many draws, one for each turn, of shape 1 / cv ** 2.
            varying = pace.waits.mean
            cv = math.sqrt(pace.waits.variance) / varying
            # What is left of a turn under way is half of a mean one.
            whole = np.floor(turns)
            turns = turns - varying * whole + varying * rng.gamma(whole / cv**2, cv**2)
        columns.append(turns)
    return rng.permuted(np.concatenate(columns, axis=1), axis=1)


class TestSumsOfTurns:
    """A trajectory of n turns of which each waits 50 units with a chance of 0.04, and else not: waits are binomial."""

    WAITS = Pace(generates=constant(1.0), waits=Distribution((0.0, 50.0), (0.96, 0.04)))

    @pytest.mark.parametrize(("turns", "trajectories"), [(10, 1), (10, 32), (3, 32), (40, 8)])
    def test_the_slowest(self, turns: int, trajectories: int) -> None:
        """Waits: at most k with a chance of F(k) ** trajectories. The close is known to a 48th of when it may be."""
        found = drain(constant(turns), fresh_batch(1, trajectories), self.WAITS)
        waits = np.arange(turns + 1)
        chance = np.diff(binom.cdf(waits, turns, 0.04) ** trajectories, prepend=0.0)
        mean = turns + 50 * float(chance @ waits)
        spread = 50 * math.sqrt(float(chance @ waits**2) - float(chance @ waits) ** 2)
        assert found.turns == pytest.approx(mean, rel=0.02 if trajectories > 1 else 0.04)
        assert found.spread_turns == pytest.approx(spread, rel=0.03)

    def test_who_waits_is_left(self) -> None:
        """After 10 turns all are there who waited at least once, after 60 those who waited more than once."""
        found = drain(constant(10), fresh_batch(1, 100), self.WAITS)
        at = positions(found)
        want = 100 * (1 - binom.cdf(np.floor((at - 10) / 50), 10, 0.04))
        inside = (np.abs((at - 10) % 50 - 25) < 20) | (at < 9)
        assert inside.sum() >= 6
        assert found.population[inside] == pytest.approx(np.maximum(want[inside], 1.0), rel=0.03, abs=0.3)

    def test_what_is_generated_and_what_is_waited_vary_apart(self) -> None:
        """Of one trajectory variances add up, each as often as there are turns."""
        pace = Pace(
            generates=Distribution((0.0, 1.0), (0.5, 0.5)),
            waits=Distribution((0.25, 1.75), (5 / 6, 1 / 6)),
        )
        found = drain(constant(12), running({0: 1}), pace)
        assert found.turns == pytest.approx(12, rel=0.01)
        assert found.spread_turns == pytest.approx(math.sqrt(12 * (0.25 + 1.5**2 * 5 / 36)), rel=0.02)


class TestLikeness:
    @pytest.mark.parametrize("likeness", [0.2, 0.6])
    @pytest.mark.parametrize(("groups", "size", "needed"), [(4, 16, 4), (8, 8, 3), (2, 24, 1)])
    def test_like_groups_drawn_at_random(self, likeness: float, groups: int, size: int, needed: int) -> None:
        """Scores of members: what the group has, and what is their own; lengths are the quantiles of these."""
        progress = running({0: groups * size}, groups=groups, needed=needed)
        found = drain(LONG, progress, likeness=likeness)
        closes = np.sort(lengths_of(groups, size, likeness).max(axis=2), axis=1)[:, needed - 1]
        assert found.turns == pytest.approx(float(closes.mean()), rel=0.03)
        assert found.spread_turns == pytest.approx(float(closes.std()), rel=0.1)

    def test_members_all_alike_are_one(self) -> None:
        """As a batch of groups of one, nearly: scores differ a little at all times."""
        alike, single = drain(LONG, fresh_batch(6, 16), likeness=1.0), drain(LONG, fresh_batch(6, 1))
        unlike = drain(LONG, fresh_batch(6, 16))
        assert single.turns < alike.turns < single.turns + 0.2 * (unlike.turns - single.turns)

    def test_a_group_of_one_is_like_itself(self) -> None:
        alone, alike = drain(LONG, fresh_batch(24, 1)), drain(LONG, fresh_batch(24, 1), likeness=0.7)
        assert alike.turns == pytest.approx(alone.turns, rel=1e-3)

    def test_who_is_in_flight_is_as_many_whatever_they_have_in_common(self) -> None:
        """At the same turn: half of them are gone after the median."""
        lengths = Distribution((4.0, 40.0), (0.75, 0.25))
        found = drain(lengths, fresh_batch(8, 8), likeness=0.5)
        at = positions(found)
        assert found.population[(at > 4.5) & (at < 40)] == pytest.approx(16.0)

    def test_only_what_turns_explain_is_alike(self) -> None:
        """Durations of turns are each one's own: where all have 12 turns nothing is alike."""
        pace = pace_of(1.0, 2.0)
        assert (
            drain(constant(12), fresh_batch(4, 16), pace, 0.9).turns
            == drain(constant(12), fresh_batch(4, 16), pace).turns
        )

    def test_numbers_of_turns_that_are_alike_and_durations_that_are_not(self) -> None:
        """Variances: of the numbers of turns 72 (their mean is 15.9), of as many durations 16 of what is drawn here."""
        rng = np.random.default_rng(11)
        turns = lengths_of(4, 16, 0.6)
        cv = 1.0
        taken = rng.gamma(turns / cv**2, cv**2).max(axis=(1, 2))
        found = drain(LONG, fresh_batch(4, 16), pace_of(1.0, cv), 0.6)
        assert found.turns == pytest.approx(float(taken.mean()), rel=0.03)
        assert found.spread_turns == pytest.approx(float(taken.std()), rel=0.12)


def lengths_of(groups: int, size: int, likeness: float, draws: int = 4000) -> np.ndarray:
    """Turns of trajectories from `LONG`, shape `[draws, groups, size]`."""
    rng = np.random.default_rng(13)
    own, common = rng.standard_normal((draws, groups, size)), rng.standard_normal((draws, groups, 1))
    shares = norm.cdf(math.sqrt(likeness) * common + math.sqrt(1 - likeness) * own)
    ends = np.cumsum(LONG.weights)
    return np.array(LONG.values)[np.minimum(np.searchsorted(ends, shares), len(ends) - 1)]


class TestDueGroups:
    def test_the_batch_waits_for_those_that_are_due(self) -> None:
        """4 of 8 turns are done by the other group, which is not needed, but in flight until it ends."""
        progress = Progress(
            batch_trajectories=3,
            unfinished=3,
            live_groups=2,
            needed_groups=1,
            running={0: 3, 4: 5},
            due_groups=1,
            due={0: 3},
        )
        found = drain(constant(8), progress)
        assert found.turns == pytest.approx(8, rel=1e-4)
        assert found.population == pytest.approx(np.where(positions(found) < 3.5, 8.0, 3.0))

    def test_nobody_is_due(self) -> None:
        progress = running({0: 3, 4: 3}, groups=2, needed=1)
        assert drain(constant(8), progress).turns < 8

    @pytest.mark.parametrize("name", ["partly", "all of them", "with others"])
    def test_like_trajectories_drawn_at_random(self, name: str) -> None:
        """Due groups all, and of the others the first ones."""
        due, others, groups, needed_others = {
            "partly": ({6: 16, 0: 8}, {0: 24}, (3, 3), 0),
            "all of them": ({12: 32}, {3: 32}, (4, 4), 0),
            "with others": ({9: 16}, {2: 32, 5: 16}, (2, 6), 2),
        }[name]
        both = {turns: due.get(turns, 0) + others.get(turns, 0) for turns in {*due, *others}}
        progress = Progress(
            batch_trajectories=sum(due.values()) + 8 * needed_others,
            unfinished=sum(due.values()) + 8 * needed_others,
            live_groups=sum(groups),
            needed_groups=groups[0] + needed_others,
            running=both,
            due_groups=groups[0],
            due=due,
        )
        found = drain(LONG, progress, SOME)
        must = drawn(LONG, running(due), SOME, 3000)
        may = drawn(LONG, running(others), SOME, 3000)
        first = np.sort(np.stack([part.max(axis=1) for part in np.array_split(may, groups[1], axis=1)], axis=1), axis=1)
        closes = must.max(axis=1)
        if needed_others:
            closes = np.maximum(closes, first[:, needed_others - 1])
        assert found.turns == pytest.approx(float(closes.mean()), rel=0.04)
        at = positions(found)
        everybody = np.concatenate((must, may), axis=1)
        in_flight = (everybody[:, :, None] > at).sum(axis=1).mean(axis=0)
        assert found.population == pytest.approx(np.maximum(in_flight, 1.0), rel=0.06, abs=0.02 * everybody.shape[1])


class TestJoined:
    def test_who_comes_does_not_change_the_way(self) -> None:
        before = drain(LONG, fresh_batch(2, 8))
        after = joined(before, work(LONG), STEADY, 24)
        assert (after.turns, after.spread_turns) == (before.turns, before.spread_turns)
        assert after.slice_turns is before.slice_turns

    def test_by_hand(self) -> None:
        """5 after 3 of 8 turns, 4 1/2 more; 15 begin and are all there: a quarter has done 3 more."""
        before = drain(constant(8), running({3: 5}))
        after = joined(before, work(constant(8)), STEADY, 15)
        at = np.cumsum(before.slice_turns) - before.slice_turns / 2
        assert after.population == pytest.approx(np.full(SLICES, 20.0))
        assert after.turns_done == pytest.approx((5 * before.turns_done + 15 * at) / 20)
        assert after.first_share.tolist() == [0.0] * SLICES

    def test_prompts_of_those_who_come_are_no_turns_of_the_first_slice(self) -> None:
        """They are computed when they come: the share of first turns is that of 4 among 16."""
        after = joined(drain(constant(8), fresh_batch(1, 4)), work(constant(8)), STEADY, 12)
        assert after.first_share.tolist() == [0.25] + [0.0] * (SLICES - 1)

    def test_short_ones_leave_again(self) -> None:
        """Half of 16 have two turns, the others ten, as has who is waited for: he is one of at most nine then."""
        lengths = Distribution((2.0, 10.0), (0.5, 0.5))
        before = drain(lengths, running({2: 1}))
        after = joined(before, work(lengths), STEADY, 16)
        at = np.cumsum(before.slice_turns) - before.slice_turns / 2
        sure = np.abs(at - 2) > 0.2
        assert after.population[sure] == pytest.approx(np.where(at < 2, 17.0, 9.0)[sure])
        late = (at > 2.2) & sure
        assert late.any()
        assert after.turns_done[late] == pytest.approx((before.turns_done[late] + 8 * at[late]) / 9)

    def test_all_have_left_before_the_end(self) -> None:
        """Single turns beside ten."""
        before = drain(constant(10), running({0: 2}))
        after = joined(before, work(constant(1)), STEADY, 50)
        assert after.population[-1] == pytest.approx(2.0)
        assert after.turns_done[-1] == pytest.approx(float(before.turns_done[-1]))

    def test_nobody_has_done_more_turns_than_there_are(self) -> None:
        """Those who come make two turns, of which one in ten takes a hundred times as long as the others."""
        pace = Pace(generates=constant(0.1), waits=Distribution((0.0, 9.0), (0.9, 0.1)))
        before = drain(constant(60), running({0: 1}))
        after = joined(before, work(constant(2)), pace, 1000)
        at = np.cumsum(before.slice_turns) - before.slice_turns / 2
        waiting = (at > 3) & (at < 8)
        assert waiting.any()
        # One of them waits with a chance of 1 - 0.9 ** 2; the one before is alone.
        assert after.population[waiting] == pytest.approx(1 + 1000 * 0.19, rel=0.02)
        want = (before.turns_done[waiting] + 190 * 2.0) / 191
        assert after.turns_done[waiting] == pytest.approx(want, rel=0.02)


def test_a_closed_batch_does_not_drain() -> None:
    closed = Progress(batch_trajectories=4, unfinished=0, live_groups=2, needed_groups=0, running={3: 4})
    assert drain_of(work(constant(8)), closed, SOME) is None


def test_slices_integrate_smooth_paces_exactly() -> None:
    """What a turn takes as a polynomial of the position, integrated after the first turn."""
    found = drain(constant(9), fresh_batch(1, 4))
    at, weights = positions(found)[1:], found.slice_turns[1:]
    for power in range(8):
        assert weights @ at**power == pytest.approx((9 ** (power + 1) - 1) / (power + 1), rel=1e-6)


def test_order_of_cohorts_does_not_matter() -> None:
    one = drain(LONG, running({0: 3, 4: 2, 9: 7}), SOME)
    other = drain(LONG, running({9: 7, 0: 3, 4: 2}), SOME)
    assert one.turns == other.turns
    assert one.population.tolist() == other.population.tolist()
    assert math.isfinite(one.turns)
