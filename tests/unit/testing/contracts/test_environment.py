"""The suite accepts the fake, and finds broken pools made from it."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pearl.errors import EnvironmentFault, EnvironmentLost, EnvironmentRaised
from pearl.records.ids import TaskId
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.testing.contracts.environment import EnvironmentPoolContract, EnvironmentPoolSubject
from pearl.testing.environment import Behaviour, FakeEnvironment, FakeEnvironmentPool, Fault
from pearl.testing.virtual_time import run_virtual


class HasASpareSlot(FakeEnvironmentPool):
    async def _take_slot(self) -> None:
        if self.open_now < self.slots:
            await super()._take_slot()
        else:
            self.open_now += 1


class ServesTheLastFirst(FakeEnvironmentPool):
    def give_slot_back(self) -> None:
        self._waiters.reverse()
        super().give_slot_back()
        self._waiters.reverse()


class GivesSlotsToTheGone(FakeEnvironmentPool):
    async def _take_slot(self) -> None:
        waiting = asyncio.ensure_future(super()._take_slot())
        await asyncio.shield(waiting)


class LosesItsSlots(FakeEnvironmentPool):
    def give_slot_back(self) -> None:
        pass


class WithItsOwn(FakeEnvironmentPool):
    """Opens environments of another class."""

    kind: type[FakeEnvironment] = FakeEnvironment

    async def open(self, task: Task) -> FakeEnvironment:
        environment = await super().open(task)
        environment.__class__ = self.kind  # type: ignore[assignment]
        return environment


class ClosesTwice(FakeEnvironment):
    async def close(self) -> None:
        self._closed = False
        await super().close()


class IsNeverDone(FakeEnvironment):
    async def step(self, action: str) -> EnvironmentReply:
        return replace(await super().step(action), done=False)


class RewardsNonsense(FakeEnvironment):
    async def step(self, action: str) -> EnvironmentReply:
        return replace(await super().step(action), reward=float("nan"))


class HasItsOwnMood(FakeEnvironment):
    async def reset(self, seed: int) -> str:
        return f"{await super().reset(seed)} {self._number}"


class FailsWithoutAType(FakeEnvironment):
    async def step(self, action: str) -> EnvironmentReply:
        try:
            return await super().step(action)
        except EnvironmentFault as fault:
            raise EnvironmentFault(str(fault)) from fault


class KeepsItsSlotAfterAFault(FakeEnvironment):
    async def step(self, action: str) -> EnvironmentReply:
        try:
            return await super().step(action)
        except BaseException:
            self._closed = True
            raise


class AnswersWhatHangs(FakeEnvironment):
    async def _maybe_fail(self, turn: int) -> None:
        if self._behaviour.fault is not Fault.HANG:
            await super()._maybe_fail(turn)


class PullsTheOthersDown(FakeEnvironment):
    async def step(self, action: str) -> EnvironmentReply:
        try:
            return await super().step(action)
        except EnvironmentRaised:
            self._pool._script = None  # type: ignore[assignment]
            raise

    def _check_usable(self) -> None:
        if self._pool._script is None:
            raise EnvironmentLost("all are gone")


def own(kind: type[FakeEnvironment]) -> type[FakeEnvironmentPool]:
    return type(kind.__name__, (WithItsOwn,), {"kind": kind})


FAULTS = {"plain": None, "raises": Fault.RAISE, "hangs": Fault.HANG, "nonsense": Fault.NONSENSE, "lost": Fault.LOST}
KINDS = [("raises", EnvironmentRaised), ("lost", EnvironmentLost)]


class Suite(EnvironmentPoolContract):
    def __init__(self, make: type[FakeEnvironmentPool]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def pool(self, slots: int) -> AsyncIterator[EnvironmentPoolSubject]:
        pool = self.make(slots, lambda task, _: Behaviour(turns=3, fault=FAULTS[task.environment], fault_turn=1))
        yield EnvironmentPoolSubject(pool=pool, task=lambda kind: Task(id=TaskId(kind), environment=kind, seed=1))


BREACHES = [
    (HasASpareSlot, "slots_are_never_exceeded"),
    (LosesItsSlots, "slots_are_never_exceeded"),
    (ServesTheLastFirst, "slots_are_given_in_the_order_of_asking"),
    (GivesSlotsToTheGone, "a_waiter_that_gives_up_takes_no_slot"),
    (GivesSlotsToTheGone, "a_waiter_that_gives_up_as_its_slot_comes_passes_it_on"),
    (own(ClosesTwice), "close_gives_one_slot_back_however_often_it_is_called"),
    (own(IsNeverDone), "an_environment_is_reset_stepped_and_closed"),
    (own(RewardsNonsense), "an_environment_is_reset_stepped_and_closed"),
    (own(HasItsOwnMood), "a_seed_decides_the_observation"),
    (own(FailsWithoutAType), "a_fault_has_a_type_and_its_slot_comes_back"),
    (own(KeepsItsSlotAfterAFault), "a_fault_has_a_type_and_its_slot_comes_back"),
    (own(KeepsItsSlotAfterAFault), "a_hanging_environment_can_be_left_and_its_slot_comes_back"),
    (own(AnswersWhatHangs), "a_hanging_environment_can_be_left_and_its_slot_comes_back"),
    (own(PullsTheOthersDown), "a_fault_touches_no_other_environment"),
]


def run_test(make: type[FakeEnvironmentPool], name: str) -> None:
    test = getattr(Suite(make), f"test_{name}")
    for arguments in KINDS if inspect.signature(test).parameters else [()]:
        test(*arguments)


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_pool_is_accepted(name: str) -> None:
    run_test(FakeEnvironmentPool, name)


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_pool_is_found(
    broken: type[FakeEnvironmentPool], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(lambda: run_test(broken, name))


def test_kinds_that_a_pool_does_not_have_are_left_out() -> None:
    class PlainOnly(Suite):
        @asynccontextmanager
        async def pool(self, slots: int) -> AsyncIterator[EnvironmentPoolSubject]:
            async with super().pool(slots) as subject:
                yield replace(subject, task=lambda kind: subject.task(kind) if kind == "plain" else None)

    suite = PlainOnly(own(FailsWithoutAType))
    suite.test_a_fault_has_a_type_and_its_slot_comes_back("raises", EnvironmentRaised)
    suite.test_a_hanging_environment_can_be_left_and_its_slot_comes_back()
    suite.test_a_fault_touches_no_other_environment()
