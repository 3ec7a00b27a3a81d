"""`decide`: from an event to what the fleet does about it, and why.

Every event takes the same stages: the budget of GPUs, the choice of a shape, its gates, the plan. Laws:

- *pure*: the same policy, state, situation, moment and time give the same decision; what it needs to know of the past is in the
  situation.
- *settled*: once a plan is carried out, the same situation asks for nothing more.
- *forced first*: what must go (training begins, a notice falls due, a role lost its last worker) goes whatever a move costs and
  whatever is in transition; everything else waits until nothing is.
- *accounted*: a decision carries the shapes it looked at and each gate's verdict with its numbers, acceptance and refusal alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from functools import cache

from pearl.core.budget import Budget
from pearl.core.choose import TIE, Choice, Option
from pearl.core.consider import Lending, Settled, borrow_more, move_cost_s, options_for, settle
from pearl.core.decision import Decision, Gated, Moment, Reason, Situation
from pearl.core.gate import GateReason, Verdict, expansion, return_by_s
from pearl.core.plan import PlanRefusal, PlanRequest, plan
from pearl.core.policy import Borrow, Policy
from pearl.core.scene import Scene, idle_external, leave_lead_s, scene_of
from pearl.core.shape import Shape
from pearl.core.state import Activity, FleetState
from pearl.core.survival import expected_use_s
from pearl.records.ids import GpuId

HORIZON_S = 4 * 3600.0
"""How far ahead the use of a lease is counted: the workload is known no further."""
TIMES = (("old_s", "new_s"), ("dedicated_s", "borrowed_s"), ("dedicated_s", "fastest_s"))
"""What gates call the seconds until the batch closes without and with what they weigh."""
FALLBACKS = 5
"""Other shapes that are tried where there is no way to the chosen one and something has to change."""


def decide(policy: Policy, state: FleetState, situation: Situation, moment: Moment, now_s: float) -> Decision:
    """What to do now; `now_s` is seconds on the clock of leases and notices, finite and >= 0."""
    if not (math.isfinite(now_s) and now_s >= 0):
        return Decision(reason=Reason.BAD_TIME)
    scene = scene_of(policy, state, situation, moment, now_s)
    if scene.moving and not scene.forced and scene.current is not None and math.isfinite(scene.current.close_s):
        return _decision(scene, Reason.IN_TRANSITION, scene.current)
    expected_s = _expected_s(scene)
    short = _short(scene, expected_s)
    budget = scene.budgets.without(scene.avoid | short)
    budget, choice, settled = _dedicated(scene, budget, expected_s)
    waits, evaluated = _left_out(scene, budget, short, settled.option)
    gates = [*scene.gates, *waits, *settled.gates]
    chosen, considered = settled.option, (*choice.considered, *settled.considered)
    if scene.lending:
        lending = Lending(
            policy=policy,
            forecast=scene.forecast,
            platform=situation.profile.platform,
            budget=budget,
            toggle=situation.toggle,
            borrowed=scene.borrowed,
            now_s=now_s,
        )
        more = borrow_more(lending, chosen)
        gates += more.gates
        chosen, considered = more.option, (*considered, *more.considered)
    evaluated += choice.evaluated + 1
    once = {(option.target, option.borrowed): option for option in considered}
    found = replace(scene, gates=tuple(gates), considered=tuple(once.values()), evaluated=evaluated)
    return _planned(found, budget, chosen)


# -- stage 2: what to do with it ------------------------------------------------------------------------------------


def _short(scene: Scene, expected_s: Mapping[GpuId, float]) -> frozenset[GpuId]:
    """GPUs that are expected to be gone before a worker there would serve."""
    start_s, ends_s = scene.situation.profile.platform.costs.start_s, scene.state.ends_s()
    # What is known everybody heeds; what is expected, policies that are aware of leases.
    return frozenset(
        gpu
        for gpu, use_s in expected_s.items()
        if not (use_s if scene.policy.lease_aware else ends_s.get(gpu, math.inf) - scene.now_s) > start_s
    )


def _left_out(
    scene: Scene, budget: Budget, short: frozenset[GpuId], stays: Option | None
) -> tuple[tuple[Gated, ...], int]:
    """What GPUs that are gone too soon could have won, would they stay; and how many shapes were predicted to know it."""
    if not short:
        return (), 0
    platform = scene.situation.profile.platform
    wide = _using(scene, budget, budget.usable | short)
    choice = options_for(scene.policy, scene.forecast, platform, wide, scene.borrowed, stays)
    old_s, new_s = (math.inf if option is None else option.close_s for option in (stays, choice.best))
    numbers = (
        ("gpus", float(len(short))),
        ("start_s", platform.costs.start_s),
        ("old_s", old_s),
        ("new_s", new_s),
    )
    verdict = Verdict(passed=False, reason=GateReason.LEASE_TOO_SHORT, numbers=numbers)
    return (Gated(gate="lease", about=f"{len(short)} GPUs", verdict=verdict),), choice.evaluated


def _expected_s(scene: Scene) -> dict[GpuId, float]:
    """External GPUs on which no worker is -> how long they are expected to stay."""
    state, situation = scene.state, scene.situation
    since_s = {gpu: lease.since_s for lease in state.leases.values() for gpu in lease.gpus}
    ends_s = state.ends_s()

    @cache
    def use_s(began_s: float, end_s: float) -> float:
        age_s, leaves_in_s = max(0.0, scene.now_s - began_s), end_s - scene.now_s
        return expected_use_s(situation.leases, age_s, HORIZON_S, situation.lease_prior_s, leaves_in_s=leaves_in_s)

    return {
        gpu: use_s(since_s.get(gpu, scene.now_s), ends_s.get(gpu, math.inf))
        for gpu in sorted(idle_external(state) - scene.avoid)
    }


def _dedicated(scene: Scene, budget: Budget, expected_s: Mapping[GpuId, float]) -> tuple[Budget, Choice, Settled]:
    """The shape with the borrowed workers that there are, and its GPUs; new workers are weighed against their leases.

    External GPUs on which no worker is serve if that pays over not using them: all, else the half of them that is expected to
    stay longest, and so on; then what is left of them in the same way, on top.
    """
    left_s = {gpu: use_s for gpu, use_s in expected_s.items() if gpu in budget.usable}
    if not (scene.policy.lease_aware and left_s and scene.current):
        return budget, *_settled(scene, budget, scene.current)
    taken = _using(scene, budget, budget.usable - left_s.keys())
    choice, settled = _settled(scene, taken, scene.current)
    stays, evaluated = settled.option or scene.current, choice.evaluated
    gates, asked = settled.gates, settled.considered
    some_s = left_s
    while some_s:
        wide = _using(scene, budget, budget.usable - (left_s.keys() - some_s.keys()))
        more, larger = _settled(scene, wide, stays)
        evaluated += more.evaluated
        gates, asked = gates + larger.gates, asked + larger.considered
        if larger.option is None or larger.option.target.shape.gpus <= stays.target.shape.gpus:
            break
        gates += (_expansion(scene, stays, larger.option, min(some_s.values())),)
        if gates[-1].verdict.passed:
            taken, choice, settled, stays = wide, more, larger, larger.option
            left_s = some_s = {gpu: use_s for gpu, use_s in left_s.items() if gpu not in some_s}
        else:
            shorter_s = sorted(some_s.values())[(len(some_s) - 1) // 2]
            some_s = {gpu: use_s for gpu, use_s in some_s.items() if use_s > shorter_s}
    return taken, replace(choice, evaluated=evaluated), replace(settled, gates=gates, considered=asked)


def _using(scene: Scene, budget: Budget, usable: Set[GpuId]) -> Budget:
    """A budget with other dedicated GPUs."""
    return scene.budgets.without(frozenset(scene.state.gpus) - usable - budget.lendable)


def _settled(scene: Scene, budget: Budget, current: Option | None) -> tuple[Choice, Settled]:
    platform = scene.situation.profile.platform
    choice = options_for(scene.policy, scene.forecast, platform, budget, scene.borrowed, current)
    return choice, settle(scene.policy, choice, current, platform.costs)


def _expansion(scene: Scene, stays: Option, larger: Option, use_s: float) -> Gated:
    costs = scene.situation.profile.platform.costs
    verdict = expansion(
        expected_use_s=use_s,
        start_s=costs.start_s,
        old_s=stays.close_s,
        new_s=larger.close_s,
        finalise_s=costs.finalise_s,
        role_changes_s=move_cost_s(stays, larger, costs),
    )
    return Gated(gate="expansion", about=str(larger.target), verdict=verdict)


# -- stage 3: how to get there --------------------------------------------------------------------------------------


def _planned(scene: Scene, budget: Budget, chosen: Option | None) -> Decision:
    """The plan to the chosen shape; where there is none and something has to change, to the next best."""
    stays = scene.current
    if not scene.forced and (chosen is None or (stays is not None and chosen.target == stays.target)):
        return _decision(scene, _kept(scene, chosen), chosen)
    tried = [chosen] if chosen is not None else []
    if scene.forced or stays is None or math.isinf(stays.close_s):
        tried += [option for option in scene.considered[:FALLBACKS] if math.isfinite(option.close_s)]
    refusal: PlanRefusal | None = None
    for option in tried:
        result = plan(scene.state, _request(scene, budget, option), scene.situation.profile.platform.costs)
        if not isinstance(result, PlanRefusal):
            return replace(_decision(scene, _why(scene, option), option), plan=result if result.groups else None)
        refusal = refusal or result
    if not scene.forced:
        return replace(_decision(scene, Reason.NO_PLAN, stays), refusal=refusal)
    # Nothing can serve; what must go goes all the same.
    bare = Shape(()) if stays is None else stays.target.shape
    request = replace(_request(scene, budget, stays), shape=bare)
    result = plan(scene.state, request, scene.situation.profile.platform.costs)
    reason = Reason.NOTHING_FITS if refusal is None else Reason.NO_PLAN
    decision = replace(_decision(scene, reason, None if refusal is None else stays), refusal=refusal)
    return decision if isinstance(result, PlanRefusal) else replace(decision, plan=result)


def _request(scene: Scene, budget: Budget, option: Option | None) -> PlanRequest:
    return PlanRequest(
        shape=Shape(()) if option is None else option.target.shape,
        borrowed=0 if option is None else option.borrowed,
        usable=budget.usable,
        lendable=budget.lendable,
        leaving=scene.leaving,
    )


def _kept(scene: Scene, chosen: Option | None) -> Reason:
    if chosen is None:
        return Reason.IN_TRANSITION if scene.moving else Reason.NOTHING_FITS
    return Reason.GATED if any(_refused(each) for each in scene.gates) else Reason.BEST


def _refused(gated: Gated) -> bool:
    """Whether a gate kept something faster back; what is equally good is not faster, nor what a gate has no time of."""
    found = dict(gated.verdict.numbers)
    faster = any(found[new] * (1 + TIE) < found[old] for old, new in TIMES if new in found)
    return faster and not gated.verdict.passed


def _why(scene: Scene, option: Option) -> Reason:
    if scene.returning:
        return Reason.RETURNED
    if scene.forced or scene.current is None or math.isinf(scene.current.close_s):
        return Reason.FORCED
    return Reason.BORROWED if option.borrowed > scene.borrowed else Reason.MOVED


def _decision(scene: Scene, reason: Reason, chosen: Option | None) -> Decision:
    return Decision(
        reason=reason,
        current=scene.current,
        chosen=chosen,
        gates=scene.gates,
        considered=scene.considered,
        evaluated=scene.evaluated,
        look_again_s=_look_again_s(scene, chosen),
        called_off=scene.called_off,
    )


def _look_again_s(scene: Scene, chosen: Option | None) -> float | None:
    """When borrowed GPUs, GPUs under notice, or a seeding window fall due."""
    platform, policy = scene.situation.profile.platform, scene.policy
    lead_s = leave_lead_s(scene.situation)
    ends_s = scene.state.ends_s()
    here = [worker for worker in scene.state.workers.values() if worker.activity is not Activity.INACTIVE]
    times = [ends_s[gpu] - lead_s for worker in here for gpu in worker.gpus if gpu in ends_s]
    if chosen is not None and chosen.borrowed:
        times.append(return_by_s(scene.now_s, chosen.close_s, chosen.error_s, platform.costs.return_s, policy.return_z))
        since_s = scene.situation.since_training_s
        if policy.borrow is Borrow.SEEDING and since_s is not None:
            times.append(scene.now_s + policy.seeding_s - since_s)
    return min((time_s for time_s in times if scene.now_s < time_s < math.inf), default=None)
