"""Journal entries as lines: round trip, size, and lines that are no entries."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.records.journal import (
    STREAMS,
    GroupEntry,
    JournalEntry,
    Json,
    StateEntry,
    StepEntry,
    TrajectoryEntry,
    TurnEntry,
)
from pearl.report.lines import ENTRIES, MalformedEntry, decode, dropped_count, dropped_line, encode, header_line

TURN = TurnEntry(
    at_s=12.5,
    trajectory="g3.1",
    turn=0,
    prompt=20,
    generated=5,
    computed=20,
    end="stop",
    versions=[[0, 5]],
    workers=[0],
    generate_s=0.25,
    env_s=0.001,
)

STEP = StepEntry(
    at_s=1.0,
    version=1,
    groups=["g0"],
    samples=1,
    trained_tokens=5,
    staleness_tokens={},
    wait_s=0.0,
    train_s=0.0,
    publish_s=0.0,
    reward_mean=0.0,
    success_mean=None,
)

# Whole microseconds, as the clock's own resolution is; finer parts are not kept.
seconds = st.integers(0, 10**12).map(lambda microseconds: microseconds / 10**6)
numbers = st.floats(allow_nan=False)
counts = st.integers(0, 10**9)
texts = st.text(max_size=20)
json_values: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
entries: st.SearchStrategy[JournalEntry] = st.one_of(
    st.builds(
        StateEntry,
        at_s=seconds,
        event=texts,
        inputs=st.dictionaries(texts, json_values, max_size=4),
        state_version=counts,
        state_hash=texts,
        refused=st.none() | texts,
    ),
    st.builds(
        TurnEntry,
        at_s=seconds,
        trajectory=texts,
        turn=counts,
        prompt=counts,
        generated=counts,
        computed=counts,
        end=texts,
        versions=st.lists(st.lists(counts, min_size=2, max_size=2), max_size=3),
        workers=st.lists(counts, max_size=3),
        generate_s=seconds,
        env_s=seconds,
    ),
    st.builds(
        TrajectoryEntry,
        at_s=seconds,
        trajectory=texts,
        group=texts,
        status=texts,
        turns=counts,
        generated=counts,
        reward=numbers,
        success=st.none() | st.booleans(),
        started_s=seconds,
        detail=texts,
    ),
    st.builds(
        GroupEntry,
        at_s=seconds,
        group=texts,
        task=texts,
        seed=counts,
        status=texts,
        admitted_version=counts,
        attempts=counts,
    ),
    st.builds(
        StepEntry,
        at_s=seconds,
        version=counts,
        groups=st.lists(texts, max_size=3),
        samples=counts,
        trained_tokens=counts,
        staleness_tokens=st.dictionaries(texts, counts, max_size=3),
        wait_s=seconds,
        train_s=seconds,
        publish_s=seconds,
        reward_mean=numbers,
        success_mean=st.none() | numbers,
        metrics=st.dictionaries(texts, numbers, max_size=3),
    ),
)


@given(entries)
def test_round_trip(entry: JournalEntry) -> None:
    line = encode(entry)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert decode(type(entry), json.loads(line)) == entry


def test_every_stream_has_its_entries() -> None:
    assert set(ENTRIES) == set(STREAMS)
    assert ENTRIES["turns"] is TurnEntry


def test_a_turn_as_written() -> None:
    assert encode(TURN) == (
        b'{"at_s":12.5,"trajectory":"g3.1","turn":0,"prompt":20,"generated":5,"computed":20,"end":"stop",'
        b'"versions":[[0,5]],"workers":[0],"generate_s":0.25,"env_s":0.001}\n'
    )


def test_the_largest_realistic_turn_stays_under_300_bytes() -> None:
    entry = TurnEntry(
        at_s=604799.123456,  # a week
        trajectory="g999999999.99r9",
        turn=999,
        prompt=999_999_999,
        generated=999_999_999,
        computed=999_999_999,
        end="length",
        versions=[[999_999_999, 999_999_999]] * 3,
        workers=[997, 998, 999],
        generate_s=3599.123456,
        env_s=3599.123456,
    )
    assert len(encode(entry)) < 300


def test_seconds_are_rounded_and_other_numbers_are_not() -> None:
    entry = replace(
        STEP, at_s=0.1 + 0.2, wait_s=1.23456789, train_s=1e-9, reward_mean=1 / 3, metrics={"learning_rate": 3e-7}
    )
    written = json.loads(encode(entry))
    assert (written["at_s"], written["wait_s"], written["train_s"]) == (0.3, 1.234568, 0.0)
    assert (written["reward_mean"], written["metrics"]) == (1 / 3, {"learning_rate": 3e-7})


def test_defaults_are_left_out() -> None:
    entry = TrajectoryEntry(
        at_s=1.0,
        trajectory="t",
        group="g",
        status="done",
        turns=1,
        generated=1,
        reward=1.0,
        success=None,
        started_s=0.0,
    )
    assert "detail" not in json.loads(encode(entry))
    assert json.loads(encode(entry))["success"] is None  # No default: stays.


def test_numbers_that_are_not_finite_are_valid_json() -> None:
    metrics = {"loss": math.nan, "norm": math.inf, "low": -math.inf}
    entry = replace(STEP, at_s=math.inf, reward_mean=math.nan, metrics=metrics)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(encode(entry), parse_constant=refuse)
    assert document["metrics"] == {"loss": "NaN", "norm": "Infinity", "low": "-Infinity"}
    back = decode(StepEntry, document)
    assert isinstance(back, StepEntry)
    assert math.isnan(back.reward_mean)
    assert math.isnan(back.metrics["loss"])
    assert (back.at_s, back.metrics["norm"], back.metrics["low"]) == (math.inf, math.inf, -math.inf)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn": None}, "turn: got null, want int"),
        ({"turn": True}, "turn: got bool, want int"),
        ({"turn": 1.0}, "turn: got float, want int"),
        ({"at_s": "1"}, "at_s: got str, want a number"),
        ({"at_s": True}, "at_s: got bool, want a number"),
        ({"end": 3}, "end: got int, want str"),
        ({"versions": [[0, "5"]]}, "versions: got str, want int"),
        ({"versions": [5]}, "versions: got int, want a list"),
        ({"workers": {}}, "workers: got dict, want a list"),
        ({"extra": 1, "another": 2}, "unknown fields another, extra"),
    ],
)
def test_a_malformed_entry_is_named(change: dict[str, Any], message: str) -> None:
    document = json.loads(encode(TURN)) | change
    with pytest.raises(MalformedEntry) as caught:
        decode(TurnEntry, document)
    assert str(caught.value) == message


def test_a_missing_field_is_named() -> None:
    document = json.loads(encode(TURN))
    del document["generated"]
    with pytest.raises(MalformedEntry, match=r"^generated: missing$"):
        decode(TurnEntry, document)


@pytest.mark.parametrize("document", [None, 3, "x", [1]])
def test_what_is_no_object_is_no_entry(document: object) -> None:
    with pytest.raises(MalformedEntry, match="want an object"):
        decode(TurnEntry, document)


@pytest.mark.parametrize("mapping", [[], 3, {"0": "5"}, {"0": None}])
def test_mappings_are_checked(mapping: object) -> None:
    document = json.loads(encode(replace(STEP, staleness_tokens={"0": 5}, success_mean=0.5)))
    with pytest.raises(MalformedEntry, match=r"^staleness_tokens: "):
        decode(StepEntry, document | {"staleness_tokens": mapping})
    with pytest.raises(MalformedEntry, match=r"^success_mean: "):
        decode(StepEntry, document | {"success_mean": [1]})


def test_header_and_dropped_lines() -> None:
    assert header_line("turns") == b'{"schema":"pearl.turns","version":1}\n'
    assert dropped_line(12) == b'{"dropped":12}\n'
    assert dropped_count(json.loads(dropped_line(12))) == 12


@pytest.mark.parametrize("document", [{}, {"dropped": "1"}, {"dropped": True}, {"dropped": 1, "at_s": 2}, [], 3])
def test_other_lines_drop_nothing(document: object) -> None:
    assert dropped_count(document) is None
