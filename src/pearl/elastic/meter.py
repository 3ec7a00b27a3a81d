"""The meter: what iterations of the serving engines really take, over what the platform profile expects of them.

Every `interval_s` or so, when a turn has ended, the counters of all engines are read. Between two readings an engine has made so
many iterations, computed so many prompt tokens and drawn so many tokens; the profile says what that takes: iterations that
decode what was decoded on average, and as many of them as the prompts of turns fill with a chunk each computing those beside.
Busy time over that, summed over a training step and the engines of one tensor parallelism, is how far off the tables are.

It sets no timer: nothing happens here while no turn ends, so that a run that hangs is seen to hang.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.core.makespan import Profile
from pearl.errors import WorkerLost
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.workers import Workers
from pearl.ports import EngineStats
from pearl.records.ids import WorkerId

INTERVAL_S = 10.0
"""Within which the number of decoding sequences is taken as constant."""
ANSWER_S = 5.0
"""For an engine to tell its counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What an engine did between two readings."""

    iterations: int
    busy_s: float
    generated_tokens: int
    computed_prompt_tokens: int


@dataclass(slots=True)
class _Sums:
    busy_s: float = 0.0
    expected_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Meter:
    """Of the engines of a run."""

    workers: Workers
    profile: Callable[[], Profile]
    """The newest one."""
    interval_s: float = INTERVAL_S
    _read_s: float = 0.0
    _due: asyncio.Event = field(default_factory=asyncio.Event)
    _before: dict[WorkerId, EngineStats] = field(default_factory=dict)
    _sums: dict[int, _Sums] = field(default_factory=dict)

    def turn_ended(self, at_s: float) -> None:
        """Read the counters, if it is time."""
        if at_s >= self._read_s + self.interval_s:
            self._read_s = at_s
            self._due.set()

    async def run(self) -> None:
        """Read whenever it is time."""
        while True:
            await self._due.wait()
            self._due.clear()
            await self.read()

    async def read(self) -> None:
        """Read the counters of all engines now; one that does not answer is left out."""
        profile, router = self.profile(), self.workers.router
        before, self._before = self._before, {}
        for worker in router.workers:
            engine, known = router.engine(worker), self.workers.state.snapshot.workers.get(worker)
            if engine is None or known is None:
                continue
            try:
                async with guard(ANSWER_S, f"worker {worker}: counters"):
                    now = self._before[worker] = await engine.stats()
            except (WorkerLost, GuardExpired):
                continue
            if worker in before and (window := window_of(before[worker], now)) is not None:
                self._add(profile, len(known.gpus), window)

    def take(self) -> dict[int, float]:
        """Tensor parallelism -> busy over expected time since the last call."""
        sums, self._sums = self._sums, {}
        return {tp: one.busy_s / one.expected_s for tp, one in sorted(sums.items()) if one.expected_s > 0}

    def _add(self, profile: Profile, tp: int, window: Window) -> None:
        if tp in profile.platform.by_tp:
            one = self._sums.setdefault(tp, _Sums())
            one.busy_s += window.busy_s
            one.expected_s += expected_s(profile, tp, window)


def window_of(before: EngineStats, now: EngineStats) -> Window | None:
    """What lies between two readings; None: nothing, or the engine is another one."""
    window = Window(
        iterations=now.iterations - before.iterations,
        busy_s=now.busy_s - before.busy_s,
        generated_tokens=now.generated_tokens - before.generated_tokens,
        computed_prompt_tokens=now.computed_prompt_tokens - before.computed_prompt_tokens,
    )
    least = min(window.busy_s, window.generated_tokens, window.computed_prompt_tokens)
    return window if window.iterations > 0 and least >= 0 else None


def expected_s(profile: Profile, tp: int, window: Window) -> float:
    """What a window takes by a profile, scale included, at the mean context of all turns."""
    work, platform = profile.workload, profile.platform
    turns = work.turns.mean
    # A turn is met as often as there are turns: long trajectories have more of them.
    turns_done = (work.turns.variance / turns + turns - 1) / 2
    context = work.context_tokens(turns_done) + work.generated_tokens.mean / 2
    prompt = (work.prompt_tokens.mean + (turns - 1) * work.new_tokens.mean) / turns
    prompts = window.computed_prompt_tokens / max(1.0, prompt)
    chunks = min(float(window.iterations), max(prompts, window.computed_prompt_tokens / platform.prefill_chunk_tokens))
    # The iteration that ends a prompt draws a token too.
    decoding = max(0.0, window.generated_tokens - prompts) / window.iterations
    times = platform.by_tp[tp].iterations
    bare_s = (window.iterations - chunks) * times.seconds(0, decoding, context)
    tokens = window.computed_prompt_tokens / chunks if chunks else 0.0
    return platform.scale(tp) * (bare_s + chunks * times.seconds(tokens, decoding, context))
