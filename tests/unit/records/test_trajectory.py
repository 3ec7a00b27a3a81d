"""What is derived from a trajectory: which ends count, its tokens, its oldest weights."""

from __future__ import annotations

import pytest

from pearl.records.ids import GroupId, TaskId, TrajectoryId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.trajectory import Task, Trajectory, TrajectoryStatus, Turn
from pearl.records.turn import Completion, EndReason, Versions


def turn(*runs: tuple[int, int]) -> Turn:
    """A turn whose completion was drawn in `(version, tokens)` runs."""
    count = sum(tokens for _, tokens in runs)
    completion = Completion(
        token_ids=TokenIds(range(count)),
        logprobs=Floats([-1.0] * count),
        versions=Versions.of(runs),
        end=EndReason.STOP,
    )
    return Turn(prompt=TokenIds([1, 2, 3]), completion=completion, reward=0.0, env_s=0.0)


def trajectory(*turns: Turn) -> Trajectory:
    return Trajectory(
        id=TrajectoryId("g0.0"),
        group=GroupId("g0"),
        task=Task(id=TaskId("t"), environment="e", seed=0),
        status=TrajectoryStatus.DONE,
        turns=turns,
        reward=0.0,
        success=None,
        started_s=0.0,
        ended_s=1.0,
    )


def test_only_an_end_by_the_rules_counts_as_an_attempt() -> None:
    trainable = {status.value for status in TrajectoryStatus if status.trainable}

    assert trainable == {"done", "truncated_turns", "truncated_tokens", "truncated_environment"}


@pytest.mark.parametrize(
    ("turns", "generated", "oldest"),
    [
        ((), 0, None),
        ((turn(),), 0, None),
        ((turn((4, 2)),), 2, 4),
        ((turn((4, 2), (5, 3)), turn((5, 1))), 6, 4),
        ((turn((5, 1)), turn(), turn((3, 2))), 3, 3),
        ((turn((0, 1)), turn((1, 1))), 2, 0),
    ],
)
def test_tokens_and_oldest_weights(turns: tuple[Turn, ...], generated: int, oldest: int | None) -> None:
    one = trajectory(*turns)

    assert one.generated_tokens == generated
    assert one.oldest_version == oldest
