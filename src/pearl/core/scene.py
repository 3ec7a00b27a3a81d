"""What an event finds: which GPUs may be used, who serves and may stay, what has to go.

The first stage of a decision (`decide`): the budget. What leaves, what a policy leaves alone and what is in transition is not
part of it; borrowed GPUs are, until training needs them or the predicted end of the batch is near.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pearl.core.budget import Budget, Budgets
from pearl.core.choose import Option, first_round
from pearl.core.consider import policy_lines, some_lines
from pearl.core.decision import Gated, Moment, Situation
from pearl.core.gate import Verdict, return_due
from pearl.core.makespan import Forecast, Infeasible, Target, candidates_of
from pearl.core.policy import Borrow, Policy
from pearl.core.remembered import Remembered
from pearl.core.shape import Pool, Shape
from pearl.core.state import Activity, FleetState, GpuOwner, Role, Worker
from pearl.errors import ShapeError
from pearl.records.ids import GpuId, WorkerId

LEAVE_MARGIN_S = 5.0
"""How long before a notice falls due a worker begins to leave, beside the time that stopping takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What an event finds."""

    policy: Policy
    state: FleetState
    situation: Situation
    now_s: float
    forecast: Forecast
    leaving: frozenset[GpuId]
    """GPUs that are left now."""
    avoid: frozenset[GpuId]
    """GPUs that are not used: those, those under notice without a worker, those that the policy leaves alone."""
    budgets: Budgets
    """Of the GPUs there are; those of the trainer only where they may serve."""
    lending: bool
    """Whether training GPUs may serve."""
    staying: tuple[Worker, ...]
    """Rollout workers that serve, and may."""
    forced: bool
    """Whether others serve that may not."""
    moving: bool
    """Whether rollout workers are in transition."""
    borrowed: int
    """Overlap workers among those that stay."""
    current: Option | None
    """Those that stay, as a shape."""
    called_off: tuple[WorkerId, ...]
    """Rollout workers in transition on GPUs that have to go."""
    gates: tuple[Gated, ...]
    considered: tuple[Option, ...] = ()
    evaluated: int = 1

    @property
    def returning(self) -> bool:
        """Whether overlap workers serve that may not."""
        stays = {worker.id for worker in self.staying}
        return any(w.id not in stays and self.state.is_overlap(w.id) for w in self.state.active())


def scene_of(policy: Policy, state: FleetState, situation: Situation, moment: Moment, now_s: float) -> Scene:
    """The fleet, the GPUs and the shape that an event finds, with what the gate of return says of borrowed workers."""
    forecast = Remembered(policy.predictor.forecast(situation.profile, situation.progress))
    serving = [worker for worker in state.active() if worker.role is not Role.TRAINING]
    moving = [
        state.workers[slot]
        for slot in sorted(state.workers)
        if state.workers[slot].activity is Activity.TRANSITIONING and state.workers[slot].role is not Role.TRAINING
    ]
    leaving = _leaving(state, situation, now_s)
    avoid = _avoided(policy, state, leaving)
    gates: tuple[Gated, ...] = ()
    lending = _lends(policy, situation, moment)
    borrowed = [worker for worker in serving if state.is_overlap(worker.id)]
    if borrowed:
        due = _return(policy, situation, _option(forecast, _target(situation, serving), len(borrowed)), moment, now_s)
        gates = (Gated(gate="return", about=f"{len(borrowed)} workers", verdict=due),)
        lending = lending and not due.passed
    budgets = Budgets(state, situation.profile.platform.tps, lending=lending, gone=leaving)
    budget = budgets.without(avoid)
    allowed = budget.usable | budget.lendable
    staying = tuple(worker for worker in serving if allowed.issuperset(worker.gpus))
    lent = sum(state.is_overlap(worker.id) for worker in staying)
    current = _target(situation, staying)
    idle = idle_external(state) - avoid
    _ask_ahead(policy, situation, forecast, lent, (budget, budgets.without(avoid | idle)), current)
    return Scene(
        policy=policy,
        state=state,
        situation=situation,
        now_s=now_s,
        forecast=forecast,
        leaving=leaving,
        avoid=avoid,
        budgets=budgets,
        lending=lending,
        staying=staying,
        forced=len(staying) < len(serving),
        moving=bool(moving),
        borrowed=lent,
        current=_option(forecast, current, lent) if staying else None,
        gates=gates,
        called_off=tuple(
            worker.id
            for worker in moving
            if not leaving.isdisjoint(worker.gpus) or (state.is_overlap(worker.id) and not lending)
        ),
    )


def idle_external(state: FleetState) -> frozenset[GpuId]:
    """External GPUs on which there is no worker."""
    taken = {gpu for worker in state.workers.values() for gpu in worker.gpus}
    external = (gpu.id for gpu in state.gpus.values() if gpu.owner is GpuOwner.EXTERNAL)
    return frozenset(gpu for gpu in external if gpu not in taken)


def _ask_ahead(
    policy: Policy,
    situation: Situation,
    forecast: Forecast,
    borrowed: int,
    budgets: tuple[Budget, Budget],
    current: Target,
) -> None:
    """Have the shapes predicted that will be asked for, all at once: on all GPUs, and on those that are in use."""
    platform = situation.profile.platform
    every, used = budgets
    searches = [policy_lines(policy, platform, every, borrowed)]
    if policy.lease_aware and used != every:
        searches.append(policy_lines(policy, platform, used, borrowed))
    if every.overlap > borrowed:
        searches.append(policy_lines(policy, platform, every, every.overlap))
        # If the mode stays what it is; else they are asked for later.
        searches.append(some_lines(policy, platform, every, borrowed, [current] if current.shape.pools else []))
    if any(searches):
        forecast(first_round(searches))


def _leaving(state: FleetState, situation: Situation, now_s: float) -> frozenset[GpuId]:
    """GPUs whose notice, or lease, falls due within what it takes to leave them."""
    return frozenset(gpu for gpu, end_s in state.ends_s().items() if end_s <= now_s + leave_lead_s(situation))


def leave_lead_s(situation: Situation) -> float:
    """How long before GPUs fall due their workers begin to leave."""
    return situation.profile.platform.costs.stop_s + LEAVE_MARGIN_S


def _avoided(policy: Policy, state: FleetState, leaving: frozenset[GpuId]) -> frozenset[GpuId]:
    busy = {gpu for w in state.workers.values() if w.activity is not Activity.INACTIVE for gpu in w.gpus}
    avoid = leaving | {gpu for gpu in state.leaving() if gpu not in busy}
    dedicated = [gpu.id for gpu in state.gpus.values() if gpu.owner is not GpuOwner.TRAINING]
    if not policy.external:
        avoid |= {gpu for gpu in dedicated if state.gpus[gpu].owner is GpuOwner.EXTERNAL}
    if policy.gpus is not None:
        kept = sorted((gpu for gpu in dedicated if gpu not in avoid), key=lambda gpu: (gpu not in busy, gpu))
        avoid |= frozenset(kept[policy.gpus :])
    return avoid


def _lends(policy: Policy, situation: Situation, moment: Moment) -> bool:
    if policy.borrow is Borrow.NEVER or _batch_closed(situation, moment):
        return False
    if policy.borrow is Borrow.SEEDING:
        since_s = situation.since_training_s
        return since_s is not None and since_s < policy.seeding_s
    return True


def _return(policy: Policy, situation: Situation, now: Option, moment: Moment, now_s: float) -> Verdict:
    """Whether what is borrowed goes back."""
    return return_due(
        now_s=now_s,
        close_s=now.close_s,
        error_s=now.error_s,
        return_s=situation.profile.platform.costs.return_s,
        z=policy.return_z,
        batch_closed=_batch_closed(situation, moment),
    )


def _batch_closed(situation: Situation, moment: Moment) -> bool:
    return moment is Moment.TRAINING_BEGAN or situation.training or situation.progress.needed_groups == 0


def _target(situation: Situation, workers: Sequence[Worker]) -> Target:
    """Workers as a shape."""
    counts: dict[tuple[Role, int], int] = {}
    for worker in workers:
        pool = (worker.role, len(worker.gpus))
        counts[pool] = counts.get(pool, 0) + 1
    pools = [Pool(role=role, workers=counts[role, tp], tp=tp) for role, tp in sorted(counts, key=_pool_order)]
    apart = Role.DECODE in {role for role, _ in counts}
    return Target(shape=Shape(tuple(pools)), append_tokens=situation.append_tokens if apart else 0)


def _option(forecast: Forecast, target: Target, borrowed: int) -> Option:
    """Of what serves, at least one worker, with its prediction."""
    try:
        predicted = forecast(candidates_of([target]))
    except ShapeError:
        # More tensor parallelisms in a role than any choice has: only a fleet that was made by hand is like that.
        return Option(
            target=target, borrowed=borrowed, close_s=math.inf, error_s=math.inf, infeasible=Infeasible.UNSUPPORTED
        )
    return Option(
        target=target,
        borrowed=borrowed,
        close_s=float(predicted.close_s[0]),
        error_s=float(predicted.error_s[0]),
        infeasible=Infeasible(int(predicted.infeasible[0])),
    )


def _pool_order(pool: tuple[Role, int]) -> tuple[int, int]:
    return list(Role).index(pool[0]), pool[1]
