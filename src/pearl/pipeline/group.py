"""One group: attempts at one task, faults replaced within a bound, stragglers ended.

Every attempt that began has ended, exactly once, when `GroupRun.run` returns.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.pipeline.agent_loop import AgentLoop, AgentPorts, Attempt
from pearl.pipeline.concurrency import Changed, GuardExpired, Nursery, guard
from pearl.pipeline.tasks import TaskStream
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.trajectory import Group, GroupStatus, Trajectory, TrajectoryStatus


@dataclass(slots=True, kw_only=True)
class GroupRun:
    """A group while it runs; its task may be cancelled, which ends it as CANCELLED."""

    ports: AgentPorts
    tasks: TaskStream
    index: int
    admitted_version: WeightVersion
    faults: Counter[TrajectoryStatus]
    """Shared by the run: trajectories that ended in a fault, by status."""
    incarnation: int = 0
    """How often the run was resumed: keeps ids of attempts that begin again apart."""
    attempts: int = 0
    """Trajectories begun."""
    active: int = 0
    """Members that have not finished, i.e. environment slots held."""
    on_slot_free: Callable[[], None] = lambda: None
    """Called when a member has finished."""
    _loops: dict[int, AgentLoop] = field(default_factory=dict)
    _finished: dict[int, Trajectory] = field(default_factory=dict)
    _changed: Changed = field(default_factory=Changed)
    _replaced: int = 0
    _over: TrajectoryStatus | None = None
    """Set once the group has ended: what its running attempts end as."""

    @property
    def id(self) -> GroupId:
        """Stable over resumes."""
        return GroupId(f"g{self.index}")

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Turns done of each member that has not finished, in order of members."""
        members = range(self.ports.limits.group_size)
        loops = {member: self._loops.get(member) for member in members if member not in self._finished}
        return tuple(0 if loop is None else loop.turns_done for loop in loops.values())

    async def run(self) -> Group:
        """Run to the group's one end."""
        limits = self.ports.limits
        self.active = limits.group_size
        status = GroupStatus.CANCELLED
        try:
            async with Nursery() as nursery:
                for member in range(limits.group_size):
                    nursery.spawn(self._run_member(member), name=f"{self.id} member {member}")
                try:
                    async with guard(limits.straggler_timeout_s, f"group {self.id}"):
                        status = await self._changed.until(self._outcome)
                except GuardExpired:
                    # What completed at the last moment has completed.
                    status = self._outcome() or GroupStatus.EXPIRED
                finally:
                    expired = status is GroupStatus.EXPIRED
                    self._end(TrajectoryStatus.EXPIRED if expired else TrajectoryStatus.CANCELLED)
        except asyncio.CancelledError:
            status = GroupStatus.CANCELLED
        return Group(
            id=self.id,
            index=self.index,
            task=self.tasks.task(self.index),
            status=status,
            admitted_version=self.admitted_version,
            trajectories=tuple(self._finished[member] for member in sorted(self._finished)),
        )

    def _outcome(self) -> GroupStatus | None:
        if self._replaced > self.ports.limits.max_replacements:
            return GroupStatus.FAILED
        return GroupStatus.COMPLETED if len(self._finished) == self.ports.limits.group_size else None

    def _end(self, status: TrajectoryStatus) -> None:
        self._over = status
        for loop in self._loops.values():
            loop.cancel_status = status

    async def _run_member(self, member: int) -> None:
        try:
            while self._over is None:
                trajectory = await self._run_attempt(member)
                if trajectory.status.trainable:
                    self._finished[member] = trajectory
                    return
                if trajectory.status is not TrajectoryStatus.CANCELLED:
                    self.faults[trajectory.status] += 1
                if self._over is None:
                    self._replaced += 1
                    if self._outcome() is not None:
                        return
        finally:
            self.active -= 1
            self._changed.notify()
            self.on_slot_free()

    async def _run_attempt(self, member: int) -> Trajectory:
        number = self.attempts
        self.attempts += 1
        again = f"r{self.incarnation}" if self.incarnation else ""
        self._loops[member] = AgentLoop(
            ports=self.ports,
            attempt=Attempt(
                id=TrajectoryId(f"{self.id}.{number}{again}"),
                group=self.id,
                task=self.tasks.task(self.index),
                sampling_seed=self.tasks.sampling_seed(self.index, number),
                min_version=self.admitted_version,
            ),
        )
        return await self._loops[member].run()
