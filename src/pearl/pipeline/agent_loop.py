"""The agent loop: one trajectory from reset to its one and only end.

Laws:

- *once*: `AgentLoop.run` returns exactly one `Trajectory` whatever happens, and journals it there and nowhere else.
- *typed*: a fault of an environment or an engine is a status, never a reward of zero, and never a hung batch: every wait
  is guarded.
- *tokens*: the context grows by appending; nothing that was sampled is ever encoded again.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field

from pearl.config.rollout import RolloutConfig
from pearl.errors import (
    EngineError,
    EnvironmentFault,
    EnvironmentHung,
    EnvironmentLost,
    EnvironmentNonsense,
)
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.router import Router
from pearl.pipeline.turns import TurnJob
from pearl.ports import Codec, Environment, EnvironmentPool, JournalSink
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.journal import TrajectoryEntry, TurnEntry
from pearl.records.tokens import Tokens
from pearl.records.trajectory import EnvironmentReply, Task, Trajectory, TrajectoryStatus, Turn
from pearl.records.turn import Completion, EndReason, Sampling

CLOSE_TIMEOUT_S = 10.0
"""Closing gives a slot back and must not hold up a trajectory's end; the pool clears up what is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPorts:
    """What every agent loop of a run shares."""

    router: Router
    environments: EnvironmentPool
    codec: Codec
    journal: JournalSink
    limits: RolloutConfig
    max_new_tokens: int
    temperature: float
    start_s: float
    """Loop time at which the run began: journal times count from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One trajectory to run."""

    id: TrajectoryId
    group: GroupId
    task: Task
    sampling_seed: int
    min_version: WeightVersion


class _Ended(Exception):
    """Leaves the loop with a status."""

    def __init__(self, status: TrajectoryStatus, detail: str = "") -> None:
        super().__init__(detail)
        self.status = status


@dataclass(slots=True)
class AgentLoop:
    """Runs one attempt; make a new one for each."""

    ports: AgentPorts
    attempt: Attempt
    cancel_status: TrajectoryStatus = TrajectoryStatus.CANCELLED
    """What a cancellation means; set before cancelling the task that runs this."""
    _turns: list[Turn] = field(default_factory=list)
    _success: bool | None = None
    _sampling: Sampling = field(init=False)

    def __post_init__(self) -> None:
        self._sampling = Sampling(
            seed=self.attempt.sampling_seed,
            temperature=self.ports.temperature,
            stop_token_ids=self.ports.codec.stop_token_ids,
        )

    @property
    def turns_done(self) -> int:
        """Turns that the environment has answered."""
        return len(self._turns)

    async def run(self) -> Trajectory:
        """Run to the end; a cancellation is an end like the others (`cancel_status`)."""
        started_s = asyncio.get_running_loop().time()
        try:
            status, detail = await self._play()
        except asyncio.CancelledError:
            status, detail = self.cancel_status, ""
        except BaseException as error:
            # Not a fault of environment or engine: it ends the run, and the journal says where.
            self._end(TrajectoryStatus.CANCELLED, f"{type(error).__name__}: {error}", started_s)
            raise
        return self._end(status, detail, started_s)

    def _end(self, status: TrajectoryStatus, detail: str, started_s: float) -> Trajectory:
        trajectory = Trajectory(
            id=self.attempt.id,
            group=self.attempt.group,
            task=self.attempt.task,
            status=status,
            turns=tuple(self._turns),
            reward=sum(turn.reward for turn in self._turns),
            success=self._success,
            started_s=started_s - self.ports.start_s,
            ended_s=asyncio.get_running_loop().time() - self.ports.start_s,
            detail=detail,
        )
        self._journal_end(trajectory)
        return trajectory

    async def _play(self) -> tuple[TrajectoryStatus, str]:
        environment: Environment | None = None
        try:
            async with guard(self.ports.limits.trajectory_timeout_s, f"trajectory {self.attempt.id}"):
                environment = await self.ports.environments.open(self.attempt.task)
                return await self._turns_of(environment), ""
        except _Ended as end:
            return end.status, str(end)
        except GuardExpired as error:
            return TrajectoryStatus.TIMED_OUT, str(error)
        except EnvironmentFault as fault:
            return _status_of(fault), str(fault)
        finally:
            self.ports.router.release(self.attempt.id)
            if environment is not None:
                await self._close(environment)

    async def _turns_of(self, environment: Environment) -> TrajectoryStatus:
        limits, codec = self.ports.limits, self.ports.codec
        prompt: Tokens = codec.first_prompt(await self._reset(environment))
        context = prompt
        for turn in range(limits.max_turns):
            room = limits.max_context_tokens - len(context)
            if room < 1:
                return TrajectoryStatus.TRUNCATED_TOKENS
            completion, generate_s = await self._generate(turn, context, min(room, self.ports.max_new_tokens))
            action = codec.action(completion.token_ids)
            reply, env_s = await self._step(environment, turn, action)
            self._turns.append(Turn(prompt=prompt, completion=completion, reward=reply.reward, env_s=env_s))
            self._journal_turn(turn, len(prompt), completion, generate_s, env_s)
            if reply.done:
                self._success = reply.success
                return TrajectoryStatus.TRUNCATED_ENVIRONMENT if reply.truncated else TrajectoryStatus.DONE
            prompt = codec.append(reply.observation, closed=completion.end is EndReason.STOP)
            context = context + completion.token_ids + prompt
        return TrajectoryStatus.TRUNCATED_TURNS

    async def _close(self, environment: Environment) -> None:
        with contextlib.suppress(GuardExpired):
            async with guard(CLOSE_TIMEOUT_S, f"environment close of {self.attempt.id}"):
                await environment.close()

    async def _reset(self, environment: Environment) -> str:
        try:
            async with guard(self.ports.limits.env_reset_timeout_s, f"environment reset of {self.attempt.id}"):
                return await environment.reset(self.attempt.task.seed)
        except GuardExpired as error:
            raise EnvironmentHung(str(error)) from error

    async def _generate(self, turn: int, context: Tokens, max_new_tokens: int) -> tuple[Completion, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        job = TurnJob(
            trajectory=self.attempt.id,
            turn=turn,
            context=context,
            sampling=self._sampling,
            max_new_tokens=max_new_tokens,
            min_version=self.attempt.min_version,
        )
        try:
            async with guard(self.ports.limits.turn_timeout_s, f"turn {turn} of {self.attempt.id}"):
                completion = await self.ports.router.generate(job)
        except (EngineError, GuardExpired) as error:
            raise _Ended(TrajectoryStatus.ENGINE_FAILED, str(error)) from error
        return completion, loop.time() - began_s

    async def _step(self, environment: Environment, turn: int, action: str) -> tuple[EnvironmentReply, float]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            async with guard(self.ports.limits.env_step_timeout_s, f"environment step {turn} of {self.attempt.id}"):
                reply = await environment.step(action)
        except GuardExpired as error:
            raise EnvironmentHung(str(error)) from error
        return reply, loop.time() - began_s

    def _journal_turn(
        self, turn: int, prompt_tokens: int, completion: Completion, generate_s: float, env_s: float
    ) -> None:
        self.ports.journal.write(
            TurnEntry(
                at_s=asyncio.get_running_loop().time() - self.ports.start_s,
                trajectory=self.attempt.id,
                turn=turn,
                prompt=prompt_tokens,
                generated=len(completion.token_ids),
                computed=completion.computed_prompt_tokens,
                end=completion.end.value,
                versions=[[run.version, run.tokens] for run in completion.versions.runs],
                workers=list(completion.workers),
                generate_s=generate_s,
                env_s=env_s,
            )
        )

    def _journal_end(self, trajectory: Trajectory) -> None:
        self.ports.journal.write(
            TrajectoryEntry(
                at_s=trajectory.ended_s,
                trajectory=trajectory.id,
                group=trajectory.group,
                status=trajectory.status.value,
                turns=len(trajectory.turns),
                generated=trajectory.generated_tokens,
                reward=trajectory.reward,
                success=trajectory.success,
                started_s=trajectory.started_s,
                detail=trajectory.detail[:200],
            )
        )


def _status_of(fault: EnvironmentFault) -> TrajectoryStatus:
    match fault:
        case EnvironmentHung():
            return TrajectoryStatus.ENV_HUNG
        case EnvironmentLost():
            return TrajectoryStatus.ENV_LOST
        case EnvironmentNonsense():
            return TrajectoryStatus.ENV_NONSENSE
        case _:
            return TrajectoryStatus.ENV_RAISED
