"""`pearl plan explain`: what the policy of a recipe would do, and why, without doing it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from pearl.cli.recipes import load_arguments
from pearl.core.budget import budget_of
from pearl.core.decide import decide
from pearl.core.decision import Moment
from pearl.core.plan import PlanRefusal, PlanRequest, apply, plan
from pearl.core.platform import TransitionCosts
from pearl.core.shape import parse_shape
from pearl.core.state import FleetState, StateRefusal
from pearl.errors import ConfigError
from pearl.report.explain import decision_json, decision_text
from pearl.report.planning import fleet_of, policy_of, situation_of


def explain(arguments: Sequence[str], *, serving: str, training: bool, as_json: bool) -> str:
    """The decision when a batch begins; `serving`: a shape that serves already; `training`: its GPUs are not lent.

    Raises:
        UserError: the recipe or the shape is not fine, or a file that it names is not.
    """
    recipe = load_arguments(arguments).recipe
    policy, situation, state = policy_of(recipe), situation_of(recipe), fleet_of(recipe)
    platform = situation.profile.platform
    if serving:
        state = _with_serving(state, serving, platform.tps, platform.costs)
    moment = Moment.TRAINING_BEGAN if training else Moment.TRAINING_FINISHED
    decision = decide(policy, state, situation, moment, 0.0)
    if as_json:
        return json.dumps(decision_json(policy, decision), indent=2, allow_nan=False)
    return decision_text(policy, state, situation, decision)


def _with_serving(state: FleetState, text: str, tps: Sequence[int], costs: TransitionCosts) -> FleetState:
    """The fleet with a shape on its dedicated GPUs."""
    shape = parse_shape(text)
    budget = budget_of(state, tps, lending=False)
    planned = plan(state, PlanRequest(shape=shape, usable=budget.usable), costs)
    if isinstance(planned, PlanRefusal):
        raise ConfigError(
            f"--serving: got {text}, which does not fit the dedicated GPUs of the recipe: {planned.detail}"
        )
    result = apply(state, planned)
    assert not isinstance(result, StateRefusal), "a plan of this very state"
    return result
