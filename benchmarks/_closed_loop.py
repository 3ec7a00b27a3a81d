"""A closed loop of sessions on a fleet, whichever world it is in: the agent loop and the router of a run, and a clock.

So many sessions are under way at once; when one ends the next begins. Their scripts are the same in both worlds, so are the
router's choices, and what differs between two runs is what their engines and their transport do.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pearl.config.rollout import RolloutConfig
from pearl.core.profile import PlatformProfile
from pearl.core.shape import parse_shape
from pearl.errors import EngineError
from pearl.pipeline.agent_loop import AgentLoop, AgentPorts, Attempt
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.router import Router
from pearl.pipeline.turns import TurnJob
from pearl.ports import Codec, EnvironmentPool, Fleet, WorkerSpec
from pearl.records.ids import GpuId, GroupId, TaskId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.journal import TurnEntry
from pearl.records.trajectory import Task, TrajectoryStatus
from pearl.records.turn import Completion
from pearl.sim.codec import SimCodec
from pearl.sim.environment import SimEnvironmentPool, group_number
from pearl.sim.fleet import SimFleet, WorkerTimes
from pearl.sim.limits import Limits
from pearl.sim.script import Script, ScriptTurn, script_of
from pearl.sim.settings import EngineSettings
from pearl.virtual_time import Stall, VirtualLoop

LONGEST_S = 1e6
START_TIMEOUT_S = 120.0
NO_TIMES = WorkerTimes(start_s=0.0, sleep_s=0.0, wake_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sessions:
    """What is played."""

    at_once: int
    scripts: tuple[Script, ...]
    """One for each session, in the order in which they begin."""

    def __post_init__(self) -> None:
        if not (self.at_once >= 1 and self.scripts):
            raise ValueError(f"sessions: got {self.at_once} at once of {len(self.scripts)}, want >= 1 of >= 1")

    def script(self, group: int, attempt: int) -> Script:
        """As a `Workload`: the group is the session, and each is played once."""
        if attempt:
            raise ValueError(f"sessions: got attempt {attempt} at session {group}, want 0")
        return self.scripts[group]


def alike(at_once: int, sessions: int, turns: Sequence[ScriptTurn]) -> Sessions:
    """Sessions that are all the same; nobody waits for the answer to the last turn."""
    last = replace(turns[-1], env_s=0.0)
    return Sessions(at_once=at_once, scripts=(script_of((*turns[:-1], last)),) * sessions)


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How turns are sent."""

    readback: bool = True
    append_prefill_tokens: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Sessions, played to their ends."""

    makespan_s: float
    """From the first turn's beginning to the last one's end."""
    turn_mean_s: float
    """From handing a turn to the router to its end."""
    prompt_tokens: int
    computed_tokens: int
    """Prompt tokens that were computed, those of second computations included."""

    @property
    def reuse(self) -> float:
        """Share of the prompts' tokens that no engine had to compute, as the router's contexts count them."""
        return 1 - self.computed_tokens / self.prompt_tokens


class ForcedLengths(Router):
    """Generates as many tokens in a turn as its script says, in either world."""

    scripts: Callable[[TrajectoryId], Script]

    async def generate(self, job: TurnJob) -> Completion:
        turn = self.scripts(job.trajectory).turns[job.turn]
        return await super().generate(replace(job, max_new_tokens=turn.output_tokens))


@dataclass(slots=True)
class _Turns:
    """A journal that keeps turns."""

    turns: list[TurnEntry] = field(default_factory=list)

    def write(self, entry: object) -> None:
        if isinstance(entry, TurnEntry):
            self.turns.append(entry)

    async def flush(self) -> None:
        """Nothing is on its way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Where sessions are played."""

    fleet: Fleet
    environments: EnvironmentPool
    codec: Codec


def specs(shape: str) -> tuple[WorkerSpec, ...]:
    """The workers of a shape, a GPU each."""
    roles = parse_shape(shape).roles()
    return tuple(
        WorkerSpec(worker=WorkerId(number), gpus=(GpuId(f"local/{number}"),), role=role)
        for number, (role, _) in enumerate(roles)
    )


async def play(sessions: Sessions, world: World, workers: Sequence[WorkerSpec], how: Routing) -> Played:
    """Play sessions on workers that are up.

    Raises:
        EngineError: a worker was lost, or a session did not come to its end.
    """
    journal = _Turns()
    async with Nursery() as nursery:
        router = ForcedLengths(
            nursery, 4, _lost, append_prefill_tokens=how.append_prefill_tokens, readback=how.readback
        )
        router.scripts = lambda trajectory: sessions.script(int(trajectory), 0)
        for spec in workers:
            router.admit(spec.worker, world.fleet.engine(spec.worker), WeightVersion(0), spec.role)
        began_s = asyncio.get_running_loop().time()
        ports = AgentPorts(
            router=router,
            environments=world.environments,
            codec=world.codec,
            journal=journal,
            limits=_limits(sessions),
            max_new_tokens=1 << 30,
            temperature=1.0,
            start_s=began_s,
        )
        agents = [AgentLoop(ports, _attempt(number)) for number in range(len(sessions.scripts))]
        ended = await asyncio.gather(*(agent.run() for agent in agents))
        faults = [
            f"{one.id}: {one.status.value}: {one.detail}" for one in ended if one.status is not TrajectoryStatus.DONE
        ]
        if faults:
            raise EngineError(f"{len(faults)} of {len(ended)} sessions went wrong; the first: {faults[0]}")
        router.close()
    return _played(sessions, journal.turns)


def _played(sessions: Sessions, turns: Sequence[TurnEntry]) -> Played:
    ends = [turn.at_s - turn.env_s for turn in turns]
    began_s = min(end - turn.generate_s for end, turn in zip(ends, turns, strict=True))
    return Played(
        makespan_s=max(ends) - began_s,
        turn_mean_s=statistics.fmean(turn.generate_s for turn in turns),
        prompt_tokens=sum(sum(script.starts) for script in sessions.scripts),
        computed_tokens=sum(turn.computed for turn in turns),
    )


def simulate(
    sessions: Sessions,
    shape: str,
    profile: PlatformProfile,
    limits: Limits,
    how: Routing | None = None,
    *,
    time_scale: float = 1.0,
) -> Played:
    """Play sessions in the simulated world, on virtual time.

    Raises:
        EngineError: a session did not come to its end, e.g. because its context does not fit; or the world stalled.
    """
    stalls: list[Stall] = []

    async def work() -> Played:
        settings = EngineSettings(profile=profile, limits=limits, time_scale=time_scale, kv_ttl_s=LONGEST_S)
        fleet = SimFleet(lambda _: settings, lambda _: NO_TIMES)
        workers = specs(shape)
        report = await fleet.start(workers, START_TIMEOUT_S)
        if report.failed:
            raise EngineError(f"{shape}: workers did not start: {report.failed}")
        pool = SimEnvironmentPool(sessions.at_once, sessions)
        return await play(sessions, World(fleet=fleet, environments=pool, codec=SimCodec()), workers, how or Routing())

    with asyncio.Runner(loop_factory=lambda: VirtualLoop(on_stall=stalls.append)) as runner:
        played = runner.run(work())
    if stalls:
        raise EngineError(f"{shape}: the simulated world stalled: {stalls[0]}")
    return played


def _limits(sessions: Sessions) -> RolloutConfig:
    return RolloutConfig(
        max_turns=max(len(script.turns) for script in sessions.scripts),
        max_context_tokens=1 + max(script.starts[-1] + script.turns[-1].output_tokens for script in sessions.scripts),
        env_reset_timeout_s=LONGEST_S,
        env_step_timeout_s=LONGEST_S,
        turn_timeout_s=LONGEST_S,
        trajectory_timeout_s=LONGEST_S,
    )


def _attempt(number: int) -> Attempt:
    return Attempt(
        id=TrajectoryId(str(number)),
        group=GroupId(str(number)),
        task=Task(id=TaskId(f"session#{number}"), environment="script", seed=number, params={}),
        sampling_seed=number,
        min_version=WeightVersion(0),
    )


def session_number(task: Task) -> int:
    """Which session a task is."""
    return group_number(task.id)


def _lost(worker: WorkerId, detail: str) -> None:
    raise EngineError(f"worker {worker} was lost: {detail}")
