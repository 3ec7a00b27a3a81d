"""Micro batches: budget, padding, and the shift by one."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.train.batching import MIN_FILL, WORTHWHILE_TOKENS, TokenSequence, micro_batches

CPU = torch.device("cpu")


def sequence(length: int, *ranges: tuple[int, int], first: int = 1) -> TokenSequence:
    return TokenSequence.of(np.arange(first, first + length, dtype=np.int32), ranges)


def test_layout_by_hand() -> None:
    short, long = sequence(3, (1, 3), first=10), sequence(5, (2, 3), (4, 5), first=20)
    (micro,) = micro_batches([short, long], [0, 1], 100, CPU)
    assert micro.indices == (1, 0)
    assert micro.input_ids.tolist() == [[20, 21, 22, 23, 24], [10, 11, 12, 0, 0]]
    assert micro.rows.tolist() == [0, 0, 1, 1]
    assert micro.predictors.tolist() == [1, 3, 0, 1]
    assert micro.targets.tolist() == [22, 24, 11, 12]
    values = [np.array([1.0, 2.0]), np.array([3.0, 4.0])]
    assert micro.flat(values).tolist() == [3, 4, 1, 2]
    assert micro.flat(values).dtype == torch.float32


def test_ranges_become_positions() -> None:
    assert sequence(9, (1, 3), (6, 9)).trained.tolist() == [1, 2, 6, 7, 8]
    assert sequence(9).trained.tolist() == []


def test_only_the_chosen_ones() -> None:
    sequences = [sequence(4, (1, 2)) for _ in range(5)]
    (micro,) = micro_batches(sequences, [3, 1], 100, CPU)
    assert sorted(micro.indices) == [1, 3]


def test_a_sequence_beyond_the_budget_comes_alone() -> None:
    packs = micro_batches([sequence(4, (1, 2)), sequence(50, (1, 2)), sequence(4, (1, 2))], [0, 1, 2], 10, CPU)
    assert [micro.indices for micro in packs] == [(1,), (0, 2)]


def test_short_sequences_do_not_pad_a_big_batch_of_long_ones() -> None:
    long = [sequence(64, (1, 2)) for _ in range(WORTHWHILE_TOKENS // 64)]
    short = [sequence(int(64 * MIN_FILL) - 1, (1, 2)) for _ in range(8)]
    packs = micro_batches([*long, *short], list(range(len(long) + len(short))), 10**6, CPU)
    assert [len(micro.indices) for micro in packs] == [len(long), len(short)]


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(2, 70), min_size=1, max_size=40),
    budget=st.integers(1, 4000),
    data=st.data(),
)
def test_every_trained_token_is_predicted_once_within_the_budget(
    lengths: list[int], budget: int, data: st.DataObject
) -> None:
    sequences = [
        TokenSequence(
            token_ids=np.arange(1000 * n, 1000 * n + length, dtype=np.int32),
            trained=np.array(sorted(data.draw(st.sets(st.integers(1, length - 1), min_size=1))), dtype=np.int64),
        )
        for n, length in enumerate(lengths)
    ]
    packs = micro_batches(sequences, range(len(sequences)), budget, CPU)
    targets: list[int] = []
    for micro in packs:
        assert micro.input_ids.numel() <= budget or len(micro.indices) == 1
        # Tokens are consecutive numbers here: each is predicted from the one before it.
        assert (micro.input_ids[micro.rows, micro.predictors] + 1).tolist() == micro.targets.tolist()
        targets += micro.targets.tolist()
    assert sorted(targets) == sorted(int(s.token_ids[p]) for s in sequences for p in s.trained)
