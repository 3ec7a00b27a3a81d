"""`pearl plan explain`: what the policy of a recipe would do, and why, without doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from pearl.cli.recipes import load_arguments
from pearl.config.check import check_plan
from pearl.core.budget import Budgets
from pearl.core.decide import decide
from pearl.core.decision import Moment
from pearl.core.plan import PlanRefusal, PlanRequest, apply, plan
from pearl.core.platform import Platform
from pearl.core.shape import Shape, parse_shape
from pearl.core.state import FleetState, StateRefusal
from pearl.errors import ConfigError, ShapeError
from pearl.report.explain import decision_json, decision_text
from pearl.report.planning import fleet_of, policy_of, situation_of


def explain(arguments: Sequence[str], *, serving: str, training: bool, as_json: bool) -> str:
    """The decision when a batch begins; `serving`: a shape that serves already; `training`: its GPUs are not lent.

    Raises:
        UserError: the recipe or the shape is not fine, or a file that it names is not.
    """
    recipe = load_arguments(arguments, checks=(check_plan,)).recipe
    shape = _shape(serving, recipe.fleet.tp) if serving else None
    policy, situation, state = policy_of(recipe), situation_of(recipe), fleet_of(recipe)
    if shape is not None:
        state = _with_serving(state, shape, situation.profile.platform)
    if training:
        situation = replace(situation, since_training_s=None)
    moment = Moment.TRAINING_BEGAN if training else Moment.TRAINING_FINISHED
    decision = decide(policy, state, situation, moment, 0.0)
    if as_json:
        return json.dumps(decision_json(policy, decision), indent=2, allow_nan=False)
    return decision_text(policy, state, situation, decision)


def _shape(text: str, tps: Sequence[int]) -> Shape:
    try:
        shape = parse_shape(text)
    except ShapeError as error:
        raise ConfigError(f"--serving: {str(error).removeprefix('shape: ')}") from None
    strange = sorted({pool.tp for pool in shape.pools} - set(tps))
    if strange:
        raise ConfigError(f"--serving: got {text} with tp {strange[0]}, want fleet.tp = {list(tps)}")
    return shape


def _with_serving(state: FleetState, shape: Shape, platform: Platform) -> FleetState:
    """The fleet with a shape on its dedicated GPUs."""
    budget = Budgets(state, platform.tps, lending=False).without()
    planned = plan(state, PlanRequest(shape=shape, usable=budget.usable), platform.costs)
    if isinstance(planned, PlanRefusal):
        detail = planned.detail.removeprefix(f"{shape}: ")
        raise ConfigError(f"--serving: got {shape}, which does not fit the dedicated GPUs of the recipe: {detail}")
    result = apply(state, planned)
    assert not isinstance(result, StateRefusal), "a plan of this very state"
    return result
