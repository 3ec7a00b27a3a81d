"""Journal entries: one frozen record per line of a stream.

Streams (`STREAMS`) are versioned apart: `decisions` (fleet state deltas with their hash), `choices` (what was decided, by which
numbers) and `changes` (what became of it), `turns` (counts, times, versions; no token ids; under 300 bytes a line),
`trajectories` and `groups` (every end), `steps` (training steps).
Together they hold enough to re-decide every decision and to rebuild the workload.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalEntry:
    """Base of all entries; `at_s` is loop time since the run began."""

    stream: ClassVar[str]
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry(JournalEntry):
    """One event folded into the fleet state, or refused."""

    stream: ClassVar[str] = "decisions"
    event: str
    """Class name of the event."""
    inputs: Mapping[str, Json]
    state_version: int
    """After the event."""
    state_hash: str
    refused: str | None = None
    """Reason, when the state did not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceEntry(JournalEntry):
    """What was decided about the fleet, and by which numbers."""

    stream: ClassVar[str] = "choices"
    number: int
    """From 0, one after the other."""
    moment: str
    state_version: int
    state_hash: str
    reason: str
    serving: str
    """The shape that could go on, empty where there is none."""
    chosen: str
    borrowed: int
    """Workers on training GPUs in the chosen shape."""
    serving_close_s: float
    """Predicted for it; infinite where nothing serves."""
    close_s: float
    error_s: float
    evaluated: int
    gates: list[Json]
    """`[gate, about, passed, reason, {name: number}]` each; a number that is not finite is null."""
    plan: list[Json]
    """`[kind of a group, [action of each step]]`; empty: nothing changes."""
    inputs: Mapping[str, Json]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeEntry(JournalEntry):
    """What became of the plan of a choice."""

    stream: ClassVar[str] = "changes"
    number: int
    """Of the choice."""
    seconds: float
    done: bool
    groups: list[Json]
    """`[kind, done, why not]` each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEntry(JournalEntry):
    """One turn generated and answered by the environment."""

    stream: ClassVar[str] = "turns"
    trajectory: str
    turn: int
    prompt: int
    """New context tokens of this turn."""
    generated: int
    computed: int
    """Context tokens that went through a forward pass."""
    end: str
    versions: list[list[int]]
    """`[version, tokens]` runs."""
    workers: list[int]
    generate_s: float
    env_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryEntry(JournalEntry):
    """A trajectory ended."""

    stream: ClassVar[str] = "trajectories"
    trajectory: str
    group: str
    status: str
    turns: int
    generated: int
    reward: float
    success: bool | None
    started_s: float
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupEntry(JournalEntry):
    """A group ended, or (status `restarted`) was found unfinished when a run was resumed."""

    stream: ClassVar[str] = "groups"
    group: str
    task: str
    seed: int
    status: str
    admitted_version: int
    attempts: int
    """Trajectories begun for the group, replacements included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepEntry(JournalEntry):
    """A training step ended."""

    stream: ClassVar[str] = "steps"
    version: int
    """After the step."""
    groups: list[str]
    samples: int
    trained_tokens: int
    staleness_tokens: Mapping[str, int]
    """Trained tokens by staleness."""
    wait_s: float
    """Trainer waiting for the batch."""
    train_s: float
    publish_s: float
    """Publishing the weights and loading them into the engines."""
    reward_mean: float
    success_mean: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


STREAMS: Mapping[str, int] = {
    "decisions": 1,
    "choices": 1,
    "changes": 1,
    "turns": 1,
    "trajectories": 1,
    "groups": 1,
    "steps": 1,
}
"""Stream name -> schema version; a reader refuses a version that it does not know."""
