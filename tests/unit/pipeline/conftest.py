"""Lets a failed assertion of a shared helper say what it compared, as one of a test does."""

import pytest

pytest.register_assert_rewrite("tests.unit.pipeline._agent_loop")
