"""Which worker and which way, from what is known of the workers alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest

from pearl.core.state import Role
from pearl.pipeline.placement import STICKY_SLACK, Need, Placement, Way, choose, left_behind
from pearl.records.ids import WeightVersion, WorkerId

ROLES = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COLOCATED}


V0 = WeightVersion(0)


@dataclass(frozen=True, kw_only=True)
class One:
    id: WorkerId
    role: Role
    version: WeightVersion = V0
    load: int = 0
    draining: bool = False


def fleet(letters: str, *loads: int, **changes: object) -> dict[WorkerId, One]:
    """Workers by letter, with their loads; `w1=...` replaces fields of worker 1."""
    made = {}
    for n, (letter, load) in enumerate(itertools.zip_longest(letters, loads, fillvalue=0)):
        fields = changes.get(f"w{n}", {})
        one = One(id=WorkerId(n), role=ROLES[str(letter)], load=int(load))
        made[WorkerId(n)] = replace(one, **fields)  # type: ignore[arg-type]
    return made


def need(
    tokens: int = 100,
    *,
    held: dict[int, int] | None = None,
    failed: tuple[int, ...] = (),
    append: int = 10,
    whole: bool = False,
    version: int = 0,
) -> Need:
    return Need(
        tokens=tokens,
        min_version=WeightVersion(version),
        held={WorkerId(w): n for w, n in (held or {}).items()},
        failed={WorkerId(w) for w in failed},
        append_tokens=append,
        whole=whole,
    )


def chosen(workers: dict[WorkerId, One], one: Need) -> tuple[Way, int, int | None] | None:
    placed = choose(workers, one)
    return placed and (placed.way, placed.generator.id, placed.prefill and placed.prefill.id)


WHOLE, APPEND, HAND_OFF = Way.WHOLE, Way.APPEND, Way.HAND_OFF


@pytest.mark.parametrize(
    ("letters", "loads", "want"),
    [
        ("C", (5,), (WHOLE, 0, None)),
        ("CC", (1, 0), (WHOLE, 1, None)),
        ("CC", (1, 1), (WHOLE, 0, None)),
        ("PD", (0, 0), (HAND_OFF, 1, 0)),
        ("PPDD", (2, 1, 4, 3), (HAND_OFF, 3, 1)),
        ("PPDD", (1, 1, 3, 3), (HAND_OFF, 2, 0)),
        ("PDC", (0, 3, 2), (WHOLE, 2, None)),
        ("PDC", (0, 2, 3), (HAND_OFF, 1, 0)),
        ("DD", (2, 1), (WHOLE, 1, None)),  # no prefill worker serves
        ("PP", (2, 1), (WHOLE, 1, None)),  # nobody to generate
        ("PD", (0, 99), (HAND_OFF, 1, 0)),  # a prefill worker does not generate beside one that does
        ("", (), None),
    ],
)
def test_a_new_trajectory_goes_to_the_least_loaded_of_each_side(
    letters: str, loads: tuple[int, ...], want: tuple[Way, int, int | None] | None
) -> None:
    assert chosen(fleet(letters, *loads), need()) == want


@pytest.mark.parametrize(
    ("tokens", "held", "append", "want"),
    [
        (100, 90, 10, APPEND),
        (100, 89, 10, HAND_OFF),
        (100, 99, 0, HAND_OFF),
        (100, 100, 0, APPEND),  # nothing is lacking
        (5, 0, 10, HAND_OFF),  # short, and nothing is held
    ],
)
def test_a_decode_worker_computes_few_tokens_itself(tokens: int, held: int, append: int, want: Way) -> None:
    placed = choose(fleet("PD"), need(tokens, held={1: held}, append=append))
    assert placed is not None
    assert (placed.way, placed.generator.id) == (want, 1)
    assert (placed.prefill is None) == (want is APPEND)


@pytest.mark.parametrize(("load", "want"), [(STICKY_SLACK, 3), (STICKY_SLACK + 1, 2)])
def test_a_prefix_is_worth_so_many_requests_on_the_generating_side(load: int, want: int) -> None:
    placed = choose(fleet("PPDD", 0, 0, 0, load), need(held={3: 50}))
    assert placed is not None
    assert placed.generator.id == want


@pytest.mark.parametrize(("load", "want"), [(STICKY_SLACK, 1), (STICKY_SLACK + 1, 0)])
def test_and_on_the_prefill_side(load: int, want: int) -> None:
    assert chosen(fleet("PPD", 0, load), need(held={1: 50})) == (HAND_OFF, 2, want)


def test_of_two_prefixes_on_one_side_the_longer_counts_and_of_equal_ones_the_lower_slot() -> None:
    # A prefill worker that held the prefix became a decode worker.
    assert chosen(fleet("PDD"), need(held={2: 60, 1: 50})) == (HAND_OFF, 2, 0)
    assert chosen(fleet("PDD"), need(held={2: 50, 1: 50})) == (HAND_OFF, 1, 0)


@pytest.mark.parametrize("change", [{"draining": True}, {"version": WeightVersion(3)}])
@pytest.mark.parametrize(
    ("letters", "unfit", "want"),
    [
        ("CC", 0, (WHOLE, 1, None)),
        ("PPD", 0, (HAND_OFF, 2, 1)),
        ("PD", 0, (WHOLE, 1, None)),
        ("PD", 1, (WHOLE, 0, None)),
        ("C", 0, None),
    ],
)
def test_who_drains_or_has_older_weights_gets_nothing(
    change: dict[str, object], letters: str, unfit: int, want: tuple[Way, int, int | None] | None
) -> None:
    others = {f"w{n}": {"version": WeightVersion(4)} for n in range(len(letters))}
    workers = fleet(letters, **{**others, f"w{unfit}": {**others[f"w{unfit}"], **change}})
    assert chosen(workers, need(version=4)) == want
    # Nor because it holds the prefix.
    assert chosen(workers, need(version=4, held={unfit: 90})) == want


@pytest.mark.parametrize(
    ("letters", "failed", "want"),
    [
        ("CC", (0,), (WHOLE, 1, None)),
        ("CC", (0, 1), (WHOLE, 0, None)),
        ("PDD", (1,), (HAND_OFF, 2, 0)),
        ("PPD", (0,), (HAND_OFF, 2, 1)),
        ("PD", (0,), (WHOLE, 1, None)),
        ("PD", (1,), (WHOLE, 0, None)),  # better a prefill worker than the one that failed
        ("PD", (0, 1), (WHOLE, 1, None)),
    ],
)
def test_who_failed_the_turn_gets_it_back_only_when_no_other_is_fit(
    letters: str, failed: tuple[int, ...], want: tuple[Way, int, int | None]
) -> None:
    assert chosen(fleet(letters), need(failed=failed)) == want
    assert chosen(fleet(letters), need(failed=failed, held={failed[0]: 50})) == want


def test_a_turn_whose_hand_off_failed_is_served_whole() -> None:
    assert chosen(fleet("PDD"), need(held={2: 50}, whole=True)) == (WHOLE, 2, None)


def placed(way: Way, workers: dict[WorkerId, One], generator: int, prefill: int | None = None) -> Placement[One]:
    return Placement(way, workers[WorkerId(generator)], None if prefill is None else workers[WorkerId(prefill)])


@pytest.mark.parametrize(
    ("letters", "way", "generator", "prefill", "held", "want"),
    [
        ("CC", WHOLE, 0, None, (0, 1), [1]),
        ("PPDD", HAND_OFF, 2, 0, (0, 1, 2, 3), [1, 3]),
        ("PPDD", APPEND, 2, None, (0, 2, 3), [3]),  # the next hand-off will look for the prefill side
        ("PDC", WHOLE, 2, None, (0, 1, 2), [0, 1]),
        ("PD", WHOLE, 0, None, (0, 1), [1]),
        ("PD", HAND_OFF, 1, 0, (), []),
    ],
)
def test_a_trajectory_leaves_at_most_one_prefix_on_each_side(
    letters: str, way: Way, generator: int, prefill: int | None, held: tuple[int, ...], want: list[int]
) -> None:
    workers = fleet(letters)
    assert left_behind(workers, [WorkerId(n) for n in held], placed(way, workers, generator, prefill)) == want


def test_no_choice_depends_on_the_order_in_which_workers_came() -> None:
    workers = fleet("PPDDC", 1, 1, 2, 2, 2)
    want = chosen(workers, need(held={3: 10, 0: 10}))
    for order in itertools.permutations(workers.values()):
        assert chosen({one.id: one for one in order}, need(held={3: 10, 0: 10})) == want
