"""Rollout: admits groups, runs them, and closes batches, within the laws of `pearl.core.admission`."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from pearl.core.admission import AdmissionLimits, BatchCloses, LiveGroup, admissible_groups, close_batch
from pearl.core.progress import Progress, fresh_batch
from pearl.errors import RunFailed
from pearl.pipeline.agent_loop import AgentPorts
from pearl.pipeline.concurrency import Changed, Nursery
from pearl.pipeline.group import GroupRun
from pearl.pipeline.tasks import TaskStream
from pearl.records.ids import WeightVersion
from pearl.records.journal import GroupEntry
from pearl.records.trajectory import Group, GroupStatus, TrajectoryStatus

_NO_WEIGHTS = WeightVersion(0)

RESTARTED = "restarted"
"""Journalled for a group that a resumed run begins again: not an end, so not a `GroupStatus`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutProgress:
    """What a resumed run needs to know of rollout."""

    cursor: int
    """Groups admitted so far: the next group's index."""
    consumed: int
    """Groups consumed by training steps."""
    unfinished: tuple[int, ...]
    """Indices of groups admitted and not consumed, ascending: they begin again."""


@dataclass(slots=True)
class _Live:
    run: GroupRun
    group: Group | None = None
    """Set once completed."""
    rank: int | None = None
    task: asyncio.Task[None] | None = None


@dataclass(slots=True, kw_only=True)
class Rollout:
    """The groups in flight; one per run."""

    ports: AgentPorts
    tasks: TaskStream
    nursery: Nursery
    progress: RolloutProgress
    max_groups: int
    """Groups that the whole run consumes: none is begun beyond what can still be trained on."""
    incarnation: int = 0
    faults: Counter[TrajectoryStatus] = field(default_factory=Counter)
    group_ends: Counter[GroupStatus] = field(default_factory=Counter)
    served_version: WeightVersion = field(default=_NO_WEIGHTS)
    """The oldest weights that a serving worker may hold."""
    _live: dict[int, _Live] = field(default_factory=dict)
    _restart: list[int] = field(default_factory=list)
    _cursor: int = 0
    _consumed: int = 0
    _completed: int = 0
    _failed_in_row: int = 0
    _begun: bool = False
    _admitting: bool = False
    _changed: Changed = field(default_factory=Changed)

    def __post_init__(self) -> None:
        self._cursor = self.progress.cursor
        self._consumed = self.progress.consumed
        self._restart = list(self.progress.unfinished)

    @property
    def limits(self) -> AdmissionLimits:
        """The bounds in force."""
        rollout = self.ports.limits
        return AdmissionLimits(
            groups_per_batch=rollout.groups_per_batch,
            group_size=rollout.group_size,
            max_staleness=rollout.max_staleness,
            slots=self.ports.environments.slots,
        )

    @property
    def active_trajectories(self) -> int:
        """Trajectories that hold an environment slot."""
        return sum(live.run.active for live in self._live.values())

    def batch_progress(self) -> Progress:
        """How far the batch is that closes next; before any group has begun, all of what will begin at once."""
        limits = self.limits
        if not self._begun:
            return fresh_batch(limits.groups_per_batch, limits.group_size, batches=limits.max_staleness + 1)
        # The next batch is that of the version after all that were consumed.
        version = self._consumed // limits.groups_per_batch
        due: list[tuple[int, ...]] = []
        others: list[tuple[int, ...]] = []
        ready, room = 0, limits.groups_per_batch
        for live in self._live.values():
            is_due = live.run.admitted_version + limits.max_staleness <= version
            room -= is_due
            if live.group is None:
                (due if is_due else others).append(live.run.unfinished)
            elif not is_due:
                ready += 1
        # The groups that are furthest on are taken for those that close it.
        nearest = sorted(map(len, others))[: max(0, room - ready)]
        # What the bound on staleness lets begin once the next version serves; until then it is the trainer's.
        following = (version + limits.max_staleness + 1) * limits.groups_per_batch - self._consumed - len(self._live)
        following = min(following, self.max_groups - self._consumed - len(self._live))
        return Progress(
            batch_trajectories=limits.groups_per_batch * limits.group_size,
            unfinished=sum(map(len, due)) + sum(nearest),
            live_groups=len(due) + len(others),
            needed_groups=len(due) + len(nearest),
            running=Counter(turns for group in (*due, *others) for turns in group),
            due_groups=len(due),
            due=Counter(turns for group in due for turns in group),
            coming=max(0, following) * limits.group_size,
        )

    def snapshot(self) -> RolloutProgress:
        """Progress for a checkpoint."""
        unfinished = sorted([*self._live, *self._restart])
        return RolloutProgress(cursor=self._cursor, consumed=self._consumed, unfinished=tuple(unfinished))

    def serve(self, version: WeightVersion) -> None:
        """All serving workers hold at least this version: admit what that allows.

        Raises:
            RunFailed: the environment pool is too small for a single group.
        """
        self.served_version = version
        if not self._begun:
            self._begun = self._admitting = True
            self._check_slots()
            self._journal_restarts()
        self._admit()

    async def stop(self) -> None:
        """Begin no further group, and end those that run as cancelled. Repeating it does nothing."""
        self._admitting = False
        running = [(live.task, live.run) for live in self._live.values() if live.task and not live.task.done()]
        for task, _ in running:
            task.cancel()
        await asyncio.gather(*(task for task, _ in running), return_exceptions=True)
        for task, run in running:
            if task.cancelled():  # before its first step: a group that has begun ends by itself
                self._end(run, GroupStatus.CANCELLED)

    async def next_batch(self, version: WeightVersion) -> list[Group]:
        """Wait for the groups of the training step that begins at `version` and hand them over, in admission order.

        Raises:
            RunFailed: `max_failed_groups` was passed.
        """
        indices = await self._changed.until(lambda: self._closing(version))
        groups = [self._live.pop(index).group for index in indices]
        self._consumed += len(groups)
        return [group for group in groups if group is not None]

    def _closing(self, version: WeightVersion) -> tuple[int, ...] | None:
        live = [
            LiveGroup(index=index, admitted_version=live.run.admitted_version, completed_rank=live.rank)
            for index, live in self._live.items()
        ]
        result = close_batch(self.limits, version, live)
        return result.indices if isinstance(result, BatchCloses) else None

    def _admit(self) -> None:
        wanted = self.max_groups - self._consumed - len(self._live)
        if not self._admitting or wanted <= 0:
            return
        count = admissible_groups(
            self.limits,
            served_version=self.served_version,
            consumed=self._consumed,
            live=len(self._live),
            active_trajectories=self.active_trajectories,
        )
        for _ in range(min(count, wanted)):
            self._begin(self._restart.pop(0) if self._restart else self._next_index())

    def _next_index(self) -> int:
        self._cursor += 1
        return self._cursor - 1

    def _begin(self, index: int) -> None:
        live = self._live[index] = _Live(self._group_run(index))
        live.task = self.nursery.spawn(self._run(live), name=f"group {index}")

    def _group_run(self, index: int) -> GroupRun:
        return GroupRun(
            ports=self.ports,
            tasks=self.tasks,
            index=index,
            admitted_version=self.served_version,
            faults=self.faults,
            incarnation=self.incarnation,
            active=self.ports.limits.group_size,
            on_slot_free=self._admit,
        )

    async def _run(self, live: _Live) -> None:
        group = await live.run.run()
        self._end(live.run, group.status)
        if group.status is GroupStatus.CANCELLED:
            return
        if group.status is GroupStatus.COMPLETED:
            live.group, live.rank = group, self._completed
            self._completed += 1
            self._failed_in_row = 0
        else:
            self._live.pop(group.index)
            self._failed_in_row += 1
            if self._failed_in_row > self.ports.limits.max_failed_groups:
                raise RunFailed(self._why_failing(group))
        self._admit()
        self._changed.notify()

    def _why_failing(self, group: Group) -> str:
        faults = ", ".join(f"{count} {status.value}" for status, count in sorted(self.faults.items(), key=str))
        return (
            f"rollout: {self._failed_in_row} groups in a row ended without a result (the last, {group.id}: "
            f"{group.status.value}; faults so far: {faults or 'none'}); allowed are rollout.max_failed_groups = "
            f"{self.ports.limits.max_failed_groups}. The trajectories stream of the journal has the details."
        )

    def _check_slots(self) -> None:
        if self.limits.slots < self.limits.group_size:
            raise RunFailed(
                f"environments: got {self.limits.slots} slots over all processes, want >= rollout.group_size = "
                f"{self.limits.group_size}: no group could ever begin; raise environment.slots"
            )

    def _end(self, run: GroupRun, status: GroupStatus) -> None:
        self.group_ends[status] += 1
        self._journal(run, status.value)

    def _journal_restarts(self) -> None:
        for index in self._restart:
            self._journal(self._group_run(index), RESTARTED)

    def _journal(self, run: GroupRun, status: str) -> None:
        task = self.tasks.task(run.index)
        self.ports.journal.write(
            GroupEntry(
                at_s=asyncio.get_running_loop().time() - self.ports.start_s,
                group=run.id,
                task=task.id,
                seed=task.seed,
                status=status,
                admitted_version=run.admitted_version,
                attempts=run.attempts,
            )
        )
