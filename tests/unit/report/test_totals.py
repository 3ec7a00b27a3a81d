"""What steps add up to; with whole jobs: test_job of the cluster."""

from __future__ import annotations

from pearl.report.totals import RunTotals


class TestIterations:
    def test_growth_of_all_workers_is_added_up(self) -> None:
        totals = RunTotals()
        totals.count_iterations({0: (100, 10), 1: (50, 0)})
        totals.count_iterations({0: (130, 11), 1: (60, 5)})
        assert (totals.iterations, totals.late_iterations) == (190, 16)

    def test_a_restarted_worker_counts_from_zero_again(self) -> None:
        totals = RunTotals()
        totals.count_iterations({0: (100, 10)})
        # More late ones than before, of fewer iterations: only the iterations tell that it is another process.
        totals.count_iterations({0: (40, 12)})
        assert (totals.iterations, totals.late_iterations) == (140, 22)

    def test_a_worker_that_was_silent_for_a_step_is_not_counted_twice(self) -> None:
        totals = RunTotals()
        for now in ({0: (100, 10)}, {}, {0: (150, 20)}):
            totals.count_iterations(now)
        assert (totals.iterations, totals.late_iterations) == (150, 20)
