"""Calls of the user's code are bounded, and what they give is checked."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator

import pytest

from pearl.env.bounded import BoundedCalls, BoundedGames
from pearl.env.guess_number import GuessNumber, GuessNumberPlayer
from pearl.env.registry import player_factory
from pearl.errors import ConfigError, EnvironmentHung, EnvironmentNonsense, EnvironmentRaised
from pearl.records.trajectory import EnvironmentReply


@pytest.fixture
def released() -> Iterator[threading.Event]:
    """Set at the end, so that no thread is left waiting."""
    event = threading.Event()
    yield event
    event.set()


def games(step_timeout_s: float = 60.0, reset_timeout_s: float = 60.0) -> BoundedGames:
    return BoundedGames(
        "guess_number",
        {"low": 1, "high": 9, "turns": 4},
        player_factory("guess_number"),
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
    )


def test_scripted_play_is_that_of_the_environment_itself() -> None:
    plain = GuessNumber(low=1, high=9, turns=4)
    made = games()
    game = made.game()
    player = made.player(game, random.Random(3))
    reference = GuessNumberPlayer(1, 9, random.Random(3))
    seen, want = game.reset(5), plain.reset(5)
    for _ in range(4):
        assert seen == want
        action = player.act(seen)
        assert action == reference.act(want)
        reply = game.step(action)
        assert reply == plain.step(action)
        if reply.done:
            break
        seen = want = reply.observation
    game.close()


def test_calls_share_a_thread_that_is_not_the_callers() -> None:
    calls = BoundedCalls("x")
    threads = {calls.make(threading.get_ident, "call", 60.0, "key") for _ in range(3)}
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_call_that_does_not_return(released: threading.Event) -> None:
    with pytest.raises(EnvironmentHung, match=r"x: slow: no return within 0\.1 s; want it done within a\.key"):
        BoundedCalls("x").make(released.wait, "slow", 0.1, "a.key")


@pytest.mark.parametrize("error", [TimeoutError("no server"), SystemExit("no server"), KeyboardInterrupt("no server")])
def test_a_call_that_raises(error: BaseException) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(EnvironmentRaised, match=rf"x: call: raised {type(error).__name__}: no server"):
        BoundedCalls("x").make(fail, "call", 60.0, "key")


def test_an_error_of_ours_stays_what_it_is() -> None:
    made = BoundedGames("guess_numbr", {}, player_factory("guess_number"), reset_timeout_s=60.0, step_timeout_s=60.0)
    with pytest.raises(ConfigError, match="did you mean"):
        made.work(made.game)


@pytest.mark.parametrize(
    ("cls", "method", "what", "key"),
    [
        (GuessNumber, "reset", "reset", "env_reset_timeout_s"),
        (GuessNumber, "step", "step", "env_step_timeout_s"),
        (GuessNumberPlayer, "act", "scripted player: act", "env_step_timeout_s"),
    ],
)
def test_what_hangs_is_named(
    cls: type, method: str, what: str, key: str, released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, method, lambda _self, _argument: released.wait())
    made = games(
        **{"env_reset_timeout_s": {"reset_timeout_s": 0.1}, "env_step_timeout_s": {"step_timeout_s": 0.1}}[key]
    )

    def play() -> None:
        game = made.game()
        player = made.player(game, random.Random(0))
        game.step(player.act(game.reset(0)))

    with pytest.raises(EnvironmentHung, match=rf"environment 'guess_number': {what}: .* rollout\.{key}"):
        made.work(play)


def test_the_bound_is_on_each_call_and_not_on_the_work(released: threading.Event) -> None:
    calls = BoundedCalls("x")

    def work() -> int:
        for _ in range(8):
            calls.step(lambda: released.wait(0.1), "call", 0.4, "key")
        released.wait(0.5)  # not a call of the user's
        return 7

    assert calls.work(work) == 7


def test_nonsense_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = EnvironmentReply(observation="", reward=float("nan"), done=False)
    monkeypatch.setattr(GuessNumber, "step", lambda _self, _action: bad)
    game = games().game()
    game.reset(0)
    with pytest.raises(EnvironmentNonsense, match="reward"):
        game.step("5")
