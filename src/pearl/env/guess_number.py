"""Guess a hidden number in a few turns; each wrong guess is answered with the direction of the number."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from pearl.records.trajectory import EnvironmentReply, Scalar

WORDS = ("higher", "lower")
SIGNS = ("+", "-")


class GuessNumber:
    """Guess a number of `low..high` within `turns` guesses.

    A win pays 1, a lost game `0.5 * (1 - distance / range)` by the distance of the last guess, so that a group that loses
    alike still tells good guesses from bad ones. Anything that is not a number of the range ends the game with 0.
    `terse` answers `+` and `-`: with a character tokenizer every character is a token, and a small model learns faster
    when what matters is always at the same distance.
    """

    def __init__(
        self, low: int = 1, high: int = 9, turns: int = 4, target: int | None = None, terse: bool = False
    ) -> None:
        if low < 0 or low >= high:
            raise ValueError(f"guess_number: got low = {low}, high = {high}, want 0 <= low < high")
        if turns < 1:
            raise ValueError(f"guess_number: got turns = {turns}, want >= 1")
        if target is not None and not low <= target <= high:
            raise ValueError(f"guess_number: got target = {target}, want {low}..{high} or none (drawn from the seed)")
        self._low, self._high, self._turns = low, high, turns
        self._fixed_target = target
        self._higher, self._lower = SIGNS if terse else WORDS
        self._target: int | None = None
        self._left = 0

    def reset(self, seed: int) -> str:
        """Hide a number, drawn from the seed unless the target is fixed; return the range, `1-9`."""
        drawn = random.Random(seed).randint(self._low, self._high)
        self._target = drawn if self._fixed_target is None else self._fixed_target
        self._left = self._turns
        return f"{self._low}-{self._high}"

    def step(self, action: str) -> EnvironmentReply:
        """Judge one guess."""
        if self._target is None or self._left < 1:
            raise RuntimeError("guess_number: step on a game that is over or never began; call reset first")
        guess = self._read(action)
        self._left -= 1
        if guess is None:
            return self._end("invalid", 0.0, success=False)
        if guess == self._target:
            return self._end("correct", 1.0, success=True)
        if self._left == 0:
            closeness = 1 - abs(guess - self._target) / (self._high - self._low)
            return self._end(f"lost {self._target}", 0.5 * closeness, success=False)
        return EnvironmentReply(
            observation=self._higher if guess < self._target else self._lower, reward=0.0, done=False
        )

    def close(self) -> None:
        """Hold nothing."""

    @classmethod
    def evaluation_params(cls, **params: Scalar) -> Sequence[Mapping[str, Scalar]]:
        """Return every target of the range, ascending."""
        low, high = int(params.get("low", 1)), int(params.get("high", 9))
        return tuple({"target": target} for target in range(low, high + 1))

    def scripted_player(self, rng: random.Random) -> GuessNumberPlayer:
        """Return a poor player, see `GuessNumberPlayer`."""
        return GuessNumberPlayer(self._low, self._high, rng)

    def _read(self, action: str) -> int | None:
        text = action.strip()
        # isdecimal alone also takes the digits of other scripts.
        if not (text.isascii() and text.isdecimal()) or len(text) > len(str(self._high)):
            return None
        guess = int(text)
        return guess if self._low <= guess <= self._high else None

    def _end(self, observation: str, reward: float, *, success: bool) -> EnvironmentReply:
        self._left = 0
        return EnvironmentReply(observation=observation, reward=reward, done=True, success=success)


class GuessNumberPlayer:
    """Guesses blindly 7 times of 10, otherwise any number that the answers so far allow.

    Enough to learn the format and to see that answers matter, and far from a solution: that is left to the training.
    """

    CONSISTENT = 0.3

    def __init__(self, low: int, high: int, rng: random.Random) -> None:
        self._range = (low, high)
        self._allowed = (low, high)
        self._last = low
        self._rng = rng

    def act(self, observation: str) -> str:
        """Guess, after narrowing the allowed range by the answer to the last guess."""
        low, high = self._allowed
        if observation in (WORDS[0], SIGNS[0]):
            low = max(low, self._last + 1)
        elif observation in (WORDS[1], SIGNS[1]):
            high = min(high, self._last - 1)
        self._allowed = (low, high)
        self._last = self._rng.randint(*(self._allowed if self._rng.random() < self.CONSISTENT else self._range))
        return str(self._last)
