"""Which GPUs come and go: by hand, and conserved for every step function."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.ports import Notice, Offered, Withdrawn
from pearl.sim.leases import Leaving, SourceSettings, Timed, schedule

TRACE = [(0.0, 4), (100.0, 9), (200.0, 4), (300.0, 6)]


def told(events: Sequence[Timed]) -> list[tuple[float, str, list[str]]]:
    found: list[tuple[float, str, list[str]]] = []
    for at_s, event in events:
        ids = [gpu.id for gpu in event.gpus] if isinstance(event, Offered) else list(event.gpus)
        found.append((at_s, type(event).__name__, [gpu.removeprefix("external") for gpu in ids]))
    return found


def test_a_step_function_by_hand() -> None:
    events = schedule(TRACE, SourceSettings(unit_gpus=2, node_gpus=4, notice_s=30.0))
    assert told(events) == [
        (0.0, "Offered", ["0000", "0001", "0002", "0003"]),
        (100.0, "Offered", ["0004", "0005", "0006", "0007"]),  # 9 are 4 units
        (170.0, "Notice", ["0004", "0005", "0006", "0007"]),
        (200.0, "Withdrawn", ["0004", "0005", "0006", "0007"]),
        (300.0, "Offered", ["0004", "0005"]),
    ]
    offers = [event for _, event in events if isinstance(event, Offered)]
    assert [gpu.node for gpu in offers[1].gpus] == ["external-node001"] * 4
    assert [offer.lease for offer in offers] == [f"external-lease{n}" for n in range(3)]
    assert [offer.end_s for offer in offers] == [None] * 3


def test_known_ends_part_leases() -> None:
    events = schedule([(0.0, 3), (50.0, 2), (90.0, 1)], SourceSettings(ends_known=True))
    offers = [event for _, event in events if isinstance(event, Offered)]
    assert [(offer.end_s, [gpu.id[-1] for gpu in offer.gpus]) for offer in offers] == [
        (None, ["0"]),
        (90.0, ["1"]),
        (50.0, ["2"]),
    ]


def test_without_rejoining_nobody_comes_twice() -> None:
    events = schedule([(0.0, 2), (10.0, 0), (20.0, 2)], SourceSettings(rejoin=False))
    assert [ids for _, what, ids in told(events) if what == "Offered"] == [["0000", "0001"], ["0002", "0003"]]


def test_what_comes_and_goes_within_the_notice_is_noticed_as_it_comes() -> None:
    events = schedule([(0.0, 1), (5.0, 2), (8.0, 1)], SourceSettings(notice_s=30.0))
    assert told(events)[1:] == [
        (5.0, "Offered", ["0001"]),
        (5.0, "Notice", ["0001"]),
        (8.0, "Withdrawn", ["0001"]),
    ]


def test_who_goes_may_be_drawn() -> None:
    trace = [(0.0, 16), (1.0, 8)]
    drawn = [told(schedule(trace, SourceSettings(leaving=Leaving.SEEDED, seed=seed)))[1][2] for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 8


@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20)), max_size=15),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([0.0, 7.0, 60.0]),
    st.sampled_from(list(Leaving)),
    st.booleans(),
    st.booleans(),
)
def test_what_is_here_is_what_the_step_function_says(
    steps: list[tuple[int, int]], unit: int, notice_s: float, leaving: Leaving, ends_known: bool, rejoin: bool
) -> None:
    trace, at_s = [], 0.0
    for gap, gpus in steps:
        at_s += gap
        trace.append((at_s, gpus))
    settings = SourceSettings(
        unit_gpus=unit, node_gpus=8, notice_s=notice_s, leaving=leaving, ends_known=ends_known, rejoin=rejoin
    )
    events = schedule(trace, settings)
    assert [time_s for time_s, _ in events] == sorted(time_s for time_s, _ in events)
    here: dict[str, float | None] = {}
    noticed: dict[str, float] = {}
    levels = dict(trace)
    for number, (time_s, event) in enumerate(events):
        match event:
            case Offered():
                assert not [gpu for gpu in event.gpus if gpu.id in here]
                here.update({gpu.id: event.end_s for gpu in event.gpus})
                for node in {gpu.node for gpu in event.gpus}:
                    assert sum(gpu.node == node for gpu in event.gpus) % unit == 0
            case Notice():
                assert set(here).issuperset(event.gpus)
                assert max(0.0, event.deadline_s - notice_s) <= time_s < event.deadline_s
                noticed.update(dict.fromkeys(event.gpus, event.deadline_s))
            case Withdrawn():
                for gpu in event.gpus:
                    end_s = here.pop(gpu)
                    assert end_s == (time_s if ends_known else None)
                    assert noticed.pop(gpu, None) == (time_s if notice_s else None)
        last = number + 1 == len(events) or events[number + 1][0] > time_s
        if last and time_s in levels:
            assert len(here) == levels[time_s] // unit * unit
    assert not noticed
    if trace:
        assert len(here) == trace[-1][1] // unit * unit


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        ([(0.0, 1), (0.0, 2)], r"availability: row 1: got time 0.0 s, want rising numbers >= 0"),
        ([(-1.0, 1)], r"availability: row 0: got time -1.0 s"),
        ([(float("nan"), 1)], r"availability: row 0: got time nan s"),
        ([(0.0, -1)], r"availability: row 0: got -1 GPUs, want >= 0"),
    ],
)
def test_step_functions_that_cannot_be(trace: list[tuple[float, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        schedule(trace, SourceSettings())


def test_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"GPU source external: unit_gpus: got 0, want >= 1"):
        SourceSettings(unit_gpus=0)
    with pytest.raises(ValueError, match=r"node_gpus: got 8, want a multiple of 3 GPUs"):
        SourceSettings(unit_gpus=3)
    with pytest.raises(ValueError, match=r"notice_s: got -1, want a finite number >= 0"):
        SourceSettings(notice_s=-1)
