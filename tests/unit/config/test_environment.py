"""How many environments can be open at once."""

import pytest

from pearl.config.environment import EnvironmentConfig


@pytest.mark.parametrize(
    ("slots", "processes", "isolated", "open_at_once"),
    [(128, 2, False, 128), (128, 2, True, 2), (2, 128, True, 2), (1, 3, False, 1)],
)
def test_open_at_once(slots: int, processes: int, isolated: bool, open_at_once: int) -> None:
    config = EnvironmentConfig(kind="k", slots=slots, processes=processes, process_isolated=isolated)
    assert config.open_at_once == open_at_once
