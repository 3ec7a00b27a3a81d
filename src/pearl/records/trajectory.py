"""Trajectories and groups: what rollout produces.

Tokens are the unit of truth: a trajectory is its token ids with, per generated token, the sampled log-probability and the
weight version that drew it. Nothing is ever re-tokenised.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from pearl.records.ids import GroupId, TaskId, TrajectoryId, WeightVersion
from pearl.records.tokens import Tokens
from pearl.records.turn import Completion

Scalar = str | int | float | bool


class TrajectoryStatus(enum.Enum):
    """How a trajectory ended; each ends exactly once."""

    DONE = "done"
    """The environment said so, by its rules."""
    TRUNCATED_TURNS = "truncated_turns"
    """`rollout.max_turns` was reached."""
    TRUNCATED_TOKENS = "truncated_tokens"
    """`rollout.max_context_tokens` was reached."""
    TRUNCATED_ENVIRONMENT = "truncated_environment"
    """The environment said so, for a limit of its own (`EnvironmentReply.truncated`)."""
    TIMED_OUT = "timed_out"
    """`rollout.trajectory_timeout_s` passed."""
    ENV_RAISED = "env_raised"
    ENV_HUNG = "env_hung"
    ENV_LOST = "env_lost"
    ENV_NONSENSE = "env_nonsense"
    ENGINE_FAILED = "engine_failed"
    """No engine could serve a turn within the bounds on attempts and waits."""
    EXPIRED = "expired"
    """Its group passed `rollout.straggler_timeout_s`."""
    CANCELLED = "cancelled"
    """The run ended first."""

    @property
    def trainable(self) -> bool:
        """Whether the trajectory counts as an attempt; every other status is a fault, never a reward of zero."""
        return self in _TRAINABLE


_TRAINABLE = frozenset(
    {
        TrajectoryStatus.DONE,
        TrajectoryStatus.TRUNCATED_TURNS,
        TrajectoryStatus.TRUNCATED_TOKENS,
        TrajectoryStatus.TRUNCATED_ENVIRONMENT,
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt: what an environment is opened with."""

    id: TaskId
    environment: str
    """Registered kind, or `package.module:Name`."""
    seed: int
    """Seeds the environment; all attempts of a group share it."""
    params: Mapping[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """What an environment answers to one action."""

    observation: str
    reward: float
    """Of this step; finite."""
    done: bool
    truncated: bool = False
    """With `done`: ended by a limit of the environment, not by its rules."""
    success: bool | None = None
    """With `done`: whether the task was solved, where the environment knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One prompt -> completion -> environment reply."""

    prompt: Tokens
    """Tokens new before the completion (first prompt, or the last observation), not trained on."""
    completion: Completion
    reward: float
    env_s: float
    """Seconds that the environment took to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a task, ended."""

    id: TrajectoryId
    group: GroupId
    task: Task
    status: TrajectoryStatus
    turns: tuple[Turn, ...]
    """Complete turns only."""
    reward: float
    """Sum over turns."""
    success: bool | None
    started_s: float
    ended_s: float
    detail: str = ""
    """For a fault: what happened."""

    @property
    def generated_tokens(self) -> int:
        """Tokens drawn by the model, i.e. trained on."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)

    @property
    def oldest_version(self) -> WeightVersion | None:
        """The oldest weights that drew one of its tokens."""
        oldest = [turn.completion.versions.oldest for turn in self.turns]
        return min((version for version in oldest if version is not None), default=None)


class GroupStatus(enum.Enum):
    """How a group ended."""

    COMPLETED = "completed"
    """`group_size` trainable trajectories."""
    EXPIRED = "expired"
    """Passed `rollout.straggler_timeout_s`; replaced by a new group."""
    FAILED = "failed"
    """Its bound on replacement trajectories was passed; replaced by a new group."""
    CANCELLED = "cancelled"
    """The run ended first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Attempts at one task: the unit of advantage and of admission. Ended."""

    id: GroupId
    index: int
    """Order of admission, from 0."""
    task: Task
    status: GroupStatus
    admitted_version: WeightVersion
    """No token of the group is older."""
    trajectories: tuple[Trajectory, ...]
    """The trainable ones, `group_size` of them when COMPLETED, in order of their attempt number."""
