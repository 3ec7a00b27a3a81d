"""Simulated environments: what they wait for, how they end and fail."""

from __future__ import annotations

import asyncio

import pytest

from pearl.errors import EnvironmentLost, EnvironmentNonsense, EnvironmentRaised
from pearl.pipeline.tasks import TaskStream
from pearl.records.ids import TaskId
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.sim.codec import Action, Observation
from pearl.sim.environment import (
    AT_RESET,
    EnvironmentFaultKind,
    EnvironmentTimes,
    InjectedFault,
    SimEnvironmentPool,
    group_number,
)
from pearl.sim.script import Script, ScriptTurn, script_of
from pearl.virtual_time import run_virtual

SCRIPT = script_of((ScriptTurn(100, 20, 1.5), ScriptTurn(0, 1, 0.0), ScriptTurn(30, 5, 4.0)))


class Same:
    """The same script for everybody, and who asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []

    def script(self, group: int, attempt: int) -> Script:
        self.asked.append((group, attempt))
        return SCRIPT


def task(name: str = "swe#3") -> Task:
    return Task(id=TaskId(name), environment="swe", seed=1)


def now_s() -> float:
    return asyncio.get_running_loop().time()


def test_a_script_is_played_in_its_times() -> None:
    async def check() -> None:
        pool = SimEnvironmentPool(1, Same(), times=EnvironmentTimes(open_s=2.0, reset_s=1.0, success_rate=1.0))
        environment = await pool.open(task())
        assert now_s() == 2.0
        observation = await environment.reset(5)
        assert (now_s(), observation.turn, observation.context_tokens) == (3.0, 0, 0)
        replies: list[tuple[float, EnvironmentReply]] = []
        for part in SCRIPT.turns:
            reply = await environment.step(Action(SCRIPT, part.output_tokens))
            replies.append((now_s(), reply))
        assert [(at_s, r.done, r.reward, r.success, r.truncated) for at_s, r in replies] == [
            (4.5, False, 0.0, None, False),
            (4.5, False, 0.0, None, False),
            (8.5, True, 1.0, True, False),
        ]
        seen = [reply.observation for _, reply in replies]
        assert all(isinstance(one, Observation) for one in seen)
        assert [(one.turn, one.context_tokens) for one in seen if isinstance(one, Observation)] == [
            (1, 120),
            (2, 121),
            (3, 156),
        ]
        with pytest.raises(EnvironmentRaised, match="is done after 3 steps; open another"):
            await environment.step(Action(SCRIPT, 1))
        await environment.close()
        assert pool.open_now == 0

    run_virtual(check())


def test_groups_and_attempts_follow_tasks_and_the_order_of_asking() -> None:
    async def check() -> None:
        workload = Same()
        pool = SimEnvironmentPool(8, workload)
        stream = TaskStream(environment="swe", params={}, seed=9)
        for index in (17, 2, 17, 17, 2):
            await pool.open(stream.task(index))
        assert workload.asked == [(17, 0), (2, 0), (17, 1), (17, 2), (2, 1)]

    run_virtual(check())


def test_names_without_a_number_have_a_group_of_their_own() -> None:
    numbers = [group_number(TaskId(name)) for name in ("task", "other", "a#b", "evaluation#3")]
    assert len(set(numbers)) == 4
    assert min(numbers) >= 2**31
    assert group_number(TaskId("a#b#12")) == 12


def test_success_is_drawn_by_seed_group_and_attempt() -> None:
    pools = [SimEnvironmentPool(1, Same(), seed=seed, times=EnvironmentTimes(success_rate=0.3)) for seed in (1, 1, 2)]
    drawn = [[pool.success(group, attempt) for group in range(50) for attempt in range(16)] for pool in pools]
    assert drawn[0] == drawn[1] != drawn[2]
    # 800 draws: within four standard deviations.
    assert sum(drawn[0]) / 800 == pytest.approx(0.3, abs=4 * (0.3 * 0.7 / 800) ** 0.5)


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (EnvironmentFaultKind.RAISE, EnvironmentRaised),
        (EnvironmentFaultKind.NONSENSE, EnvironmentNonsense),
        (EnvironmentFaultKind.LOST, EnvironmentLost),
        (EnvironmentFaultKind.HANG, TimeoutError),
    ],
)
@pytest.mark.parametrize("turn", [AT_RESET, 0, 2])
def test_an_attempt_fails_where_it_is_told_to(kind: EnvironmentFaultKind, error: type[Exception], turn: int) -> None:
    async def check() -> None:
        def faults(group: int, attempt: int) -> InjectedFault | None:
            return InjectedFault(kind=kind, turn=turn) if attempt == 1 else None

        pool = SimEnvironmentPool(2, Same(), faults=faults)
        for attempt in range(3):
            environment = await pool.open(task())
            steps = 0
            try:
                async with asyncio.timeout(10):
                    await environment.reset(1)
                    for part in SCRIPT.turns:
                        await environment.step(Action(SCRIPT, part.output_tokens))
                        steps += 1
            except error:
                assert (attempt, steps) == (1, max(turn, 0))
            else:
                assert (attempt != 1, steps) == (True, 3)
            await environment.close()
        assert pool.open_now == 0

    run_virtual(check())


def test_the_next_call_can_be_made_to_fail_or_to_be_slow() -> None:
    async def check() -> None:
        pool = SimEnvironmentPool(2, Same())
        environment = await pool.open(task())
        pool.fail_next(InjectedFault(kind=EnvironmentFaultKind.SLOW, extra_s=7.0))
        pool.fail_next(InjectedFault(kind=EnvironmentFaultKind.LOST))
        await environment.reset(1)
        assert now_s() == 7.0
        with pytest.raises(EnvironmentLost, match=r"environment of task swe#3, attempt 0: its process died"):
            await environment.step(Action(SCRIPT, 20))
        with pytest.raises(EnvironmentLost, match="is gone; open another"):
            await environment.step(Action(SCRIPT, 20))

    run_virtual(check())


def test_what_cannot_be() -> None:
    async def check() -> None:
        with pytest.raises(ValueError, match=r"simulated environments: got 0 slots, want >= 1"):
            SimEnvironmentPool(0, Same())
        environment = await SimEnvironmentPool(1, Same()).open(task())
        with pytest.raises(TypeError, match=r"environment of task swe#3, attempt 0: got str, want an Action"):
            await environment.step("act")

    run_virtual(check())
    with pytest.raises(ValueError, match=r"success_rate: got 1.5, want 0..1"):
        EnvironmentTimes(success_rate=1.5)
    with pytest.raises(ValueError, match=r"open_s: got -1, want a finite number >= 0"):
        EnvironmentTimes(open_s=-1)
