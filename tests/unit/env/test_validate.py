"""What an environment's code may return."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pearl.env.validate import MAX_OBSERVATION_BYTES, check_observation, check_reply
from pearl.errors import EnvironmentNonsense
from pearl.records.trajectory import EnvironmentReply


def reply(**fields: Any) -> EnvironmentReply:
    return EnvironmentReply(**{"observation": "o", "reward": 0.5, "done": False, **fields})


def test_a_valid_reply_goes_through_unchanged() -> None:
    good = reply(done=True, truncated=True, success=False)
    assert check_reply(good, "env") == good


@pytest.mark.parametrize("reward", [1, np.float32(0.5), np.float64(0.5), np.int64(3)])
def test_numbers_of_other_kinds_become_floats(reward: Any) -> None:
    checked = check_reply(reply(reward=reward), "env").reward
    assert type(checked) is float
    assert checked == float(reward)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": float("nan")}, "reward: got nan, want a finite"),
        ({"reward": float("-inf")}, "reward: got -inf, want a finite"),
        ({"reward": "1"}, "reward: got '1', want a number"),
        ({"reward": None}, "reward: got None"),
        ({"reward": True}, "reward: got True"),
        ({"done": 1}, "done: got 1, want True or False"),
        ({"done": np.bool_(True)}, "done: got"),
        ({"done": True, "truncated": "no"}, "truncated: got 'no'"),
        ({"truncated": True}, "only together with done"),
        ({"done": True, "success": 1.0}, "success: got 1.0"),
        ({"observation": None}, "observation: got NoneType, want str"),
        ({"observation": b"bytes"}, "observation: got bytes"),
        ({"observation": "\ud800"}, "unpaired surrogate at character 0"),
    ],
)
def test_nonsense_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(EnvironmentNonsense, match=f"env: .*{message}"):
        check_reply(reply(**fields), "env")


@pytest.mark.parametrize("value", [None, "text", ("o", 0.0, True), {"observation": "o"}])
def test_something_else_than_a_reply_is_nonsense(value: object) -> None:
    with pytest.raises(EnvironmentNonsense, match="want EnvironmentReply"):
        check_reply(value, "env")


def test_the_length_limit_counts_bytes() -> None:
    assert check_observation("a" * MAX_OBSERVATION_BYTES, "env") == "a" * MAX_OBSERVATION_BYTES
    with pytest.raises(EnvironmentNonsense, match=r"at most 1\.0 MiB"):
        check_observation("ä" * (MAX_OBSERVATION_BYTES // 2 + 1), "env")


def test_only_plain_text_goes_on() -> None:
    class Text(str):
        __slots__ = ()

    assert type(check_observation(Text("x"), "env")) is str
