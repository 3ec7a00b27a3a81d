"""From candidate shapes to the one that is worth moving to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pearl.core.budget import Budget
from pearl.core.choose import TIE, Choice, Line, Option, Space, lines_of, moves, search
from pearl.core.decision import Gated
from pearl.core.gate import BorrowOption, ChangeKind, borrow, change_kind, hysteresis, return_due
from pearl.core.makespan import Forecast
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.policy import Borrow, Policy
from pearl.core.shape import Shape
from pearl.core.state import Role
from pearl.core.toggle import ToggleEstimate, toggle_s

NEAR = (ChangeKind.NONE, ChangeKind.SIZE, ChangeKind.RATIO)
BORROW_POINTS = 9
"""Numbers of borrowed workers that are looked at beside all and none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What is worth moving to, and what the gates said."""

    option: Option | None
    gates: tuple[Gated, ...]
    considered: tuple[Option, ...] = ()
    """With borrowed workers: one shape for each number of them."""


def options_for(
    policy: Policy, forecast: Forecast, platform: Platform, budget: Budget, borrowed: int, current: Option | None
) -> Choice:
    """The shapes that a policy may choose from with so many borrowed workers."""
    incumbent = None if current is None else current.target
    lines: list[Line] = []
    if policy.shape is not None:
        lines = _exactly(policy.shape, budget)
    space = policy.space
    for fallback in (space, Space(tps=space.tps)):  # where a mode needs more workers than are left, any that can serve
        lines = lines or lines_of(platform, budget, fallback, borrowed)
    return search(forecast, lines, space, incumbent)


def settle(
    policy: Policy, choice: Choice, current: Option | None, costs: TransitionCosts, *, joining_s: float
) -> Settled:
    """The current shape, or one that wins enough over it.

    First the best shape near the current one (its mode and tensor parallelism) has to win, then the best of all over that:
    a large change is not excused by what a small one gains. `joining_s`: what admitting new workers costs.
    """
    candidates = [option for option in (choice.best, *choice.considered) if option and math.isfinite(option.close_s)]
    if not candidates:
        return Settled(option=current if current and math.isfinite(current.close_s) else None, gates=())
    near = [option for option in candidates if current and _kind(current, option) in NEAR]
    gates: list[Gated] = []
    accepted = current
    for option in _firsts(near, candidates):
        kind = ChangeKind.SIZE if current is None else _kind(current, option)
        if accepted is not None and option.target == accepted.target:
            continue
        paid_s = move_cost_s(current, accepted, costs, joining_s) if accepted else 0.0
        verdict = hysteresis(
            kind,
            old_s=math.inf if accepted is None else accepted.close_s,
            new_s=option.close_s,
            cost_s=max(0.0, move_cost_s(current, option, costs, joining_s) - paid_s),
            thresholds=policy.thresholds,
            forced=policy.shape is not None,
        )
        gates.append(Gated(gate="hysteresis", about=str(option.target), verdict=verdict))
        if verdict.passed:
            accepted = option
    return Settled(option=accepted, gates=tuple(gates))


def _firsts(near: Sequence[Option], every: Sequence[Option]) -> list[Option]:
    """The best near one and the best one; equal times count as the one that changes least, which comes first."""
    firsts = [_first(near)] if near else []
    best = _first(every)
    return firsts if best in firsts else [*firsts, best]


def _first(options: Sequence[Option]) -> Option:
    least = min(option.close_s for option in options)
    return next(option for option in options if option.close_s <= least * (1 + TIE))


def _kind(current: Option, option: Option) -> ChangeKind:
    kind = change_kind(current.target.shape, option.target.shape)
    if kind is ChangeKind.NONE and current.target != option.target:
        return ChangeKind.RATIO  # another bound of append-prefill: work moves between the pools
    return kind


def move_cost_s(current: Option | None, option: Option, costs: TransitionCosts, joining_s: float) -> float:
    """Seconds of the fleet's work that a move takes.

    Workers that change roles, or whose GPUs go to others, do not serve meanwhile: their share of the fleet, for as long as it
    takes. New workers on free GPUs start in the background; only their joining counts.
    """
    if current is None or not current.target.shape.workers:
        return 0.0
    change = moves(current.target.shape, option.target.shape)
    rebuilt = min(change.added, change.removed)
    out_s = change.reassigned * costs.role_change_s + rebuilt * (costs.stop_s + costs.start_s)
    return out_s / current.target.shape.workers + (joining_s if change.added else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lending:
    """What borrowing is decided by."""

    policy: Policy
    forecast: Forecast
    platform: Platform
    budget: Budget
    toggle: ToggleEstimate
    borrowed: int
    """Overlap workers that serve already."""
    now_s: float


def borrow_more(lending: Lending, dedicated: Option) -> Settled:
    """The shape with the number of borrowed workers that pays; `dedicated` is the shape without more of them."""
    policy, most = lending.policy, lending.budget.overlap
    if most <= lending.borrowed:
        return Settled(option=dedicated, gates=())
    full = options_for(policy, lending.forecast, lending.platform, lending.budget, most, dedicated)
    options = _with_borrowed(lending, dedicated, full)
    if policy.borrow in (Borrow.ALWAYS, Borrow.SEEDING):
        return Settled(option=options[-1] if options else dedicated, gates=(), considered=tuple(options))
    worth: list[tuple[Option, BorrowOption]] = []
    for option in options:
        if _due(lending, option):
            continue
        more = option.borrowed - lending.borrowed
        cost_s = toggle_s(lending.toggle, more)
        cost_s += move_cost_s(dedicated, option, lending.platform.costs, 0.0)
        worth.append((option, BorrowOption(workers=more, close_s=option.close_s, toggle_s=cost_s)))
    verdict = borrow([BorrowOption(workers=0, close_s=dedicated.close_s), *(each for _, each in worth)])
    gate = Gated(gate="borrow", about=f"up to {most} workers", verdict=verdict)
    taken = [option for option, each in worth if verdict.passed and each.workers == verdict.workers]
    return Settled(option=taken[0] if taken else dedicated, gates=(gate,), considered=tuple(options))


def _with_borrowed(lending: Lending, dedicated: Option, full: Choice) -> list[Option]:
    """The shapes worth looking at, one for each number of borrowed workers, rising; all of them last."""
    policy, costs = lending.policy, lending.platform.costs
    last = settle(policy, full, dedicated, costs, joining_s=0.0).option
    if last is None or last.borrowed == dedicated.borrowed:
        return []
    first, most = lending.borrowed + 1, lending.budget.overlap
    found: list[Option] = []
    if policy.borrow is Borrow.ANY:
        step = max(1, (most - first) // BORROW_POINTS)
        spaces = {_like(dedicated), _like(last)}
        lines = [
            line
            for borrowed in range(first, most, step)
            for space in sorted(spaces, key=repr)
            for line in lines_of(lending.platform, lending.budget, space, borrowed)
        ]
        each = search(lending.forecast, lines, policy.space, dedicated.target).considered
        for borrowed in range(first, most, step):
            alike = tuple(option for option in each if option.borrowed == borrowed)
            best = settle(policy, Choice(best=None, considered=alike, evaluated=0), dedicated, costs, joining_s=0.0)
            if best.option is not None and best.option.borrowed == borrowed:
                found.append(best.option)
    return [*found, last]


def _due(lending: Lending, option: Option) -> bool:
    """Whether what would be borrowed would have to go back at once."""
    return return_due(
        now_s=lending.now_s,
        close_s=option.close_s,
        error_s=option.error_s,
        return_s=lending.platform.costs.return_s,
        z=lending.policy.return_z,
    ).passed


def _like(option: Option) -> Space:
    """Shapes of an option's mode, tensor parallelisms and append-prefill."""
    roles = {pool.role for pool in option.target.shape.pools}
    return Space(
        colocated=roles == {Role.COLOCATED},
        disaggregated=Role.COLOCATED not in roles,
        hybrid=len(roles) == 3,
        tps=tuple(sorted({pool.tp for pool in option.target.shape.pools})),
        append_tokens=(option.target.append_tokens,),
    )


def _exactly(shape: Shape, budget: Budget) -> list[Line]:
    """A given shape, where there are GPUs for it."""
    if shape.gpus > len(budget.usable) or any(pool.workers > budget.workers.get(pool.tp, 0) for pool in shape.pools):
        return []
    count = {pool.role: pool.workers for pool in shape.pools}
    tp = {pool.role: pool.tp for pool in shape.pools}
    return [
        Line(
            prefill_tp=tp.get(Role.PREFILL, 1),
            decode_tp=tp.get(Role.DECODE, 1),
            colocated_tp=tp.get(Role.COLOCATED, 1),
            length=1,
            first=(count.get(Role.PREFILL, 0), count.get(Role.DECODE, 0), count.get(Role.COLOCATED, 0)),
            step=(0, 0, 0),
            append_tokens=0,
            borrowed=0,
        )
    ]
