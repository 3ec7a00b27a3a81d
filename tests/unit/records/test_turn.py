from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from pearl.records.turn import VersionRun, Versions

PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 4)), max_size=8)


def expand(pairs: list[tuple[int, int]]) -> list[int]:
    """One version per token, the long way."""
    return [version for version, tokens in pairs for _ in range(tokens)]


def runs(versions: Versions) -> list[tuple[int, int]]:
    return [(run.version, run.tokens) for run in versions.runs]


@given(PAIRS)
def test_runs_encode_one_version_per_token(pairs: list[tuple[int, int]]) -> None:
    tokens = expand(pairs)
    versions = Versions.of(pairs)
    assert runs(versions) == [(version, len(list(run))) for version, run in groupby(tokens)]
    assert len(versions) == len(tokens)
    assert versions.oldest == (min(tokens) if tokens else None)


@given(PAIRS, PAIRS)
def test_a_sum_covers_both(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> None:
    assert Versions.of(left) + Versions.of(right) == Versions.of(left + right)


def test_examples() -> None:
    assert runs(Versions.of([(3, 2), (3, 1), (4, 0), (3, 5), (4, 1)])) == [(3, 8), (4, 1)]
    assert runs(Versions.of([(1, 2)]) + Versions.of([(1, 3), (2, 1)])) == [(1, 5), (2, 1)]
    assert Versions.of([(2, 1), (0, 1), (5, 1)]).oldest == 0
    assert Versions().oldest is None
    assert Versions.of(iter([(1, 1)])) == Versions((VersionRun(version=1, tokens=1),))


def test_an_empty_side_changes_nothing() -> None:
    some = Versions.of([(1, 2)])
    assert some + Versions() is some
    assert Versions() + some is some
    assert len(Versions() + Versions()) == 0
