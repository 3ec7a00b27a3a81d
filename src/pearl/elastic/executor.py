"""Carries plans out: steps as soon as what they wait for has succeeded, groups all or nothing.

Laws:

- a step begins when all the steps that it names have succeeded; where one of them has not, neither does it;
- a group that brings workers, or changes their roles, succeeds as a whole or is taken back, the last step of each worker first:
  the first step that fails ends the others;
- a group in which workers leave is never taken back once it has begun: what is to leave is seen off, whatever fails;
- several plans may be under way, since what must be done at once waits for nothing; what a plan has yet to do shows as in
  transition (`ahead`), so that no two are about the same worker;
- a group that is called off begins nothing more, ends what it does, and is taken back;
- a worker that is lost is forgotten: no step, and no taking back, is about the next one in its slot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from pearl.core.actions import Action, ActionGroup, Admit, GiveBack, GroupKind, Start, Step
from pearl.core.plan import Plan
from pearl.core.state import Activity, FleetState, Worker
from pearl.elastic.hands import Hands, NothingDone
from pearl.errors import PearlError, RunFailed
from pearl.pipeline.concurrency import Nursery
from pearl.records.ids import WorkerId

_log = logging.getLogger(__name__)

BRINGING = (GroupKind.EXPAND, GroupKind.ROLES)
"""Groups after which workers serve that did not, or otherwise."""
URGENT = (GroupKind.RETURN, GroupKind.VACATE)
"""Groups that are never called off: what they do is what others are called off for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """What became of a group."""

    kind: GroupKind
    done: bool
    why_not: str = ""
    """Of the first step that did not succeed; empty: it was waiting for another group that did not."""
    called_off: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """What became of a plan."""

    groups: tuple[GroupOutcome, ...]
    seconds: float

    @property
    def done(self) -> bool:
        """Whether all of it was."""
        return all(group.done for group in self.groups)

    @property
    def called_off(self) -> bool:
        """Whether a part of it was called off."""
        return any(group.called_off for group in self.groups)

    @property
    def failure(self) -> str:
        """Of the first group that did not succeed by itself; empty: there is none."""
        return next((g.why_not for g in self.groups if g.why_not and not (g.done or g.called_off)), "")


@dataclass(slots=True, eq=False)
class _Group:
    group: ActionGroup
    tasks: dict[int, asyncio.Task[bool]] = field(default_factory=dict)
    """Index of a step -> whether it succeeded."""
    begun: dict[int, None] = field(default_factory=dict)
    """Places of steps in the group that have begun, in order."""
    gone: dict[WorkerId, None] = field(default_factory=dict)
    """Workers lost since the group began; whoever has such a slot next is none of its business."""
    why_not: str = ""
    off: bool = False

    @property
    def brings(self) -> bool:
        return self.group.kind in BRINGING

    def sees_off(self, index: int) -> bool:
        """Whether what comes after a step comes all the same, whatever became of it: it has begun, and is of leaving."""
        return not self.brings and any(self.group.steps[place].index == index for place in self.begun)

    def give_up(self) -> None:
        for task in self.tasks.values():
            task.cancel()

    def pending(self) -> list[Step]:
        """Steps that are not over."""
        return [s for s in self.group.steps if s.index not in self.tasks or not self.tasks[s.index].done()]


@dataclass(slots=True, kw_only=True)
class Executor:
    """Plans under way."""

    hands: Hands
    nursery: Nursery
    on_group: Callable[[GroupOutcome], None] = lambda _: None
    """Hears what became of a group as soon as it is known: others of its plan may take their time."""
    _groups: dict[_Group, None] = field(default_factory=dict)
    _plans: dict[asyncio.Task[None], None] = field(default_factory=dict)
    _stopped: bool = False

    @property
    def busy(self) -> bool:
        """Whether a plan is under way."""
        return bool(self._groups)

    def carry_out(self, plan: Plan, on_done: Callable[[PlanOutcome], None]) -> None:
        """Begin a plan; `on_done` hears what became of it, unless everything is stopped first."""
        self.carry_out_groups(plan.groups, on_done)

    def carry_out_groups(self, groups: tuple[ActionGroup, ...], on_done: Callable[[PlanOutcome], None]) -> None:
        """The same for groups that are no plan of a decision."""
        if self._stopped:
            return
        running = [_Group(group) for group in groups]
        tasks: dict[int, asyncio.Task[bool]] = {}
        for one in running:
            self._groups[one] = None
            for place, step in enumerate(one.group.steps):
                work = self._step(one, place, step, {index: tasks[index] for index in step.after})
                tasks[step.index] = one.tasks[step.index] = self.nursery.spawn(work, name=f"elastic: step {step.index}")
        plan = self.nursery.spawn(self._carry_out(running, on_done), name="elastic: plan")
        self._plans[plan] = None
        plan.add_done_callback(lambda task: self._plans.pop(task, None))

    def call_off(self, workers: Collection[WorkerId]) -> None:
        """Give up the groups that bring these workers, or were yet to see them off for others' sake."""
        for running in self._groups:
            if not any(_concerns(step.action, workers) for step in running.group.steps):
                continue
            if running.brings or (running.group.kind not in URGENT and not running.begun):
                running.off = True
                running.give_up()

    def forget(self, workers: Collection[WorkerId]) -> None:
        """These workers are gone: nothing more is done to them, and what was to bring them is called off."""
        for running in self._groups:
            running.gone |= dict.fromkeys(workers)
        self.call_off(workers)

    async def stop(self) -> None:
        """Begin nothing more and give up what is under way; nothing is taken back."""
        self._stopped = True
        tasks = [*self._plans, *(task for running in self._groups for task in running.tasks.values())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def ahead(self, state: FleetState) -> FleetState:
        """A state in which all that plans have yet to do, or to take back, is in transition."""
        workers = dict(state.workers)
        for running in self._groups:
            for step in running.pending():
                for slot in _workers(step.action):
                    there = workers.get(slot)
                    if there is not None:
                        workers[slot] = replace(there, activity=Activity.TRANSITIONING)
                    elif isinstance(step.action, Start) and all(gpu in state.gpus for gpu in step.action.gpus):
                        workers[slot] = Worker(
                            id=slot, gpus=step.action.gpus, role=step.action.role, activity=Activity.TRANSITIONING
                        )
        return state if workers == state.workers else replace(state, workers=MappingProxyType(workers))

    async def _carry_out(self, running: list[_Group], on_done: Callable[[PlanOutcome], None]) -> None:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        # Each group as soon as it can: one that failed is not left half done while others take their time.
        outcomes = await asyncio.gather(*(self._finish(one) for one in running))
        on_done(PlanOutcome(groups=tuple(outcomes), seconds=loop.time() - began_s))

    async def _step(self, running: _Group, place: int, step: Step, after: dict[int, asyncio.Task[bool]]) -> bool:
        for index, before in after.items():
            if not await _succeeded(before) and not running.sees_off(index):
                return self._failed(running, "")
        if _concerns(step.action, running.gone):
            # Who is gone has left.
            return not running.brings or self._failed(running, "a worker was lost")
        running.begun[place] = None
        try:
            await self.hands.perform(step.action)
        except NothingDone as error:
            del running.begun[place]
            return self._failed(running, str(error))
        except RunFailed:
            raise
        except PearlError as error:
            return self._failed(running, str(error))
        return True

    def _failed(self, running: _Group, why_not: str) -> bool:
        running.why_not = running.why_not or why_not
        if running.brings:
            running.give_up()
        return False

    async def _finish(self, running: _Group) -> GroupOutcome:
        """Wait for a group's steps, and take it back where that is needed."""
        try:
            results = await asyncio.gather(*running.tasks.values(), return_exceptions=True)
            done = all(result is True for result in results)
            if not done and running.brings:
                await self._take_back(running)
        finally:
            del self._groups[running]
        why_not = running.why_not or ("called off" if running.off else "")
        outcome = GroupOutcome(
            kind=running.group.kind,
            done=done,
            why_not="" if done else why_not,
            called_off=running.off and not done,
        )
        self.on_group(outcome)
        return outcome

    async def _take_back(self, running: _Group) -> None:
        """Undo what has begun, last step first; workers side by side, since what is done to one needs no other."""
        chains: dict[WorkerId, list[Action]] = {}
        for place in sorted(running.begun, reverse=True):
            for action in running.group.steps[place].undo or ():
                for worker in _workers(action):
                    chains.setdefault(worker, []).append(action)
        await asyncio.gather(*(self._undo(running, worker, actions) for worker, actions in chains.items()))
        _log.warning("group %s was taken back: %s", running.group.kind.value, running.why_not or "called off")

    async def _undo(self, running: _Group, worker: WorkerId, actions: list[Action]) -> None:
        for action in actions:
            if worker in running.gone:
                return
            try:
                await self.hands.perform(action)
            except NothingDone:
                continue
            except PearlError as error:
                _log.warning("taking back %s of worker %d: %s", type(action).__name__, worker, error)


async def _succeeded(step: asyncio.Task[bool]) -> bool:
    try:
        return await asyncio.shield(step)
    except asyncio.CancelledError:
        if step.cancelled():
            return False
        raise


def _workers(action: Action) -> tuple[WorkerId, ...]:
    match action:
        case GiveBack():
            return ()
        case Admit(workers=workers):
            return workers
        case _:
            return (action.worker,)


def _concerns(action: Action, workers: Collection[WorkerId]) -> bool:
    return any(worker in workers for worker in _workers(action))
