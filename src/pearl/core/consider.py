"""From candidate shapes to the one that is worth moving to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pearl.core.budget import Budget
from pearl.core.choose import TIE, Choice, Option, moves, search
from pearl.core.decision import Gated
from pearl.core.gate import (
    BorrowOption,
    BorrowVerdict,
    ChangeKind,
    GateReason,
    Verdict,
    borrow,
    change_kind,
    hysteresis,
    return_due,
)
from pearl.core.lines import Line, Space, lines_of
from pearl.core.makespan import SERVING_ROLES, Forecast, Target, candidates_of
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.policy import Borrow, Policy
from pearl.core.shape import Pool, Shape
from pearl.core.state import Role
from pearl.core.toggle import ToggleEstimate, toggle_s

NEAR = (ChangeKind.NONE, ChangeKind.SIZE, ChangeKind.RATIO)
BORROW_POINTS = 4
"""At most so many numbers of borrowed workers are looked at beside all and none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """What is worth moving to, and what the gates said."""

    option: Option | None
    gates: tuple[Gated, ...]
    considered: tuple[Option, ...] = ()
    """What gates were asked about; with borrowed workers: one shape for each number of them that was looked at."""


def options_for(
    policy: Policy, forecast: Forecast, platform: Platform, budget: Budget, borrowed: int, current: Option | None
) -> Choice:
    """The shapes that a policy may choose from with so many borrowed workers."""
    incumbent = None if current is None else current.target
    return search(forecast, policy_lines(policy, platform, budget, borrowed), policy.space, incumbent)


def policy_lines(policy: Policy, platform: Platform, budget: Budget, borrowed: int) -> list[Line]:
    """The lines that a policy may choose from with so many borrowed workers."""
    lines: list[Line] = []
    if policy.shape is not None:
        lines = _exactly(policy.shape, policy.space.append_tokens, budget)
    space = policy.space
    for fallback in (space, Space(tps=space.tps)):  # where a mode needs more workers than are left, any that can serve
        lines = lines or lines_of(platform, budget, fallback, borrowed)
    return lines


def settle(policy: Policy, choice: Choice, current: Option | None, costs: TransitionCosts) -> Settled:
    """The current shape, or one that wins enough over it.

    First the best shape near the current one (its mode and tensor parallelism) has to win, then the best of all over that:
    a large change is not excused by what a small one gains. A shape that the policy wants always need not win anything. Of what
    is no better than what there is, but for a tie, no gate is asked.
    """
    candidates = [option for option in (choice.best, *choice.considered) if option and math.isfinite(option.close_s)]
    if not candidates:
        return Settled(option=current if current and math.isfinite(current.close_s) else None, gates=())
    best = _first(candidates)
    near = None if current is None else _near(current, best, candidates)
    gates: list[Gated] = []
    asked: list[Option] = []
    accepted = current
    for option in (best,) if near in (None, best) else (near, best):
        if not _worth_asking(policy, accepted, option):
            continue
        asked.append(option)
        verdict = hysteresis(
            ChangeKind.SIZE if accepted is None else _kind(accepted, option),
            old_s=math.inf if accepted is None else accepted.close_s,
            new_s=option.close_s,
            cost_s=move_cost_s(accepted, option, costs),
            thresholds=policy.thresholds,
            forced=_wanted(policy, option),
        )
        gates.append(Gated(gate="hysteresis", about=str(option.target), verdict=verdict))
        if verdict.passed:
            accepted = option
    return Settled(option=accepted, gates=tuple(gates), considered=tuple(asked))


def _worth_asking(policy: Policy, accepted: Option | None, option: Option) -> bool:
    """Whether a shape is another one and faster, or the one that the policy wants."""
    if accepted is None:
        return True
    faster = option.close_s * (1 + TIE) < accepted.close_s
    return option.target != accepted.target and (faster or _wanted(policy, option))


def _wanted(policy: Policy, option: Option) -> bool:
    return policy.shape is not None and _pools(option.target.shape) == _pools(policy.shape)


def _near(current: Option, best: Option, candidates: Sequence[Option]) -> Option | None:
    """The best one near the current shape; the best of all where that is near."""
    if _kind(current, best) in NEAR:
        return best
    ranked = sorted(candidates, key=lambda option: option.close_s)
    return next((option for option in ranked if _kind(current, option) in NEAR), None)


def _first(options: Sequence[Option]) -> Option:
    """The best one; equal times count as the one that changes least, which comes first."""
    least = min(option.close_s for option in options)
    return next(option for option in options if option.close_s <= least * (1 + TIE))


def _kind(current: Option, option: Option) -> ChangeKind:
    kind = change_kind(current.target.shape, option.target.shape)
    if kind is ChangeKind.NONE and current.target != option.target:
        return ChangeKind.RATIO  # another bound of append-prefill: work moves between the pools
    return kind


def _pools(shape: Shape) -> frozenset[Pool]:
    return frozenset(shape.pools)


def move_cost_s(current: Option | None, option: Option, costs: TransitionCosts) -> float:
    """Seconds of the fleet's work that a move takes.

    Workers that change roles, or whose GPUs go to others, do not serve meanwhile: their share of the fleet's GPUs, for as long
    as it takes. New workers on free GPUs start in the background and cost nothing here: the gate of expansion counts that.
    """
    if current is None:
        return 0.0
    change = moves(current.target.shape, option.target.shape)
    out_s = change.reassigned_gpus * costs.role_change_s + change.rebuilt_gpus * (costs.stop_s + costs.start_s)
    return out_s / current.target.shape.gpus


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


def borrow_more(lending: Lending, dedicated: Option | None) -> Settled:
    """The shape with the number of borrowed workers that pays; `dedicated`: without more of them, None where none can serve."""
    policy, most = lending.policy, lending.budget.overlap
    if most <= lending.borrowed:
        return Settled(option=dedicated, gates=())
    full = _settled_with(lending, dedicated, most)
    if full.option is None or full.option.borrowed == lending.borrowed:
        return Settled(option=dedicated, gates=full.gates, considered=full.considered)
    due = _due(lending, full.option)
    if due.passed:
        # Not fewer either, though they would be due a little later: all may just have come back.
        gate = _due_at_once(dedicated, full.option, due)
        return Settled(option=dedicated, gates=(gate,), considered=(full.option,))
    if policy.borrow in (Borrow.ALWAYS, Borrow.SEEDING):
        return Settled(option=full.option, gates=(), considered=(full.option,))
    some = [(option, _due(lending, option)) for option in _with_some(lending, dedicated, full.option)]
    options = [*(option for option, due in some if not due.passed), full.option]
    verdict = _gate(lending, dedicated, options)
    gates = [Gated(gate="borrow", about=f"up to {most} workers", verdict=verdict)]
    late = min((each for each in some if each[1].passed), key=lambda each: each[0].close_s, default=None)
    if late is not None:
        gates.append(_due_at_once(dedicated, *late))
    chosen = [option for option in options if verdict.passed and option.borrowed == lending.borrowed + verdict.workers]
    option = _best_with(lending, dedicated, chosen[0]) if chosen else dedicated
    considered = (*(option for option, _ in some), full.option)
    return Settled(option=option, gates=tuple(gates), considered=considered)


def _settled_with(lending: Lending, dedicated: Option | None, borrowed: int) -> Settled:
    choice = options_for(lending.policy, lending.forecast, lending.platform, lending.budget, borrowed, dedicated)
    return settle(lending.policy, choice, dedicated, lending.platform.costs)


def _with_some(lending: Lending, dedicated: Option | None, full: Option) -> list[Option]:
    """Shapes worth looking at with less than all, one for each number of borrowed workers, rising."""
    policy = lending.policy
    likes = [option.target for option in (dedicated, full) if option is not None]
    lines = some_lines(policy, lending.platform, lending.budget, lending.borrowed, likes)
    every = search(lending.forecast, lines, policy.space, None).considered
    found: list[Option] = []
    for borrowed in sorted({line.borrowed for line in lines}):
        alike = tuple(option for option in every if option.borrowed == borrowed)
        best = settle(
            policy, Choice(best=None, considered=alike, evaluated=0), dedicated, lending.platform.costs
        ).option
        if best is not None and best.borrowed == borrowed:
            found.append(best)
    return found


def some_lines(
    policy: Policy, platform: Platform, budget: Budget, borrowed: int, likes: Sequence[Target]
) -> list[Line]:
    """The lines looked at with more overlap workers than serve already, but not all; of the mode of one of some shapes."""
    first, most = borrowed + 1, budget.overlap
    if policy.borrow is not Borrow.ANY:
        return []
    numbers = range(first, most, max(1, math.ceil((most - first) / BORROW_POINTS)))
    spaces = sorted({_like(target, budget.overlap_tp) for target in likes}, key=repr)
    return [line for number in numbers for space in spaces for line in lines_of(platform, budget, space, number)]


def _gate(lending: Lending, dedicated: Option | None, options: Sequence[Option]) -> BorrowVerdict:
    without = BorrowOption(workers=0, close_s=math.inf if dedicated is None else dedicated.close_s)
    others = [
        BorrowOption(
            workers=option.borrowed - lending.borrowed,
            close_s=option.close_s,
            toggle_s=toggle_s(lending.toggle, option.borrowed - lending.borrowed)
            + move_cost_s(dedicated, option, lending.platform.costs),
        )
        for option in options
    ]
    return borrow([without, *others])


def _best_with(lending: Lending, dedicated: Option | None, option: Option) -> Option:
    """The best of all shapes with as many borrowed workers as one has that was found among few."""
    if option.borrowed == lending.budget.overlap:
        return option  # all of them were looked at
    best = _settled_with(lending, dedicated, option.borrowed).option
    return option if best is None or best.borrowed != option.borrowed or _due(lending, best).passed else best


def _due(lending: Lending, option: Option) -> Verdict:
    """Whether what would be borrowed would have to go back at once, or as soon as it serves, or were the batch a little nearer.

    A little: as much as a change of mode must win, so that noise does not borrow again what has just come back.
    """
    nearer_s = lending.policy.thresholds.mode * option.close_s + lending.platform.costs.activate_s
    return return_due(
        now_s=lending.now_s,
        close_s=max(0.0, option.close_s - nearer_s),
        error_s=option.error_s,
        return_s=lending.platform.costs.return_s,
        z=lending.policy.return_z,
    )


def _due_at_once(dedicated: Option | None, option: Option, due: Verdict) -> Gated:
    """That something is not borrowed for it."""
    dedicated_s = math.inf if dedicated is None else dedicated.close_s
    told = {"close_s": "nearer_s"}  # beside what is predicted, that which the gate of return was asked about
    found = tuple((told.get(name, name), value) for name, value in due.numbers)
    numbers = (("dedicated_s", dedicated_s), ("borrowed_s", option.close_s), *found)
    verdict = Verdict(passed=False, reason=GateReason.DUE_AT_ONCE, numbers=numbers)
    return Gated(gate="borrow", about=str(option.target), verdict=verdict)


def _like(target: Target, overlap_tp: int) -> Space:
    """Shapes of a target's mode, tensor parallelisms and append-prefill, borrowed workers beside them."""
    roles = {pool.role for pool in target.shape.pools}
    return Space(
        colocated=roles == {Role.COLOCATED},
        disaggregated=Role.COLOCATED not in roles,
        hybrid=len(roles) == 3,
        tps=tuple(sorted({overlap_tp, *(pool.tp for pool in target.shape.pools)})),
        append_tokens=(target.append_tokens,),
    )


def _exactly(shape: Shape, bounds: Sequence[int], budget: Budget) -> list[Line]:
    """A given shape with these bounds of append-prefill, where there are GPUs for it."""
    # A larger worker takes the place of as many smaller ones as its GPUs would hold.
    for tp in {pool.tp for pool in shape.pools}:
        places = sum(pool.workers * -(-pool.tp // tp) for pool in shape.pools if pool.tp >= tp)
        if places > budget.workers.get(tp, 0):
            return []
    only = candidates_of([Target(shape=shape)])
    prefill, decode, colocated = (int(only.workers[role][0]) for role in SERVING_ROLES)
    return [
        Line(
            prefill_tp=int(only.tp[Role.PREFILL][0]),
            decode_tp=int(only.tp[Role.DECODE][0]),
            colocated_tp=int(only.tp[Role.COLOCATED][0]),
            length=1,
            first=(prefill, decode, colocated),
            step=(0, 0, 0),
            append_tokens=bound,
            borrowed=0,
            second=int(only.second[0]),
            second_tp=int(only.second_tp[0]),
        )
        for bound in bounds
    ]
