"""How an iteration's sequences are grouped; the arithmetic of attention is tested against transformers in test_model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pearl.engine.embedded.attention import Batch, groups_of

LIKE = torch.zeros(1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def test_batch_is_ordered_by_chunk_length_class_then_slot() -> None:
    batch = Batch.of(ints(4, 0, 2, 1), ints(10, 20, 0, 5), ints(1, 3, 4, 1))
    assert batch.slots.tolist() == [1, 4, 0, 2]
    assert batch.token_slots.tolist() == [1, 4, 0, 0, 0, 2, 2, 2, 2]
    assert batch.token_positions.tolist() == [5, 10, 20, 21, 22, 0, 1, 2, 3]
    assert batch.lasts.tolist() == [0, 1, 4, 8]
    decode, prefill = groups_of(batch, LIKE, 1)
    assert (decode.tokens, decode.length, decode.reach) == (slice(0, 2), 1, 11)
    assert (prefill.tokens, prefill.length, prefill.reach) == (slice(2, 9), 4, 23)


def test_mask_lets_a_query_see_itself_and_what_is_before() -> None:
    (group,) = groups_of(Batch.of(ints(0, 1), ints(2, 0), ints(3, 4)), LIKE, 1)
    seen = (group.mask[:, 0, :, 0] == 0).int().tolist()
    assert group.reach == 5
    assert seen[0][:3] == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert seen[1] == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    assert torch.isinf(group.mask).any()


def test_close_slots_are_read_in_place_and_distant_ones_gathered() -> None:
    (near,) = groups_of(Batch.of(ints(3, 5, 6), ints(1, 1, 1), ints(1, 1, 1)), LIKE, 1)
    assert near.gathered is None
    assert near.window == slice(3, 7)
    assert near.rows == 4
    (far,) = groups_of(Batch.of(ints(3, 15), ints(1, 1), ints(1, 1)), LIKE, 1)
    assert far.gathered is not None
    assert far.gathered.tolist() == [3, 15]
    assert far.rows == 2


@pytest.mark.parametrize("seed", range(20))
def test_no_prefill_grid_is_more_than_half_padding(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 30))
    slots = rng.permutation(64)[:count].astype(np.int64)
    counts = rng.integers(1, 200, count)
    for group in groups_of(Batch.of(slots, rng.integers(0, 50, count), counts), LIKE, 1):
        real = group.tokens.stop - group.tokens.start
        if group.length > 1:
            assert real > group.rows * group.length / 2
        else:
            assert group.rows <= 2 * real
