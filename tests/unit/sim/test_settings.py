"""Settings of a simulated engine: what cannot be is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pearl.errors import ProfileError
from pearl.records.ids import WorkerId
from pearl.sim.limits import Limits, Mixing
from pearl.sim.settings import EngineSettings, end_name
from tests.platforms import engine_profile, linear_times

SETTINGS = EngineSettings(profile=engine_profile(1, linear_times(0.010, 0.001, 0.0001)))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time_scale", 0.0, "engine: time_scale: got 0.0, want > 0"),
        ("time_scale", float("inf"), "engine: time_scale: got inf, want > 0"),
        ("progress_interval_s", -1.0, "engine: progress_interval_s: got -1.0, want > 0"),
        ("report_interval_s", float("nan"), "engine: report_interval_s: got nan, want > 0"),
        ("kv_ttl_s", 0.0, "engine: kv_ttl_s: got 0.0, want > 0"),
        ("max_context_tokens", 1, "engine: max_context_tokens: got 1, want >= 2"),
    ],
)
def test_settings_that_cannot_be(name: str, value: float, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(SETTINGS, **{name: value})


@pytest.mark.parametrize("name", ["max_sequences", "chunk_tokens", "iteration_tokens", "longest_run"])
def test_limits_that_cannot_be(name: str) -> None:
    with pytest.raises(ProfileError, match=f"engine: {name}: got 0, want >= 1"):
        Limits(**{name: 0})


def test_what_is_not_said() -> None:
    assert SETTINGS.limits.mixing is Mixing.CHUNKED
    assert replace(SETTINGS, report_interval_s=float("inf")).report_interval_s == float("inf")
    assert end_name(WorkerId(7)) == "worker 7"
