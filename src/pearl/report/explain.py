"""A decision for people, as text, and for programs, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from itertools import groupby

from pearl.core.actions import Action, Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Start, Step, Stop, Wake
from pearl.core.choose import Option
from pearl.core.decision import Decision, Situation
from pearl.core.distribution import Distribution
from pearl.core.plan import Plan
from pearl.core.policy import Policy
from pearl.core.state import FleetState, GpuOwner
from pearl.records.journal import Json
from pearl.units import format_duration

SHOWN = 12
"""Shapes in the text; JSON has all."""


def decision_text(policy: Policy, state: FleetState, situation: Situation, decision: Decision) -> str:
    """What was known, looked at, chosen and planned, and why."""
    parts = [
        _facts(policy, state, situation, decision),
        _table("shapes considered, the best of each kind", _shape_rows(decision)),
        _table("gates", _gate_rows(decision)),
        _table("decision", _outcome_rows(decision)),
    ]
    if decision.plan is not None:
        parts.append(_table(f"plan, {format_duration(decision.plan.cost_s)} of work in all", _plan_rows(decision.plan)))
    return "\n\n".join(part for part in parts if part)


def _facts(policy: Policy, state: FleetState, situation: Situation, decision: Decision) -> str:
    work, platform = situation.profile.workload, situation.profile.platform
    progress = situation.progress
    counts = {owner: sum(gpu.owner is owner for gpu in state.gpus.values()) for owner in GpuOwner}
    gpus = " + ".join(f"{count} {owner.value}" for owner, count in counts.items() if count)
    model = platform.by_tp[platform.tps[0]]
    rows = [
        ("fleet", f"{gpus} GPUs; tp {', '.join(map(str, platform.tps))}"),
        ("engines", f"{model.model} on {model.device}"),
        ("policy", f"{policy.name}, predicted by {policy.predictor.name}"),
        (
            "batch",
            f"{progress.unfinished} of {progress.batch_trajectories} trajectories to finish, {progress.in_flight} in flight",
        ),
        ("turns", _spread(work.turns, "")),
        ("new tokens", f"{_spread(work.new_tokens, '')} per turn, {work.prompt_tokens.mean:,.0f} at the first"),
        ("generated", f"{_spread(work.generated_tokens, '')} per turn"),
        ("environment", f"{_spread(work.env_s, ' s')} per turn"),
        ("serving", "nothing" if decision.current is None else _option_text(decision.current)),
    ]
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def _spread(values: Distribution, unit: str) -> str:
    return f"mean {values.mean:,.3g}{unit} (p50 {values.quantile(0.5):,.3g}, p95 {values.quantile(0.95):,.3g})"


def _shape_rows(decision: Decision) -> Iterator[Sequence[str]]:
    yield ("shape", "borrowed", "closes in", "+-", "")
    ranked = sorted(decision.considered, key=lambda option: option.close_s)
    for option in ranked[:SHOWN]:
        marks = ["chosen"] if option == decision.chosen else []
        if decision.current is not None and option.target == decision.current.target:
            marks.append("serving")
        yield (
            str(option.target),
            str(option.borrowed),
            _seconds(option.close_s),
            _seconds(option.error_s),
            ", ".join(marks) or _why_not(option),
        )
    if len(ranked) > SHOWN:
        yield (f"... and {len(ranked) - SHOWN} more", "", "", "", "")


def _gate_rows(decision: Decision) -> Iterator[Sequence[str]]:
    for gated in decision.gates:
        numbers = ", ".join(f"{name} {value:,.4g}" for name, value in gated.verdict.numbers)
        mark = "passed" if gated.verdict.passed else "refused"
        yield (gated.gate, gated.about, mark, gated.verdict.reason.value, numbers)


def _outcome_rows(decision: Decision) -> Iterator[Sequence[str]]:
    yield ("reason", decision.reason.value)
    yield ("shape", "none can serve" if decision.chosen is None else _option_text(decision.chosen))
    if decision.refusal is not None:
        yield ("no plan", f"{decision.refusal.reason.value}: {decision.refusal.detail}")
    if decision.look_again_s is not None:
        yield ("look again", f"in {format_duration(decision.look_again_s)}")
    yield ("predicted", f"{decision.evaluated} shapes")


def _plan_rows(plan: Plan) -> Iterator[Sequence[str]]:
    for number, group in enumerate(plan.groups, start=1):
        yield (f"group {number}", group.kind.value, "", "a role is not served for a while" if group.gap else "")
        for steps in _alike(group.steps):
            first, last = steps[0].index, steps[-1].index
            undo = "cannot be undone" if steps[0].undo is None else ""
            yield (f"  {first}" if first == last else f"  {first}-{last}", *_action_texts(steps), undo)


def _alike(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Runs of steps that do the same to different workers."""

    def kind(step: Step) -> tuple[str, object]:
        return type(step.action).__name__, getattr(step.action, "role", None)

    for _, run in groupby(steps, key=kind):
        yield list(run)


def _action_texts(steps: Sequence[Step]) -> tuple[str, str]:
    """What is done, and to whom."""
    action = steps[0].action
    names = [_subject(step.action) for step in steps]
    shown = ", ".join(names[:SHOWN]) + (f", ... {len(names) - SHOWN} more" if len(names) > SHOWN else "")
    match action:
        case Start(role=role) | Wake(role=role) | SetRole(role=role):
            return f"{_VERBS[type(action)]} as {role.value}", shown
        case GiveBack(to=owner):
            return f"give back to {owner.value}", shown
        case _:
            return _VERBS[type(action)], shown


def _subject(action: Action) -> str:
    match action:
        case Start(worker=worker, gpus=gpus):
            return f"{worker} on {'+'.join(gpus)}"
        case GiveBack(gpus=gpus):
            return ", ".join(gpus)
        case Admit(workers=workers):
            return ", ".join(map(str, workers))
        case _:
            return str(action.worker)


_VERBS = {
    Admit: "admit together",
    Drain: "drain",
    LoadWeights: "load weights",
    SetRole: "go on",
    Sleep: "put to sleep",
    Start: "start",
    Stop: "stop",
    Wake: "wake",
}


def _option_text(option: Option) -> str:
    borrowed = f", {option.borrowed} workers borrowed" if option.borrowed else ""
    return f"{option.target}{borrowed}: closes in {_seconds(option.close_s)} +- {_seconds(option.error_s)}"


def _why_not(option: Option) -> str:
    return "" if math.isfinite(option.close_s) else option.infeasible.name.lower().replace("_", " ")


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if math.isfinite(value) else "never"


def _table(title: str, rows: Iterator[Sequence[str]]) -> str:
    cells = [[str(cell) for cell in row] for row in rows]
    if not cells:
        return ""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    ]
    return "\n".join([title, *lines])


# -- JSON -----------------------------------------------------------------------------------------------------------


def decision_json(policy: Policy, decision: Decision) -> dict[str, Json]:
    """The same for programs; what never ends is null."""
    return {
        "policy": policy.name,
        "predictor": policy.predictor.name,
        "reason": decision.reason.value,
        "current": _option_json(decision.current),
        "chosen": _option_json(decision.chosen),
        "considered": [_option_json(option) for option in decision.considered],
        "evaluated": decision.evaluated,
        "gates": [
            {
                "gate": gated.gate,
                "about": gated.about,
                "passed": gated.verdict.passed,
                "reason": gated.verdict.reason.value,
                "numbers": {name: _number(value) for name, value in gated.verdict.numbers},
            }
            for gated in decision.gates
        ],
        "refusal": None
        if decision.refusal is None
        else {"reason": decision.refusal.reason.value, "detail": decision.refusal.detail},
        "plan": None if decision.plan is None else _plan_json(decision.plan),
        "look_again_s": decision.look_again_s,
    }


def _option_json(option: Option | None) -> Json:
    if option is None:
        return None
    return {
        "shape": str(option.target.shape),
        "append_tokens": option.target.append_tokens,
        "borrowed": option.borrowed,
        "close_s": _number(option.close_s),
        "error_s": _number(option.error_s),
        "infeasible": _why_not(option) or None,
    }


def _plan_json(plan: Plan) -> dict[str, Json]:
    return {
        "cost_s": plan.cost_s,
        "d_worker": plan.d_worker,
        "d_role": plan.d_role,
        "groups": [
            {
                "kind": group.kind.value,
                "gap": group.gap,
                "steps": [
                    {
                        "index": step.index,
                        "action": _action_json(step.action),
                        "after": list(step.after),
                        "undo": None if step.undo is None else [_action_json(action) for action in step.undo],
                    }
                    for step in group.steps
                ],
            }
            for group in plan.groups
        ],
    }


def _action_json(action: Action) -> dict[str, Json]:
    values: Mapping[str, object] = {each.name: getattr(action, each.name) for each in fields(action)}
    return {"kind": type(action).__name__, **{name: _plain(value) for name, value in values.items()}}


def _plain(value: object) -> Json:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return str(value.value)
    return value if isinstance(value, int) else str(value)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
