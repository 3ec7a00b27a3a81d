"""Calls of the user's code from code that must not wait for ever: each in a bounded time, on a thread kept for it.

As in a rollout, the code runs beside the caller's thread. A call that does not return keeps the thread, which ends with the
process; whoever made the call goes on, without this environment.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from pearl.env.base import ScriptedPlayer, TextEnvironment
from pearl.env.registry import PlayerFactory, build_environment
from pearl.env.validate import check_observation, check_reply
from pearl.errors import EnvironmentHung, EnvironmentRaised, PearlError
from pearl.records.trajectory import EnvironmentReply, Scalar

T = TypeVar("T")


LOOK_S = 0.1
"""How late a call that does not return is noticed, at most."""


@dataclass(frozen=True, slots=True)
class _Bound:
    """On the call under way."""

    what: str
    timeout_s: float
    key: str
    deadline_s: float


class BoundedCalls:
    """One thread that does one piece of work after another, and in it one bounded call after another.

    Work, of many calls, changes threads once: a change costs more than a call of a small environment does.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._bound: _Bound | None = None
        self._asked: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=name, daemon=True).start()

    def make(self, call: Callable[[], T], what: str, timeout_s: float, key: str) -> T:
        """Return what one call returns; raises as `work` and `step` do."""
        return self.work(lambda: self.step(call, what, timeout_s, key))

    def work(self, work: Callable[[], T]) -> T:
        """Do work on the thread, and wait for it as long as each of its steps is within its bound.

        Raises:
            EnvironmentHung: a step is not; the thread is lost.
            BaseException: whatever the work raised.
        """
        result: Future[T] = Future()
        done = threading.Event()
        result.add_done_callback(lambda _: done.set())
        self._asked.put((result, work))
        while not done.wait(LOOK_S):
            bound = self._bound
            if bound is not None and time.monotonic() > bound.deadline_s:
                raise EnvironmentHung(
                    f"{self._name}: {bound.what}: no return within {bound.timeout_s:g} s; want it done within {bound.key}: "
                    "raise that, or find what it waits for"
                )
        return result.result()

    def step(self, call: Callable[[], T], what: str, timeout_s: float, key: str) -> T:
        """Within work: make a call that must return within `timeout_s`, as `key` of the recipe has it.

        Raises:
            EnvironmentRaised: it raised something that is none of ours.
            PearlError: whatever of ours it raised.
        """
        self._bound = _Bound(what, timeout_s, key, time.monotonic() + timeout_s)
        try:
            return call()
        except PearlError:
            raise
        except BaseException as error:  # the user's code may raise anything, SystemExit included
            raise EnvironmentRaised(f"{self._name}: {what}: raised {type(error).__name__}: {error}") from error
        finally:
            self._bound = None

    def _serve(self) -> None:
        while True:
            result, work = self._asked.get()
            try:
                result.set_result(work())
            except BaseException as error:  # it is the caller's
                result.set_exception(error)


class BoundedGames:
    """Makes an environment's games, and players for them, for scripted play; they are used within `work` only."""

    def __init__(
        self,
        kind: str,
        params: Mapping[str, Scalar],
        player: PlayerFactory,
        *,
        reset_timeout_s: float,
        step_timeout_s: float,
    ) -> None:
        """The bounds are those of rollout: construction and `reset`; `step`, `close` and the player's."""
        self._kind, self._params, self._player = kind, params, player
        self._reset_timeout_s, self._step_timeout_s = reset_timeout_s, step_timeout_s
        self._calls = BoundedCalls(f"environment {kind!r}")

    def work(self, work: Callable[[], T]) -> T:
        """Play; see `BoundedCalls.work`."""
        return self._calls.work(work)

    def game(self) -> BoundedGame:
        """A game."""
        return BoundedGame(self, self.begin(lambda: build_environment(self._kind, self._params), "construction"))

    def player(self, game: BoundedGame, rng: random.Random) -> BoundedPlayer:
        """A player of it."""
        return BoundedPlayer(self, self.go_on(lambda: self._player(game.inner, rng), "scripted player"))

    def begin(self, call: Callable[[], T], what: str) -> T:
        """Make a call that begins a game."""
        return self._calls.step(call, what, self._reset_timeout_s, "rollout.env_reset_timeout_s")

    def go_on(self, call: Callable[[], T], what: str) -> T:
        """Make a call within a game."""
        return self._calls.step(call, what, self._step_timeout_s, "rollout.env_step_timeout_s")


class BoundedGame:
    """A `TextEnvironment` whose calls are bounded and whose answers are checked."""

    def __init__(self, games: BoundedGames, inner: TextEnvironment) -> None:
        self._games = games
        self.inner = inner

    def reset(self, seed: int) -> str:
        """First observation."""
        observation = self._games.begin(lambda: self.inner.reset(seed), "reset")
        return check_observation(observation, "warm-up")

    def step(self, action: str) -> EnvironmentReply:
        """Answer one action."""
        reply = self._games.go_on(lambda: self.inner.step(action), "step")
        return check_reply(reply, "warm-up")

    def close(self) -> None:
        """Free what the game holds."""
        self._games.go_on(self.inner.close, "close")


class BoundedPlayer:
    """A `ScriptedPlayer` whose calls are bounded."""

    def __init__(self, games: BoundedGames, inner: ScriptedPlayer) -> None:
        self._games, self._inner = games, inner

    def act(self, observation: str) -> str:
        """Answer an observation."""
        return self._games.go_on(lambda: self._inner.act(observation), "scripted player: act")
