"""Transfers over shared bandwidth: by hand, and against small steps of time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import WorkerLost
from pearl.sim.network import Network
from pearl.virtual_time import VirtualLoop, run_virtual

Job = tuple[float, str, str, float]
"""Begins at, source, target, bytes."""


def ends_of(network: Network, jobs: Sequence[Job]) -> list[float]:
    """When each transfer ends."""

    async def one(job: Job) -> float:
        at_s, source, target, size = job
        await asyncio.sleep(at_s)
        await network.transfer(source, target, size)
        return asyncio.get_running_loop().time()

    async def all_of_them() -> list[float]:
        return await asyncio.gather(*(one(job) for job in jobs))

    return run_virtual(all_of_them())


def uniform(_: str) -> float:
    return 10.0


def test_one_transfer_takes_what_its_slower_end_takes() -> None:
    speeds = {"fast": 100.0, "slow": 10.0}
    assert ends_of(Network(speeds.__getitem__), [(1.0, "fast", "slow", 50.0)]) == [6.0]


def test_two_from_one_source_share_it() -> None:
    # Both at 5/s until the shorter is through at 4 s; 30 are left of the other, at 10/s.
    assert ends_of(Network(uniform), [(0.0, "a", "b", 20.0), (0.0, "a", "c", 50.0)]) == [4.0, 7.0]


def test_a_late_one_slows_the_first() -> None:
    # 20 moved by 2 s; then both at 5/s: the first's other 30 until 8 s. The second has 10 of 40 left then.
    assert ends_of(Network(uniform), [(0.0, "a", "b", 50.0), (2.0, "c", "b", 40.0)]) == [8.0, 9.0]


def test_both_directions_are_apart() -> None:
    jobs = [(0.0, "a", "b", 50.0), (0.0, "b", "a", 50.0), (0.0, "c", "d", 50.0)]
    assert ends_of(Network(uniform), jobs) == [5.0, 5.0, 5.0]


def test_a_share_that_is_not_used_is_not_given_on() -> None:
    # a's two transfers have 5/s each; the one to slow uses 1/s of them, and the other stays at 5/s.
    speeds = {"a": 10.0, "slow": 1.0, "b": 10.0}
    jobs = [(0.0, "a", "slow", 10.0), (0.0, "a", "b", 20.0)]
    assert ends_of(Network(speeds.__getitem__), jobs) == [10.0, 4.0]


def test_nothing_and_nowhere_take_no_time() -> None:
    network = Network(uniform)
    assert ends_of(network, [(1.0, "a", "a", 50.0), (2.0, "a", "b", 0.0)]) == [1.0, 2.0]
    assert (network.active, network.moved_bytes) == (0, 50.0)


def test_without_a_bound_it_takes_no_time() -> None:
    assert ends_of(Network(lambda _: math.inf), [(1.0, "a", "b", 50.0), (1.0, "a", "c", 1e18)]) == [1.0, 1.0]


def test_cancelling_gives_the_share_to_the_others() -> None:
    async def check() -> float:
        network = Network(uniform)
        quitter = asyncio.create_task(network.transfer("a", "b", 100.0))
        stayer = asyncio.create_task(network.transfer("a", "c", 50.0))
        await asyncio.sleep(4.0)
        quitter.cancel()
        # 20 of 50 by 4 s, the rest at 10/s.
        await stayer
        assert quitter.cancelled()
        assert (network.active, network.moved_bytes) == (0, 50.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(check()) == 7.0


def test_cancelling_at_the_very_end_leaves_nothing_behind() -> None:
    async def check() -> None:
        network = Network(uniform)
        mover = asyncio.create_task(network.transfer("a", "b", 10.0))

        async def cancel() -> None:
            await asyncio.sleep(1.0)
            mover.cancel()

        await asyncio.gather(mover, cancel(), return_exceptions=True)
        await network.transfer("a", "b", 10.0)
        assert asyncio.get_running_loop().time() == 2.0
        assert network.active == 0

    run_virtual(check())


def test_a_lost_end_ends_its_transfers_and_frees_the_others() -> None:
    async def check() -> None:
        network = Network(uniform)
        jobs = [("a", "b"), ("b", "c"), ("a", "d")]
        tasks = [asyncio.create_task(network.transfer(source, target, 50.0)) for source, target in jobs]
        await asyncio.sleep(2.0)
        network.lose("b")
        for task in tasks[:2]:
            with pytest.raises(WorkerLost, match="b was lost during a transfer"):
                await task
        await tasks[2]
        assert asyncio.get_running_loop().time() == 6.0  # 10 of 50 by 2 s
        await network.transfer("a", "b", 10.0)

    run_virtual(check())


def test_there_is_one_timer() -> None:
    async def check() -> None:
        network = Network(uniform)
        tasks = [asyncio.create_task(network.transfer("a", f"b{n}", 50.0 + n)) for n in range(20)]
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        assert loop.timers == 1
        await asyncio.gather(*tasks)

    run_virtual(check())


@pytest.mark.parametrize("size", [-1.0, math.inf, math.nan])
def test_sizes_that_cannot_be(size: float) -> None:
    with pytest.raises(ValueError, match=r"transfer from a to b: got .* bytes, want a finite number >= 0"):
        run_virtual(Network(uniform).transfer("a", "b", size))


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_bandwidths_that_cannot_be(bound: float) -> None:
    async def check() -> None:
        network = Network(lambda end: bound if end == "b" else 1.0)
        with pytest.raises(ValueError, match=r"network: bandwidth of b: got .* bytes/s, want > 0"):
            await network.transfer("a", "b", 1.0)
        assert network.active == 0
        await network.transfer("a", "c", 1.0)

    run_virtual(check())


def stepped(jobs: Sequence[Job], capacity: Mapping[str, float], step_s: float) -> list[float]:
    """Ends of transfers as the law says, in steps of time in which nothing changes."""
    left = [size for *_, size in jobs]
    ends = [at_s if size == 0 else -1.0 for at_s, _, _, size in jobs]
    tick = 0
    while -1.0 in ends:
        now_s = tick * step_s
        going = [n for n, job in enumerate(jobs) if job[0] <= now_s + 1e-12 and left[n] > 0]
        for n in going:
            _, source, target, _ = jobs[n]
            left_there = sum(1 for other in going if jobs[other][1] == source)
            reach_there = sum(1 for other in going if jobs[other][2] == target)
            rate = min(capacity[source] / left_there, capacity[target] / reach_there)
            left[n] -= rate * step_s
            if left[n] <= 1e-9:
                ends[n] = now_s + step_s
        for n in going:
            left[n] = max(left[n], 0.0) if ends[n] < 0 else 0.0
        tick += 1
    return ends


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 8).map(lambda n: n / 4),
            st.sampled_from("ab"),
            st.sampled_from("cde"),
            st.integers(1, 20).map(float),
        ),
        min_size=1,
        max_size=7,
    )
)
def test_it_is_what_small_steps_come_to(jobs: list[Job]) -> None:
    capacity = {"a": 10.0, "b": 4.0, "c": 6.0, "d": 10.0, "e": 3.0}
    step_s = 1 / 512
    found = ends_of(Network(capacity.__getitem__), jobs)
    # An end is late by up to a step, and so may be each of those that it was slowed by.
    assert found == pytest.approx(stepped(jobs, capacity, step_s), abs=(len(jobs) + 1) * step_s)


def test_equal_ends_come_in_order_of_beginning() -> None:
    async def check() -> None:
        network, order = Network(uniform), []

        async def one(number: int) -> None:
            await network.transfer("a", f"t{number}", 30.0)
            order.append(number)

        await asyncio.gather(*(one(number) for number in (3, 1, 2, 0)))
        assert order == [3, 1, 2, 0]

    run_virtual(check())


def test_many_transfers_keep_the_heap_small() -> None:
    async def check() -> None:
        network = Network(uniform)
        for _ in range(50):
            await asyncio.gather(*(network.transfer("a", f"b{n}", 1.0 + n) for n in range(10)))
            assert len(network._due) <= 64

    run_virtual(check())
