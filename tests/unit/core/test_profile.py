"""The platform profile: interpolation by hand and by brute force, and every bad file refused by name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.profile import HandOff, IterationTimes, PlatformProfile, parse_profile
from pearl.errors import ProfileError, UserError

# cells_s[prefill][decoding][context]; seconds are whole numbers to be read at a glance.
TIMES = IterationTimes(
    prefill_tokens=(0, 10),
    decoding=(0, 2, 4),
    context_tokens=(100, 200),
    cells_s=(
        ((1, 1), (3, 5), (5, 9)),
        ((11, 13), (13, 17), (15, 21)),
    ),
)
PROFILE = PlatformProfile(
    model="tiny",
    model_hash="0123456789abcdef",
    device="some device",
    dtype="bfloat16",
    tp=2,
    iterations=TIMES,
    kv_capacity_tokens=1000,
    kv_bytes_per_token=512,
    hand_off=HandOff(fixed_s=0.5, s_per_byte=0.25),
    weight_load_s=0.125,
    sleep_s=0.0625,
    wake_s=0.03125,
    engine_start_s=8.0,
)


class TestSeconds:
    def test_grid_points_are_what_was_measured(self) -> None:
        for (p, prefill), (d, decoding), (c, context) in itertools.product(
            enumerate((0, 10)), enumerate((0, 2, 4)), enumerate((100, 200))
        ):
            if prefill or decoding:
                assert TIMES.seconds(prefill, decoding, context) == TIMES.cells_s[p][d][c]

    @pytest.mark.parametrize(
        ("point", "want"),
        [
            ((0, 2, 150), 4),  # between 3 and 5
            ((0, 3, 100), 4),  # between 3 and 5
            ((5, 2, 100), 8),  # between 3 and 13
            ((0, 3, 150), (3 + 5 + 5 + 9) / 4),
            ((5, 3, 150), (3 + 5 + 5 + 9 + 13 + 17 + 15 + 21) / 8),
            ((0, 1, 100), 2),  # between the fixed cost, 1, and 3
            ((0, 0.5, 100), 1.5),
            ((2.5, 0, 200), 1 + 12 / 4),
        ],
    )
    def test_between_points(self, point: tuple[float, float, float], want: float) -> None:
        assert TIMES.seconds(*point) == pytest.approx(want, abs=1e-12)

    @pytest.mark.parametrize(
        ("point", "want"),
        [
            ((20, 2, 100), 23),  # 3, 13, then the same again
            ((0, 8, 100), 9),  # 3, 5, then 2 for every 2
            ((0, 2, 400), 9),  # 3, 5, then 2 for every 100
            ((0, 8, 300), 25),  # at 300: 7 and 13, so 6 for every 2
            ((20, 4, 300), 41),  # at 300: 13 and 27, so 14 for every 10
        ],
    )
    def test_beyond_the_upper_edges_the_last_slope_goes_on(
        self, point: tuple[float, float, float], want: float
    ) -> None:
        assert TIMES.seconds(*point) == pytest.approx(want, abs=1e-12)

    def test_a_falling_slope_does_not_go_on(self) -> None:
        times = replace(TIMES, cells_s=(((1, 1), (5, 5), (4, 4)), ((9, 9), (9, 9), (9, 9))))
        assert times.seconds(0, 3, 100) == 4.5
        assert times.seconds(0, 1000, 100) == 4

    def test_contexts_below_the_first_point_cost_what_it_costs(self) -> None:
        assert TIMES.seconds(0, 2, 1) == TIMES.seconds(0, 2, 0) == 3

    def test_an_iteration_of_nothing_takes_no_time(self) -> None:
        assert TIMES.seconds(0, 0, 150) == 0

    def test_one_context_is_enough(self) -> None:
        times = IterationTimes(prefill_tokens=(0, 4), decoding=(0, 1), context_tokens=(8,), cells_s=(((1,), (2,)),) * 2)
        assert times.seconds(2, 1, 800) == 2

    @pytest.mark.parametrize("point", [(-1, 1, 1), (1, -1, 1), (1, 1, -1), (float("nan"), 1, 1)])
    def test_no_number_of_tokens_is_negative(self, point: tuple[float, float, float]) -> None:
        with pytest.raises(ValueError, match="want numbers >= 0"):
            TIMES.seconds(*point)


@st.composite
def grids(draw: st.DrawFn, rising: bool = False) -> IterationTimes:
    axes = []
    for first, fewest in ((0, 2), (0, 2), (None, 1)):
        steps = draw(st.lists(st.integers(1, 40), min_size=fewest - (first is not None), max_size=3))
        points = [first] if first is not None else []
        for step in steps:
            points.append((points[-1] if points else 0) + step)
        axes.append(tuple(points))
    shape = tuple(map(len, axes))
    flat = draw(st.lists(st.floats(0, 100), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
    cells = np.array(flat).reshape(shape)
    if rising:
        for axis in range(3):
            cells = cells.cumsum(axis)
    nested = tuple(tuple(tuple(map(float, row)) for row in plane) for plane in cells)
    return IterationTimes(prefill_tokens=axes[0], decoding=axes[1], context_tokens=axes[2], cells_s=nested)


def corners(times: IterationTimes, point: tuple[float, float, float]) -> float:
    """Weighted sum over the corners of the box around a point inside the grid: the textbook's form."""
    choices = []
    for axis, value in zip((times.prefill_tokens, times.decoding, times.context_tokens), point, strict=True):
        if value in axis:
            choices.append([(axis.index(int(value)), 1.0)])
            continue
        high = next(index for index, edge in enumerate(axis) if edge > value)
        width = axis[high] - axis[high - 1]
        choices.append([(high - 1, (axis[high] - value) / width), (high, (value - axis[high - 1]) / width)])
    return sum(wp * wd * wc * times.cells_s[p][d][c] for (p, wp), (d, wd), (c, wc) in itertools.product(*choices))


@st.composite
def inside(draw: st.DrawFn, times: IterationTimes) -> tuple[float, float, float]:
    axes = (times.prefill_tokens, times.decoding, times.context_tokens)
    p, d, c = (draw(st.floats(axis[0], axis[-1])) for axis in axes)
    return p, d, c


class TestLaws:
    @given(st.data())
    def test_inside_the_grid_it_is_the_sum_over_corners(self, data: st.DataObject) -> None:
        times = data.draw(grids())
        point = data.draw(inside(times))
        if point[:2] != (0, 0):
            assert times.seconds(*point) == pytest.approx(corners(times, point), rel=1e-9, abs=1e-9)

    @given(st.data())
    def test_where_data_rise_it_rises(self, data: st.DataObject) -> None:
        times = data.draw(grids(rising=True))
        point = data.draw(inside(times))
        axis = data.draw(st.integers(0, 2))
        more = list(point)
        more[axis] += data.draw(st.floats(0, 200))
        assert times.seconds(*more) >= times.seconds(*point) * (1 - 1e-9) - 1e-9

    @given(grids(), *[st.floats(0, 1000)] * 3)
    def test_it_is_never_below_zero(self, times: IterationTimes, p: float, d: float, c: float) -> None:
        assert times.seconds(p, d, c) >= 0

    @given(st.data())
    def test_beyond_the_edge_of_one_axis_it_never_falls(self, data: st.DataObject) -> None:
        times = data.draw(grids())
        axes = (times.prefill_tokens, times.decoding, times.context_tokens)
        axis = data.draw(st.integers(0, 2))
        # At points of the other axes: between them, a neighbour that stays level would only weaken the law.
        point = [float(data.draw(st.sampled_from(other))) for other in axes]
        got = []
        for beyond in sorted(data.draw(st.tuples(st.floats(0, 500), st.floats(0, 500)))):
            point[axis] = axes[axis][-1] + beyond
            got.append(times.seconds(*point))
        assert got[1] >= got[0] * (1 - 1e-9) - 1e-9


def test_a_hand_off_has_a_fixed_part_and_one_per_byte() -> None:
    assert HandOff(fixed_s=0.5, s_per_byte=0.25).seconds(8) == 2.5


class TestFile:
    @pytest.mark.parametrize(
        "profile", [PROFILE, replace(PROFILE, hand_off=None, engine_start_s=None, model='a "name"\n of ü')]
    )
    def test_round_trip(self, profile: PlatformProfile) -> None:
        assert parse_profile(profile.to_json()) == profile

    @given(grids())
    def test_round_trip_of_any_grid(self, times: IterationTimes) -> None:
        profile = replace(PROFILE, iterations=times)
        assert parse_profile(profile.to_json()) == profile

    def test_the_format_is_the_documented_one(self) -> None:
        document = json.loads(PROFILE.to_json())
        assert document["schema"] == "pearl.platform_profile"
        assert document["version"] == 1
        assert document["hand_off"] == {"fixed_s": 0.5, "s_per_byte": 0.25}
        assert document["iterations"] == {
            "prefill_tokens": [0, 10],
            "decoding": [0, 2, 4],
            "context_tokens": [100, 200],
            "cells_s": [[[1, 1], [3, 5], [5, 9]], [[11, 13], [13, 17], [15, 21]]],
        }
        assert (document["tp"], document["kv_capacity_tokens"], document["engine_start_s"]) == (2, 1000, 8.0)

    def test_it_is_a_mistake_of_the_user(self) -> None:
        assert issubclass(ProfileError, UserError)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "x.json: cannot be read as JSON: .*; want a file written by `pearl profile`"),
            ("[1]", "x.json: got a list of 1, want an object"),
            ("[" * 100_000, "x.json: cannot be read as JSON: nested too deeply"),
            ("{}", "x.json: schema: got null, want 'pearl.platform_profile'"),
            ('{"schema": "pearl.platform_profile", "version": true}', "version: got true, want 1; measure again"),
            ('{"schema": "pearl.platform_profile", "version": 2}', "version: got 2, want 1"),
            ('{"a": 1, "a": 2}', "x.json: a: stands there twice"),
            ('{"a": NaN}', "x.json: got NaN, want finite numbers"),
            ("9" * 5000, "x.json: cannot be read as JSON: "),
        ],
    )
    def test_no_profile_at_all(self, text: str, message: str) -> None:
        with pytest.raises(ProfileError, match=message):
            parse_profile(text, "x.json")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda d: d.update(spare=1), "^x.json: spare: unknown key; allowed: model, model_hash, "),
            (lambda d: d.pop("tp"), "^x.json: tp: missing"),
            (lambda d: d.update(tp=0), "tp: got 0, want a whole number >= 1"),
            (lambda d: d.update(tp=True), "tp: got true, want a whole number >= 1"),
            (lambda d: d.update(tp=1.0), "tp: got 1.0, want a whole number >= 1"),
            (lambda d: d.update(tp=10**400), r"tp: got a whole number beyond 2\*\*53, want"),
            (lambda d: d.update(model=""), "model: got '', want text"),
            (lambda d: d.update(device=3), "device: got 3, want text"),
            (lambda d: d.update(device={"name": "x"}), "device: got an object, want text"),
            (lambda d: d.update(kv_capacity_tokens=None), "kv_capacity_tokens: got null, want a whole number >= 1"),
            (lambda d: d.update(sleep_s=-1), "sleep_s: got -1, want a finite number >= 0"),
            (lambda d: d.update(sleep_s=None), "sleep_s: got null, want a number >= 0"),
            (lambda d: d.update(wake_s="1"), "wake_s: got '1', want a number >= 0"),
            (lambda d: d.update(weight_load_s=10**400), "weight_load_s: got a whole number beyond"),
            (lambda d: d.update(engine_start_s=-0.5), "engine_start_s: got -0.5, want"),
            (lambda d: d.update(hand_off=3), "hand_off: got 3, want an object"),
            (lambda d: d["hand_off"].update(x=1), "hand_off.x: unknown key; allowed: fixed_s, s_per_byte"),
            (lambda d: d["hand_off"].pop("fixed_s"), "hand_off.fixed_s: missing"),
            (lambda d: d["hand_off"].update(s_per_byte=-1), "hand_off.s_per_byte: got -1, want a finite number >= 0"),
            (lambda d: d.update(iterations=[]), "iterations: got a list of 0, want an object"),
            (lambda d: d["iterations"].pop("cells_s"), "iterations.cells_s: missing"),
            (lambda d: d["iterations"].update(y=1), "iterations.y: unknown key; allowed: prefill_tokens, "),
            (lambda d: d["iterations"].update(prefill_tokens=7), "iterations.prefill_tokens: got 7, want a list of at"),
            (lambda d: d["iterations"].update(prefill_tokens=[0]), "prefill_tokens: got a list of 1, want .* least 2"),
            (lambda d: d["iterations"].update(prefill_tokens=[1, 10]), r"prefill_tokens\[0\]: got 1, want 0"),
            (lambda d: d["iterations"].update(decoding=[0, 4, 2]), r"decoding\[2\]: got 2 behind 4, want rising"),
            (lambda d: d["iterations"].update(decoding=[0, 2, 2]), r"decoding\[2\]: got 2 behind 2, want rising"),
            (lambda d: d["iterations"].update(decoding=[0, 2, 4.5]), r"decoding\[2\]: got 4.5, want a whole number"),
            (lambda d: d["iterations"].update(context_tokens=[0, 9]), r"context_tokens\[0\]: got 0, want .* >= 1"),
            (lambda d: d["iterations"].update(context_tokens=[]), "context_tokens: got a list of 0, want .* least 1"),
            (lambda d: d["iterations"].update(context_tokens=[7]), r"cells_s\[0\]\[0\]: got a list of 2, want 1"),
            (lambda d: d["iterations"]["cells_s"].pop(), r"cells_s: got a list of 1, want 2 \(as many as prefill_tok"),
            (lambda d: d["iterations"]["cells_s"][1].pop(), r"cells_s\[1\]: got a list of 2, want 3 \(as many as deco"),
            (lambda d: d["iterations"]["cells_s"][1].insert(0, 3), r"cells_s\[1\]: got a list of 4, want 3"),
            (lambda d: d["iterations"]["cells_s"][1][2].pop(), r"cells_s\[1\]\[2\]: got a list of 1, want 2"),
            (lambda d: d["iterations"]["cells_s"][1].__setitem__(2, 3), r"cells_s\[1\]\[2\]: got 3, want a list of 2"),
            (
                lambda d: d["iterations"]["cells_s"][1][2].__setitem__(0, -1),
                r"cells_s\[1\]\[2\]\[0\]: got -1, want a finite",
            ),
            (
                lambda d: d["iterations"]["cells_s"][1][2].__setitem__(0, "x" * 99),
                r"cells_s\[1\]\[2\]\[0\]: got 'x{56}\.\.\., want a number",
            ),
        ],
    )
    def test_each_mistake_is_named(self, change: Callable[[dict[str, Any]], object], message: str) -> None:
        document = json.loads(PROFILE.to_json())
        change(document)
        with pytest.raises(ProfileError, match=message):
            parse_profile(json.dumps(document), "x.json")

    def test_a_number_too_large_for_a_float_is_refused(self) -> None:
        text = PROFILE.to_json().replace('"sleep_s": 0.0625', '"sleep_s": 1e999')
        with pytest.raises(ProfileError, match="sleep_s: got inf, want a finite number >= 0"):
            parse_profile(text)

    def test_what_measures_is_held_to_the_same(self) -> None:
        with pytest.raises(ProfileError, match=r"^sleep_s: got nan, want a finite"):
            replace(PROFILE, sleep_s=float("nan"))
