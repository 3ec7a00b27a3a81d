"""Hand-off and engine start, with real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.cluster.profile import ProfileRequest, measure_profile
from pearl.core.profile import parse_profile

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.mark.usefixtures("local_ray")
def test_a_whole_profile(tiny_model: Path) -> None:
    said: list[str] = []
    request = ProfileRequest(model=tiny_model, device="cpu", max_context_tokens=64, max_sequences=2, quick=True)
    profile = measure_profile(request, lambda _, text: said.append(text))
    assert said[-1].startswith("two engines started, ")
    assert profile.engine_start_s is not None
    assert profile.engine_start_s > 0
    assert profile.hand_off is not None
    assert parse_profile(profile.to_json()) == profile
