from __future__ import annotations

import numpy as np
import pytest

from pearl.pipeline.batch import assemble
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenCount, TokenIds, Tokens, Zeros
from pearl.records.trajectory import Group, GroupStatus, Trajectory, TrajectoryStatus, Turn
from pearl.records.turn import Completion, EndReason, Versions
from pearl.testing.world import fake_task


def turn(prompt: list[int], drawn: list[int], versions: list[tuple[int, int]], reward: float = 0.0) -> Turn:
    return Turn(
        prompt=TokenIds(prompt),
        completion=Completion(
            token_ids=TokenIds(drawn),
            logprobs=Floats([-token / 16 for token in drawn]),
            versions=Versions.of(versions),
            end=EndReason.STOP,
            workers=(WorkerId(0),),
        ),
        reward=reward,
        env_s=0.0,
    )


def trajectory(name: str, *turns: Turn) -> Trajectory:
    return Trajectory(
        id=TrajectoryId(name),
        group=GroupId(name.partition(".")[0]),
        task=fake_task(),
        status=TrajectoryStatus.DONE,
        turns=turns,
        reward=sum(one.reward for one in turns),
        success=None,
        started_s=0.0,
        ended_s=1.0,
    )


def group(index: int, *trajectories: Trajectory) -> Group:
    return Group(
        id=GroupId(f"g{index}"),
        index=index,
        task=fake_task(),
        status=GroupStatus.COMPLETED,
        admitted_version=WeightVersion(0),
        trajectories=trajectories,
    )


def test_a_sample_is_the_conversation_with_the_drawn_ranges_marked() -> None:
    one = trajectory(
        "g0.0",
        turn([1, 2, 3], [10, 11], [(4, 2)]),
        turn([5], [12, 13, 14], [(4, 1), (5, 2)], reward=0.5),
        turn([6, 7], [15], [(6, 1)], reward=1.0),
    )
    batch = assemble(WeightVersion(6), [group(0, one)])
    (sample,) = batch.samples
    assert sample.ids.tolist() == [1, 2, 3, 10, 11, 5, 12, 13, 14, 6, 7, 15]
    assert sample.trained == ((3, 5), (6, 9), (11, 12))
    ids = sample.ids.array
    assert np.concatenate([ids[start:stop] for start, stop in sample.trained]).tolist() == [10, 11, 12, 13, 14, 15]
    assert sample.logprobs.tolist() == [-10 / 16, -11 / 16, -12 / 16, -13 / 16, -14 / 16, -15 / 16]
    assert sample.versions == Versions.of([(4, 3), (5, 2), (6, 1)])
    assert sample.reward == 1.5
    assert (sample.trajectory, sample.group) == ("g0.0", "g0")
    assert batch.version == 6
    assert batch.staleness_tokens == {0: 1, 1: 2, 2: 3}


def test_groups_and_trajectories_keep_their_order() -> None:
    one = turn([1], [2], [(0, 1)])
    batch = assemble(
        WeightVersion(0),
        [group(3, trajectory("g3.1", one), trajectory("g3.0", one)), group(1, trajectory("g1.0", one))],
    )
    assert [sample.trajectory for sample in batch.samples] == ["g3.1", "g3.0", "g1.0"]
    assert batch.groups == ("g3", "g1")


def test_a_trajectory_without_a_generated_token_is_left_out() -> None:
    batch = assemble(WeightVersion(0), [group(0, trajectory("g0.0"), trajectory("g0.1", turn([1], [2], [(0, 1)])))])
    assert [sample.trajectory for sample in batch.samples] == ["g0.1"]


def counted(prompt: Tokens, logprobs: Floats) -> Turn:
    return Turn(
        prompt=prompt,
        completion=Completion(
            token_ids=TokenCount(2), logprobs=logprobs, versions=Versions.of([(0, 2)]), end=EndReason.STOP
        ),
        reward=0.0,
        env_s=0.0,
    )


def test_counts_of_tokens_make_a_sample_that_nobody_can_compute_with() -> None:
    turns = (counted(TokenCount(3), Zeros(2)), counted(TokenCount(4), Zeros(2)))
    (sample,) = assemble(WeightVersion(0), [group(0, trajectory("g0.0", *turns))]).samples
    assert (sample.token_ids, sample.logprobs) == (TokenCount(11), Zeros(4))
    assert sample.trained == ((3, 5), (9, 11))
    with pytest.raises(TypeError, match=r"trajectory g0\.0: this needs token ids, got only their count"):
        _ = sample.ids


def test_log_probabilities_may_be_known_of_counted_tokens() -> None:
    turns = (counted(TokenCount(3), Floats([-1, -2])), counted(TokenCount(4), Zeros(2)))
    (sample,) = assemble(WeightVersion(0), [group(0, trajectory("g0.0", *turns))]).samples
    assert sample.logprobs == Floats([-1, -2, 0, 0])


def test_ids_and_counts_do_not_mix() -> None:
    with pytest.raises(TypeError, match=r"trajectory g0\.0: got token ids and counts of tokens, want one or the other"):
        assemble(WeightVersion(0), [group(0, trajectory("g0.0", counted(TokenIds([1]), Zeros(2))))])
