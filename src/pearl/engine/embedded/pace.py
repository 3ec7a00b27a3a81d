"""Pacing: iterations that last as long as a platform profile says, whatever this machine could do.

So a small model on a CPU can stand in for a large one on a GPU: scheduling, routing and training see the times of the
profile. Law: an iteration never ends before its time; one that is over its time already is *late*, is counted, and sleeps
no further.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Self

from pearl.config.engine import EngineConfig
from pearl.core.profile import LONGEST_PROFILE_BYTES, IterationTimes, parse_profile
from pearl.engine.embedded.attention import Batch
from pearl.errors import ConfigError, ProfileError
from pearl.text_file import Unreadable, read_text


class Pace:
    """Holds the engine's thread at the end of every iteration until its time is over."""

    def __init__(
        self,
        times: IterationTimes,
        time_scale: float = 1.0,
        *,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`clock` and `sleep` must belong together: a sleep of n seconds moves the clock by n or more."""
        self._times, self._time_scale, self._clock, self._sleep = times, time_scale, clock, sleep
        self._began_s = clock()
        self.late_iterations = 0
        """Iterations that took longer than their time."""

    @classmethod
    def read(cls, config: EngineConfig) -> Self | None:
        """The pace that a recipe asks for, None when it asks for none.

        Raises:
            ConfigError: `engine.pacing` cannot be read, or is no profile.
        """
        if config.pacing is None:
            return None
        try:
            text = read_text(config.pacing, most_bytes=LONGEST_PROFILE_BYTES)
            profile = parse_profile(text, str(config.pacing))
        except Unreadable as error:
            raise ConfigError(f"engine.pacing: {error}; want a file of `pearl profile`") from None
        except ProfileError as error:
            raise ConfigError(f"engine.pacing: {error}") from None
        return cls(profile.iterations, config.time_scale)

    def begin(self) -> None:
        """An iteration begins."""
        self._began_s = self._clock()

    def end(self, batch: Batch) -> None:
        """An iteration has computed this: sleep for the rest of its time."""
        rest_s = self._seconds(batch) - (self._clock() - self._began_s)
        if rest_s > 0:
            self._sleep(rest_s)
        elif rest_s < 0:
            self.late_iterations += 1

    def _seconds(self, batch: Batch) -> float:
        decoding = batch.counts == 1
        lengths = batch.starts + batch.counts
        context = lengths[decoding] if decoding.any() else lengths
        return self._time_scale * self._times.seconds(
            int(batch.counts[~decoding].sum()), int(decoding.sum()), float(context.mean())
        )
