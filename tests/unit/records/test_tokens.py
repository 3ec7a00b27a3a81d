import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.records.tokens import Floats, TokenCount, TokenIds, Zeros

INT32 = st.integers(-(2**31), 2**31 - 1)
BOUND = st.none() | st.integers(-12, 12)
STEP = st.none() | st.integers(-3, 3).filter(bool)


@given(st.lists(INT32, max_size=8), st.lists(INT32, max_size=8))
def test_token_ids_behave_like_a_list(left: list[int], right: list[int]) -> None:
    a, b = TokenIds(left), TokenIds(right)
    assert len(a) == len(left)
    assert a.tolist() == left
    assert (a + b).tolist() == left + right
    assert (a == b) == (left == right)


@given(st.lists(INT32, max_size=8), BOUND, BOUND, STEP)
def test_slices_are_those_of_a_list(values: list[int], start: int | None, stop: int | None, step: int | None) -> None:
    part = slice(start, stop, step)
    assert TokenIds(values)[part].tolist() == values[part]
    assert len(TokenCount(len(values))[part]) == len(values[part])


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_counts_add(left: int, right: int) -> None:
    assert TokenCount(left) + TokenCount(right) == TokenCount(left + right)


def test_types_are_those_of_the_wire() -> None:
    assert TokenIds([1, 2]).array.dtype == np.int32
    assert Floats([1, 2]).array.dtype == np.float32
    assert Floats([0.1]).tolist() == [float(np.float32(0.1))]


def test_values_cannot_be_changed() -> None:
    source = np.array([1, 2, 3], dtype=np.int32)
    ids = TokenIds(source)
    source[0] = 9
    assert ids.tolist() == [1, 2, 3]
    for array in (ids.array, ids[1:].array, (ids + ids).array):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 9


def test_slices_share_memory_with_the_whole() -> None:
    ids = TokenIds(range(100))
    assert np.shares_memory(ids[10:90].array, ids.array)


def test_equality_is_within_a_type() -> None:
    assert TokenIds([1]) == TokenIds([1])
    assert TokenIds([1]) != Floats([1])
    assert TokenIds([1]) != [1]
    assert TokenCount(1) != TokenIds([1])
    assert TokenCount(2) != 2


def test_equal_sequences_have_equal_hashes() -> None:
    assert hash(TokenIds([1, 2, 3, 4])[1:3]) == hash(TokenIds([2, 3]))
    assert hash(TokenCount(3)) == hash(TokenCount(1) + TokenCount(2))
    assert Floats([0.0]) == Floats([-0.0])
    assert hash(Floats([0.0])) == hash(Floats([-0.0]))
    assert len({TokenIds([n % 3]) for n in range(9)}) == 3


def test_only_the_slice_travels() -> None:
    whole = TokenIds(range(100_000))
    for part in (whole[5:8], whole[10:4:-3]):
        data = pickle.dumps(part)
        assert len(data) < 1_000
        assert pickle.loads(data) == part
    assert pickle.loads(pickle.dumps(Floats([-0.5]))) == Floats([-0.5])


def test_adding_nothing_copies_nothing() -> None:
    ids = TokenIds([1, 2])
    assert ids + TokenIds() is ids
    assert (TokenIds() + ids).tolist() == [1, 2]


def test_bad_values_are_refused() -> None:
    with pytest.raises(ValueError, match="got 2 dimensions, want 1"):
        TokenIds([[1], [2]])
    with pytest.raises(ValueError, match="got 0 dimensions, want 1"):
        Floats(3.0)
    with pytest.raises(OverflowError):
        TokenIds([2**31])
    with pytest.raises(ValueError, match="got -1, want >= 0"):
        TokenCount(-1)


def test_they_show_what_they_hold() -> None:
    assert repr(TokenIds([3, 4])) == "TokenIds([3, 4])"
    assert repr(Floats([-0.5])) == "Floats([-0.5])"
    assert repr(TokenCount(7)) == "TokenCount(7)"


@given(st.integers(0, 12), st.integers(0, 12), BOUND, BOUND, STEP)
def test_zeros_are_floats_that_are_zero(
    left: int, right: int, start: int | None, stop: int | None, step: int | None
) -> None:
    zeros = Zeros(left)
    assert zeros.tolist() == zeros.array.tolist() == [0.0] * left
    assert zeros.array.dtype == np.float32
    assert len(zeros[start:stop:step]) == len(([0.0] * left)[start:stop:step])
    assert zeros + Zeros(right) == Zeros(left + right)
    assert hash(zeros) == hash(Zeros(left))
    assert pickle.loads(pickle.dumps(zeros)) == zeros
    some = Floats([-1.5])
    assert (zeros + some).tolist() == [0.0] * left + [-1.5]
    assert (some + zeros).tolist() == [-1.5] + [0.0] * left


def test_zeros_take_no_memory_and_cannot_be_changed() -> None:
    many = Zeros(10**12)
    assert len((many + many)[1:]) == 2 * 10**12 - 1
    with pytest.raises(ValueError, match="read-only"):
        Zeros(2).array[0] = 1
    with pytest.raises(ValueError, match=r"Zeros: got -1, want >= 0"):
        Zeros(-1)
    assert Zeros(2) != Floats([0, 0])
    assert repr(Zeros(2)) == "Zeros(2)"
