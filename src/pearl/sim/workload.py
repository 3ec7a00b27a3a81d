"""Where simulated trajectories come from: one protocol, what the limits of a run leave of a script, and what scripts teach.

Law: a script depends on the workload, its seed, the group and the attempt, and on nothing else: not on which was asked for
before, nor on the process.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pearl.core.workload import WorkloadProfile
from pearl.errors import ProfileError
from pearl.report.workload_file import counted_workload
from pearl.sim.script import Script, ScriptTurn


class Workload(Protocol):
    """Scripts, as many as anybody asks for."""

    def script(self, group: int, attempt: int) -> Script:
        """What an attempt at a group's task does; both count from 0. Cheap enough to be called again instead of kept."""


def truncated(script: Script, *, max_turns: int, max_context_tokens: int) -> Script | None:
    """What is played of a script under the limits of `[rollout]`; None: not even its first turn.

    A turn whose prompt fills the context is not begun, one that reaches the limit ends there. The runtime does this by itself
    and counts it (`truncated_turns`, `truncated_tokens`): this is for readers who want to know beforehand. It does not know
    `sampling.max_new_tokens`.

    Raises:
        ProfileError: a limit below 1.
    """
    for name, limit in (("max_turns", max_turns), ("max_context_tokens", max_context_tokens)):
        if limit < 1:
            raise ProfileError(f"{name}: got {limit}, want >= 1")
    fitting = sum(start < max_context_tokens for start in script.starts)  # starts never fall
    count = min(max_turns, fitting)
    if not count:
        return None
    last, start = script.turns[count - 1], script.starts[count - 1]
    room_tokens = max_context_tokens - start
    if count == len(script.turns) and last.output_tokens <= room_tokens:
        return script
    cut = ScriptTurn(last.input_tokens, min(last.output_tokens, room_tokens), last.env_s)
    return Script(turns=(*script.turns[: count - 1], cut), starts=script.starts[:count])


def profile_of(scripts: Iterable[Script]) -> WorkloadProfile:
    """The workload as somebody would fit it who saw these trajectories whole.

    Raises:
        ProfileError: no scripts.
    """
    return counted_workload(script.turns for script in scripts)
