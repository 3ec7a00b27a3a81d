"""How a batch drains: by hand where lengths are few, else against drawing trajectories and groups at random."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pearl.core.distribution import Distribution, constant, distribution_of
from pearl.core.drain import SLICES, Drain, drain_of
from pearl.core.progress import Progress, fresh_batch
from pearl.core.workload import WorkloadProfile


def work(turns: Distribution) -> WorkloadProfile:
    return WorkloadProfile(
        turns=turns,
        prompt_tokens=constant(100),
        new_tokens=constant(10),
        generated_tokens=constant(10),
        env_s=constant(1),
    )


def drain(turns: Distribution, progress: Progress, turn_cv: float = 0.0) -> Drain:
    found = drain_of(work(turns), progress, turn_cv)
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
        assert found.turns == pytest.approx(8, rel=1e-6)
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
        assert found.turns == pytest.approx(10, rel=1e-6)
        assert found.population == pytest.approx(np.where(positions(found) < 2, 16.0, 8.0))

    def test_the_last_one_is_never_less_than_one(self) -> None:
        """0.6 of four trajectories are long, on average."""
        found = drain(Distribution((2.0, 10.0), (0.85, 0.15)), fresh_batch(4, 1))
        assert found.turns == pytest.approx(10, rel=1e-6)
        assert found.population == pytest.approx(np.where(positions(found) < 2, 4.0, 1.0))

    def test_half_a_group_less_is_enough(self) -> None:
        """Of four, 3 1/2 are expected to have completed after 2 turns."""
        assert drain(Distribution((2.0, 10.0), (0.875, 0.125)), fresh_batch(4, 1)).turns == pytest.approx(2, rel=1e-6)

    def test_what_is_known_of_who_is_beyond_the_short_length(self) -> None:
        """After 2 turns it is a long one: 10 - 2 - 1/2."""
        assert drain(self.HALVES, running({2: 4})).turns == pytest.approx(7.5, rel=1e-6)

    @pytest.mark.parametrize(
        ("needed", "turns", "spread"),
        [
            # 4 groups of one, lengths 1, 2, 3, 4 alike: a quarter more after each turn. Wilson's interval around 1/8: (1/8 + 1/8
            # -+ sqrt(1/8 * 7/8 / 4 + 1/64)) / (5/4) = 0.034 .. 0.366; around 3/8: 0.182 .. 0.618.
            (1, 1, 0.5),  # 1 .. 2
            (2, 2, 1),  # 1 .. 3
            (3, 3, 1),  # 2 .. 4, as 0.382 .. 0.818
            (4, 4, 0.5),  # 3 .. 4, as 0.634 .. 0.966
        ],
    )
    def test_the_needed_group(self, needed: int, turns: float, spread: float) -> None:
        found = drain(distribution_of([1, 2, 3, 4]), running({0: 4}, groups=4, needed=needed))
        assert found.turns == pytest.approx(turns, rel=1e-6)
        assert found.spread_turns == pytest.approx(spread, rel=1e-5)

    def test_a_group_waits_for_its_last(self) -> None:
        """Two of a group have both ended after k of 4 turns with (k / 4) ** 2: half of the groups after 3 of them, 9 / 16."""
        lengths = distribution_of([1, 2, 3, 4])
        assert drain(lengths, running({0: 2})).turns == pytest.approx(3, rel=1e-6)
        assert drain(lengths, running({0: 1})).turns == pytest.approx(2, rel=1e-6)

    @pytest.mark.parametrize("lengths", range(3, 40, 4))
    def test_groups_of_a_broken_number(self, lengths: int) -> None:
        """Shares whose sum is not 1 to the last digit stay shares: the close lies between the ends."""
        turns = distribution_of(range(1, lengths + 1), [1 / n for n in range(1, lengths + 1)])
        for cohorts in ({0: 7}, {0: 7, 1: 5}, {0: 3, 1: 4, 2: 9}):
            found = drain(turns, running(cohorts, groups=3), 0.05)
            assert lengths / 2 < found.turns < lengths * 1.2

    @pytest.mark.parametrize(
        ("weights", "spread"),
        [((0.15, 0.70, 0.15), 4), ((0.15, 0.71, 0.14), 2), ((0.14, 0.71, 0.15), 2), ((0.14, 0.72, 0.14), 0)],
    )
    def test_spread_of_one(self, weights: tuple[float, ...], spread: float) -> None:
        """Half of the way from where 0.146 = (1 - sqrt(1/2)) / 2 of the lengths have ended to where 0.854 have."""
        found = drain(Distribution((1.0, 5.0, 9.0), weights), running({0: 1}))
        assert found.turns == pytest.approx(5, rel=1e-6)
        assert found.spread_turns == pytest.approx(spread, abs=1e-5)


class TestTurnsOfDifferentDuration:
    def test_one_trajectory(self) -> None:
        """Normal with mean 9 and deviation 0.2 * sqrt(9): its median; 0.854 of it is 1.0518 deviations beyond."""
        found = drain(constant(9), running({0: 1}), 0.2)
        assert found.turns == pytest.approx(9, rel=1e-6)
        assert found.spread_turns == pytest.approx(0.6 * 1.0518, rel=1e-4)

    def test_the_last_of_many(self) -> None:
        """One group of 64: F ** 64 = 1/2, F = 0.98923, 2.298 deviations of 0.5 * 2."""
        found = drain(constant(4), running({0: 64}), 0.5)
        assert found.turns == pytest.approx(4 + 2.2980, rel=1e-3)

    def test_how_far_the_latest_may_be(self) -> None:
        """Of 1000 groups of 100 the last: F ** 100 = 0.9995, F = 1 - 5e-6, 4.417 deviations of 0.25 * 4 beyond 16.

        The interval around 0.9995 is 0.998136 .. 0.999866: 4.124 .. 4.694 deviations."""
        found = drain(constant(16), running({0: 100_000}, groups=1000), 0.25)
        assert found.turns == pytest.approx(16 + 4.417, rel=1e-4)
        assert found.spread_turns == pytest.approx((4.694 - 4.124) / 2, rel=1e-2)


CASES = {
    "one batch": (fresh_batch(4, 16), 0.4),
    "two batches": (fresh_batch(4, 16, batches=2), 0.4),
    "groups of one": (fresh_batch(48, 1), 0.4),
    "one group": (fresh_batch(1, 32), 0.4),
    "partly done": (running({0: 30, 5: 60, 20: 38}, groups=8, needed=3), 0.4),
    "older than any": (running({10: 20, 130: 12}, groups=2), 0.4),
    "steady turns": (fresh_batch(4, 16, batches=2), 0.0),
    "many cohorts": (running(dict.fromkeys(range(0, 60, 2), 3), groups=9, needed=4), 0.4),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("lengths", [LONG, distribution_of(range(1, 31))])
def test_like_trajectories_drawn_at_random(name: str, lengths: Distribution) -> None:
    """The close within 5 % of the median of draws, and its spread of their middle two thirds; the population within 6 %."""
    progress, turn_cv = CASES[name]
    found = drain(lengths, progress, turn_cv)
    left = drawn(lengths, progress, turn_cv, draws=1500)
    groups = np.array_split(left, progress.live_groups, axis=1)
    completed = np.sort(np.stack([group.max(axis=1) for group in groups], axis=1), axis=1)
    closes = completed[:, progress.needed_groups - 1]
    early, median, late = np.percentile(closes, [15.87, 50, 84.13]).tolist()
    assert found.turns == pytest.approx(median, rel=0.05)
    # Of a mixture of cohorts as many are drawn as there are, which spreads less than the draws of single ones.
    assert found.spread_turns == pytest.approx((late - early) / 2, rel=0.25, abs=1.5 if name == "many cohorts" else 0.5)
    in_flight = (left[:, :, None] > positions(found)).sum(axis=1).mean(axis=0)
    assert found.population == pytest.approx(np.maximum(in_flight, 1.0), rel=0.06, abs=0.02 * left.shape[1])


def drawn(lengths: Distribution, progress: Progress, turn_cv: float, draws: int) -> np.ndarray:
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
        columns.append(turns + rng.normal(size=turns.shape) * turn_cv * np.sqrt(turns))
    return rng.permuted(np.concatenate(columns, axis=1), axis=1)


def test_a_closed_batch_does_not_drain() -> None:
    closed = Progress(batch_trajectories=4, unfinished=0, live_groups=2, needed_groups=0, running={3: 4})
    assert drain_of(work(constant(8)), closed, 0.5) is None


def test_slices_integrate_smooth_paces_exactly() -> None:
    """What a turn takes as a polynomial of the position, integrated after the first turn."""
    found = drain(constant(9), fresh_batch(1, 4))
    at, weights = positions(found)[1:], found.slice_turns[1:]
    for power in range(8):
        assert weights @ at**power == pytest.approx((9 ** (power + 1) - 1) / (power + 1), rel=1e-6)


def test_order_of_cohorts_does_not_matter() -> None:
    one = drain(LONG, running({0: 3, 4: 2, 9: 7}), 0.3)
    other = drain(LONG, running({9: 7, 0: 3, 4: 2}), 0.3)
    assert one.turns == other.turns
    assert one.population.tolist() == other.population.tolist()
    assert math.isfinite(one.turns)
