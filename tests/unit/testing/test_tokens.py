from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenCount
from pearl.records.turn import Sampling, TurnRequest
from pearl.testing.tokens import TurnStarts, fake_draws, fake_token

SEEDS = st.integers(0, 2**63 - 1)


@given(SEEDS, st.integers(0, 10**6), st.integers(1, 300), st.integers(2, 50_000))
def test_a_draw_is_a_function_of_seed_and_position(seed: int, start: int, count: int, vocab: int) -> None:
    tokens, logprobs = fake_draws(seed, start, count, vocab)
    assert len(tokens) == len(logprobs) == count
    assert ((tokens >= 1) & (tokens < vocab)).all()
    assert ((logprobs > -2) & (logprobs <= -1)).all()
    for at in {0, count // 2, count - 1}:
        assert tokens[at] == fake_token(seed, start + at, vocab)
        assert logprobs[at] == fake_draws(seed, start + at, 1, vocab)[1][0]


def test_draws_are_spread_over_the_vocabulary() -> None:
    # 10,000 draws of 10 equal classes: 1,000 each, standard deviation 30.
    counts = np.bincount(fake_draws(7, 0, 10_000, 11)[0], minlength=11)[1:]
    assert ((counts > 850) & (counts < 1150)).all()


def test_seeds_and_positions_are_independent() -> None:
    one, other = (fake_draws(seed, 0, 10_000, 11)[0] for seed in (1, 2))
    # Two independent streams of 10 classes agree at one place in ten.
    assert 850 < int((one == other).sum()) < 1150
    assert 850 < int((one[1:] == one[:-1]).sum()) < 1150


def test_draws_are_pinned() -> None:
    # Word p % 16 (4 bytes, little-endian) of BLAKE2b(p // 16) keyed with the seed, modulo the vocabulary without 0.
    expected = []
    for position in range(126, 130):
        digest = blake2b((position // 16).to_bytes(8, "little"), key=(1).to_bytes(8, "little")).digest()
        word = int.from_bytes(digest[position % 16 * 4 :][:4], "little")
        expected.append(word % 96 + 1)
    assert fake_draws(1, 126, 4)[0].tolist() == expected == [66, 56, 74, 67]


def test_draws_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="read-only"):
        fake_draws(0, 0, 4)[0][0] = 9


def request(context: int, turn: int = 0, trajectory: str = "t") -> TurnRequest:
    return TurnRequest(
        id=RequestId("r"),
        trajectory=TrajectoryId(trajectory),
        turn=turn,
        context=TokenCount(context),
        sampling=Sampling(seed=0),
        max_new_tokens=1,
        min_version=WeightVersion(0),
    )


def test_a_turn_is_measured_from_where_it_began() -> None:
    starts = TurnStarts()
    assert starts.generated(request(10)) == 0
    assert starts.generated(request(14)) == 4
    assert starts.generated(request(10)) == 0
    assert starts.generated(request(14, trajectory="other")) == 0
    assert starts.generated(request(20, turn=1)) == 0
    assert starts.generated(request(21, turn=1)) == 1
    # Begun again, with a shorter prompt.
    assert starts.generated(request(3, turn=1)) == 0
    assert starts.generated(request(5, turn=1)) == 2
