import asyncio

import pytest

from pearl.errors import EnvironmentLost, EnvironmentNonsense, EnvironmentRaised
from pearl.records.ids import TaskId
from pearl.records.trajectory import Task
from pearl.testing.environment import AT_OPEN, AT_RESET, Behaviour, FakeEnvironmentPool, Fault
from pearl.testing.virtual_time import run_virtual


def task(name: str = "t") -> Task:
    return Task(id=TaskId(name), environment="fake", seed=1)


def pool(behaviour: Behaviour | None = None, slots: int = 2) -> FakeEnvironmentPool:
    return FakeEnvironmentPool(slots, None if behaviour is None else lambda _, __: behaviour)


def test_an_environment_follows_its_behaviour() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        one = pool(Behaviour(turns=2, open_s=1, reset_s=2, step_s=4, reward=0.5, truncated=True, observation="room"))
        environment = await one.open(task())
        assert loop.time() == 1
        assert await environment.reset(9) == "room 0"
        assert loop.time() == 3
        first, second = await environment.step("left"), await environment.step("right")
        assert loop.time() == 11
        assert (first.observation, first.reward, first.done, first.truncated, first.success) == (
            ("room 1", 0.0, False, False, None)
        )
        assert (second.observation, second.reward, second.done, second.truncated, second.success) == (
            ("room 2", 0.5, True, True, True)
        )
        assert one.actions(TaskId("t")) == ["left", "right"]

    run_virtual(check())


@pytest.mark.parametrize(
    ("behaviour", "success"),
    [(Behaviour(), False), (Behaviour(reward=1), True), (Behaviour(reward=1, success=False), False)],
)
def test_success_follows_the_reward_unless_it_is_given(behaviour: Behaviour, success: bool) -> None:
    async def check() -> None:
        environment = await pool(behaviour).open(task())
        await environment.reset(0)
        assert (await environment.step("x")).success is success

    run_virtual(check())


def test_the_script_knows_task_and_attempt() -> None:
    async def check() -> None:
        asked: list[tuple[str, int]] = []

        def script(one: Task, attempt: int) -> Behaviour:
            asked.append((one.id, attempt))
            return Behaviour()

        scripted = FakeEnvironmentPool(9, script)
        for name in "abaab":
            await scripted.open(task(name))
        assert asked == [("a", 0), ("b", 0), ("a", 1), ("a", 2), ("b", 1)]

    run_virtual(check())


@pytest.mark.parametrize(
    ("fault", "error"),
    [(Fault.RAISE, EnvironmentRaised), (Fault.NONSENSE, EnvironmentNonsense), (Fault.LOST, EnvironmentLost)],
)
def test_a_fault_comes_at_its_turn(fault: Fault, error: type[Exception]) -> None:
    async def check() -> None:
        with pytest.raises(error):
            await pool(Behaviour(fault=fault, fault_turn=AT_OPEN)).open(task())
        environment = await pool(Behaviour(fault=fault, fault_turn=AT_RESET)).open(task())
        with pytest.raises(error):
            await environment.reset(0)
        environment = await pool(Behaviour(turns=5, fault=fault, fault_turn=2)).open(task())
        await environment.reset(0)
        for _ in range(2):
            assert not (await environment.step("x")).done
        with pytest.raises(error):
            await environment.step("x")

    run_virtual(check())


def test_a_hang_never_answers() -> None:
    async def check() -> None:
        environment = await pool(Behaviour(fault=Fault.HANG)).open(task())
        await environment.reset(0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10**6):
                await environment.step("x")

    run_virtual(check())


def test_the_lost_stay_lost_and_the_closed_stay_closed() -> None:
    async def check() -> None:
        environment = await pool(Behaviour(fault=Fault.LOST)).open(task())
        await environment.reset(0)
        for _ in range(2):
            with pytest.raises(EnvironmentLost):
                await environment.step("x")
        with pytest.raises(EnvironmentLost, match="is gone"):
            await environment.reset(0)
        closed = await pool().open(task())
        await closed.close()
        with pytest.raises(EnvironmentRaised, match="is closed"):
            await closed.reset(0)

    run_virtual(check())


def test_slots_are_counted() -> None:
    async def check() -> None:
        one = pool(slots=2)
        environments = [await one.open(task()) for _ in range(2)]
        waiters = [asyncio.create_task(one.open(task())) for _ in range(3)]
        await asyncio.sleep(1)
        assert (one.slots, one.open_now, one.open_max) == (2, 2, 2)
        for environment in environments:
            await environment.close()
            await environment.close()
        await asyncio.sleep(1)
        assert [waiter.done() for waiter in waiters] == [True, True, False]
        for waiter in waiters:
            await (await waiter).close()
        assert (one.open_now, one.open_max) == (0, 2)

    run_virtual(check())


def test_what_cannot_be_opened_takes_no_slot() -> None:
    async def check() -> None:
        one = pool(Behaviour(fault=Fault.RAISE, fault_turn=AT_OPEN), slots=1)
        for _ in range(3):
            with pytest.raises(EnvironmentRaised):
                await one.open(task())
        assert one.open_now == 0

    run_virtual(check())


def test_who_gives_up_opening_leaves_its_slot() -> None:
    async def check() -> None:
        one = pool(Behaviour(open_s=100), slots=1)
        opening = asyncio.create_task(one.open(task()))
        waiting = asyncio.create_task(one.open(task()))
        await asyncio.sleep(1)
        opening.cancel()
        await asyncio.sleep(200)
        assert waiting.done()
        assert one.open_now == 1

    run_virtual(check())


def test_the_ledger_holds_every_call() -> None:
    async def check() -> None:
        one = pool(Behaviour(step_s=2))
        environment = await one.open(task())
        await environment.reset(7)
        await environment.step("go")
        await environment.close()
        await environment.close()
        assert [(c.call, c.at_s, c.text, c.attempt, c.environment) for c in one.calls] == [
            ("open", 0, "", 0, 0),
            ("reset", 0, "7", 0, 0),
            ("step", 0, "go", 0, 0),
            ("close", 2, "", 0, 0),
        ]

    run_virtual(check())


def test_a_pool_has_slots() -> None:
    with pytest.raises(ValueError, match="got 0 slots, want >= 1"):
        FakeEnvironmentPool(0)
