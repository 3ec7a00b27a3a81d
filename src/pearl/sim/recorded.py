"""Recorded workloads: scripts that somebody's trajectories were.

Where a recording says which attempts were at one task, a group plays attempts at one task: a task drawn with the seed, its
attempts in an order of its own, and again from the beginning where it has fewer than are asked for. Otherwise every attempt
is a trajectory drawn by itself.

Waits that were not recorded are drawn from those that were; where none was, from a distribution that the caller gives.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pearl.core.distribution import Distribution, constant
from pearl.errors import ProfileError
from pearl.report.trajectories import RecordedTrajectory, RecordedTurn, Recording
from pearl.sim.draws import Draws
from pearl.sim.script import Script, ScriptTurn, script_of

_UNKNOWN: Final = -1.0
"""In the place of a wait that was not recorded."""


class RecordedWorkload:
    """A `Workload` of recorded trajectories."""

    def __init__(
        self,
        recording: Recording,
        *,
        seed: int,
        env_s: Distribution | None = None,
        env_source: str = "a given distribution",
        lower_bound: bool = False,
    ) -> None:
        """`env_s`: waits where the recording has none at all, by default 0; `env_source`: what they are, for `waits`.

        `lower_bound`: a wait is its lower bound where the recording has one.

        Raises:
            ProfileError: a trajectory that cannot be played, or some with a group and some without; names file and line.
        """
        self.recording, self.seed = recording, seed
        self._scripts = [_script(trajectory, lower_bound) for trajectory in recording.trajectories]
        self._tasks = _tasks(recording)
        known = [t.env_s for script in self._scripts for t in script.turns if t.env_s != _UNKNOWN]
        filling = env_s or constant(0.0)
        self._fill_values = np.array(known or filling.values)
        self._fill_shares = np.cumsum([1 / len(known)] * len(known) if known else filling.weights)[:-1]
        self._whole = [all(t.env_s != _UNKNOWN for t in script.turns) for script in self._scripts]
        self.waits = self._described(len(known), env_source if env_s else "0: give env_s")
        """Where waits come from, for people."""
        self._draws = Draws()

    @property
    def grouped(self) -> bool:
        """Whether attempts of a group are attempts at one task."""
        return bool(self._tasks)

    def script(self, group: int, attempt: int) -> Script:
        """See `Workload`."""
        number = self._drawn(group, attempt)
        script = self._scripts[number]
        return script if self._whole[number] else self._filled(script, group, attempt)

    def _drawn(self, group: int, attempt: int) -> int:
        """Which trajectory."""
        if not self._tasks:
            draws = self._draws.begin("single", self.seed, group, attempt)
            return int(draws.integers(len(self._scripts)))
        draws = self._draws.begin("task", self.seed, group)
        members = self._tasks[int(draws.integers(len(self._tasks)))]
        cycle, place = divmod(attempt, len(members))
        order = self._draws.begin("order", self.seed, group, cycle).permutation(len(members))
        return members[int(order[place])]

    def _filled(self, script: Script, group: int, attempt: int) -> Script:
        draws = self._draws.begin("waits", self.seed, group, attempt).random(len(script.turns))
        waits = self._fill_values[np.searchsorted(self._fill_shares, draws)].tolist()
        turns = tuple(
            turn if turn.env_s != _UNKNOWN else ScriptTurn(turn.input_tokens, turn.output_tokens, wait_s)
            for turn, wait_s in zip(script.turns, waits, strict=True)
        )
        return Script(turns=turns, starts=script.starts)

    def _described(self, known: int, source: str) -> str:
        turns = sum(len(script.turns) for script in self._scripts)
        if known == turns:
            return "recorded"
        if known:
            return f"recorded, but for {turns - known} of {turns} turns: drawn from the others"
        return f"not recorded: {source}"


def _script(trajectory: RecordedTrajectory, lower_bound: bool) -> Script:
    """A script whose waits may be unknown."""
    try:
        known = script_of(tuple(ScriptTurn(turn.input_tokens, turn.output_tokens, 0.0) for turn in trajectory.turns))
    except ProfileError as error:
        raise ProfileError(f"{trajectory.where}: {error}") from None
    turns = tuple(ScriptTurn(t.input_tokens, t.output_tokens, _wait_s(t, lower_bound)) for t in trajectory.turns)
    return Script(turns=turns, starts=known.starts)


def _wait_s(turn: RecordedTurn, lower_bound: bool) -> float:
    found = turn.env_lo_s if lower_bound and turn.env_lo_s is not None else turn.env_s
    return _UNKNOWN if found is None else float(found)


def _tasks(recording: Recording) -> list[list[int]]:
    """Numbers of the trajectories of each task; none where they are not known, or each was attempted once."""
    found: dict[str, list[int]] = {}
    first = recording.trajectories[0]
    for number, trajectory in enumerate(recording.trajectories):
        if (trajectory.group is None) != (first.group is None):
            raise ProfileError(
                f"{trajectory.where}: group: got {'none' if trajectory.group is None else trajectory.group}, want "
                f"{'none' if first.group is None else 'one'} as on the first line (all trajectories have one, or none has)"
            )
        if trajectory.group is not None:
            found.setdefault(trajectory.group, []).append(number)
    return list(found.values()) if any(len(members) > 1 for members in found.values()) else []
