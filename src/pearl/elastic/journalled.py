"""Decisions and what became of them, as journal entries."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from enum import Enum

from pearl.core.actions import Action
from pearl.core.choose import Option
from pearl.core.decision import Decision, Moment, Situation
from pearl.core.state import FleetState
from pearl.elastic.executor import PlanOutcome
from pearl.records.ids import WorkerId
from pearl.records.journal import ChangeEntry, ChoiceEntry, Json


def decision_entry(
    number: int,
    at_s: float,
    moment: Moment,
    state: FleetState,
    situation: Situation,
    decision: Decision,
    ahead: Sequence[WorkerId] = (),
) -> ChoiceEntry:
    """A decision with what it saw: this state, and that plans are about to change the workers `ahead`."""
    current, chosen = decision.current, decision.chosen
    return ChoiceEntry(
        at_s=at_s,
        number=number,
        moment=moment.value,
        state_version=state.version,
        state_hash=state.hash,
        reason=decision.reason.value,
        serving=_shape(current),
        chosen=_shape(chosen),
        borrowed=0 if chosen is None else chosen.borrowed,
        serving_close_s=float("inf") if current is None else current.close_s,
        close_s=float("inf") if chosen is None else chosen.close_s,
        error_s=float("inf") if chosen is None else chosen.error_s,
        evaluated=decision.evaluated,
        gates=[
            [each.gate, each.about, each.verdict.passed, each.verdict.reason.value, _numbers(each.verdict.numbers)]
            for each in decision.gates
        ],
        plan=[]
        if decision.plan is None
        else [[group.kind.value, [_action(step.action) for step in group.steps]] for group in decision.plan.groups],
        inputs={**_inputs(situation), "ahead": list(ahead)},
    )


def outcome_entry(number: int, at_s: float, outcome: PlanOutcome) -> ChangeEntry:
    """What became of a decision's plan."""
    return ChangeEntry(
        at_s=at_s,
        number=number,
        seconds=outcome.seconds,
        done=outcome.done,
        groups=[[group.kind.value, group.done, group.why_not] for group in outcome.groups],
    )


def _numbers(numbers: Iterable[tuple[str, float]]) -> dict[str, Json]:
    """As JSON has them: what is not finite is null."""
    return {name: value if math.isfinite(value) else None for name, value in numbers}


def _shape(option: Option | None) -> str:
    return "" if option is None else str(option.target)


def _action(action: Action) -> str:
    values = (_text(getattr(action, each.name)) for each in fields(action))
    return " ".join((type(action).__name__, *values))


def _text(value: object) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _inputs(situation: Situation) -> dict[str, Json]:
    progress, work = situation.progress, situation.profile.workload
    return {
        "unfinished": progress.unfinished,
        "live_groups": progress.live_groups,
        "needed_groups": progress.needed_groups,
        "running": {str(turns): count for turns, count in sorted(progress.running.items())},
        "training": situation.training,
        "since_training_s": situation.since_training_s,
        "append_tokens": situation.append_tokens,
        "turns": work.turns.mean,
        "prompt_tokens": work.prompt_tokens.mean,
        "new_tokens": work.new_tokens.mean,
        "generated_tokens": work.generated_tokens.mean,
        "env_s": work.env_s.mean,
        "leases": len(situation.leases.spans),
    }
