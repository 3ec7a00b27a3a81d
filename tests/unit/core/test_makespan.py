"""Targets side by side: to arrays and back."""

from __future__ import annotations

import pytest

from pearl.core.makespan import Infeasible, Target, candidates_of
from pearl.core.shape import Shape, parse_shape
from pearl.core.state import Role
from pearl.errors import ShapeError

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


def target(text: str, append_tokens: int = 0) -> Target:
    return Target(shape=parse_shape(text), append_tokens=append_tokens)


def test_targets_as_arrays() -> None:
    found = candidates_of([target("3C@tp2"), target("1P@tp4+5D@tp2", 64), target("2P4D+1C@tp8")])
    assert len(found) == 3
    assert {role: found.workers[role].tolist() for role in (P, D, C)} == {P: [0, 1, 2], D: [0, 5, 4], C: [3, 0, 1]}
    assert {role: found.tp[role].tolist() for role in (P, D, C)} == {P: [1, 4, 1], D: [1, 2, 1], C: [2, 1, 8]}
    assert found.append_tokens.tolist() == [0, 64, 0]
    assert found.second.tolist() == [0, 0, 0]
    assert found.second_tp.tolist() == [1, 1, 1]


@pytest.mark.parametrize("text", ["1C", "3C@tp2", "2P6D@tp2", "1P@tp4+5D@tp2", "2P@tp1+4D@tp1+1C@tp8"])
def test_and_back(text: str) -> None:
    assert candidates_of([target("7C"), target(text, 32)]).target(1) == target(text, 32)


def test_pools_come_back_in_one_order() -> None:
    found = candidates_of([target("1C+3D+2P")]).target(0)
    assert [(pool.role, pool.workers) for pool in found.shape.pools] == [(P, 2), (D, 3), (C, 1)]


def test_no_targets() -> None:
    assert len(candidates_of([])) == 0


def test_a_shape_without_workers_stays_one() -> None:
    assert candidates_of([Target(shape=Shape(()))]).target(0) == Target(shape=Shape(()))


def test_colocated_workers_of_two_parallelisms() -> None:
    """The first pool stands with the roles, the other one apart; both come back."""
    texts = ["2C", "3C@tp4+1C@tp2", "1P@tp1+2D@tp1+1C@tp1+5C@tp8"]
    found = candidates_of([target(text) for text in texts])
    assert found.workers[C].tolist() == [2, 3, 1]
    assert found.tp[C].tolist() == [1, 4, 1]
    assert found.second.tolist() == [0, 1, 5]
    assert found.second_tp.tolist() == [1, 2, 8]
    assert [found.target(index) for index in range(3)] == [target(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1C@tp1+2C@tp2+1C@tp4", "colocated, want at most two"),
        ("1P@tp1+1P@tp2+1D@tp1", "prefill, want at most one"),
        ("1P@tp1+1D@tp1+1D@tp2", "decode, want at most one"),
    ],
)
def test_more_parallelisms_than_that_are_refused(text: str, message: str) -> None:
    with pytest.raises(ShapeError) as error:
        candidates_of([target("1C"), target(text)])
    assert str(error.value) == f"shape {text}: got another tensor parallelism for {message}"


@pytest.mark.parametrize(("append", "text"), [(0, "1P3D@tp2"), (1, "1P3D@tp2 append<=1")])
def test_a_target_in_words(append: int, text: str) -> None:
    assert str(target("1P3D@tp2", append)) == text


def test_feasible_is_falsy() -> None:
    """Arrays of reasons are used as masks, and stand in journals as numbers."""
    assert not Infeasible.NO
    assert [reason.value for reason in Infeasible] == [0, 1, 2, 3, 4]
