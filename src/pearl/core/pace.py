"""How unlike turns are: what a turn of a trajectory takes on a worker of its own, in units of a mean turn."""

from __future__ import annotations

from dataclasses import dataclass

from pearl.core.distribution import Distribution, constant
from pearl.core.makespan import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How unlike turns are: long and short ones make a trajectory longer or shorter than its number of turns says.

    A turn takes what it generates, and what it waits, each drawn anew; both in units of a turn's mean duration.
    """

    generates: Distribution
    waits: Distribution


def pace_of(profile: Profile) -> Pace:
    """Of a profile: turns on an idle worker of the smallest tensor parallelism, at half of the turns.

    Where turns take no time at all, all of them are alike.
    """
    work, platform = profile.workload, profile.platform
    tp = platform.tps[0]
    context = work.context_tokens(work.turns.mean / 2)
    token_s = platform.by_tp[tp].iterations.seconds(0, 1, context) * platform.scale(tp)
    turn_s = work.generated_tokens.mean * token_s + work.env_s.mean
    if turn_s <= 0:
        return Pace(generates=constant(1.0), waits=constant(0.0))
    return Pace(
        generates=work.generated_tokens.scaled(token_s / turn_s) if token_s > 0 else constant(0.0),
        waits=work.env_s.scaled(1 / turn_s),
    )
