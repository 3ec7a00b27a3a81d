"""A decision for people, as text, and for programs, as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from enum import Enum
from itertools import groupby

from pearl.core.actions import Action, Admit, Drain, GiveBack, LoadWeights, SetRole, Sleep, Start, Step, Stop, Wake
from pearl.core.choose import Option
from pearl.core.decision import Decision, Reason, Situation
from pearl.core.distribution import Distribution
from pearl.core.plan import Plan
from pearl.core.policy import Policy
from pearl.core.state import FleetState, GpuOwner
from pearl.records.ids import WorkerId
from pearl.records.journal import Json
from pearl.units import format_duration

SHOWN = 12
"""Shapes, and GPUs of a step, in the text, beside the shapes that serve, shall serve, or are named by a gate; JSON has all."""
SEATS = 6
"""New workers in the text of a step; JSON has all."""

_WHY = {
    Reason.BEST: "nothing is predicted to be faster than what serves",
    Reason.GATED: "something is predicted to be faster, but not by enough or not for long: see the gates",
    Reason.MOVED: "another shape is worth the move",
    Reason.BORROWED: "training GPUs are worth borrowing",
    Reason.FORCED: "what serves cannot go on, or nothing serves yet",
    Reason.RETURNED: "training GPUs go back",
    Reason.IN_TRANSITION: "the last change is not done, and nothing has to change",
    Reason.NOTHING_FITS: "no shape on these GPUs can serve",
    Reason.NO_PLAN: "there is no way to the shape",
    Reason.BAD_TIME: "now is no time",
}


def decision_text(
    policy: Policy, state: FleetState, situation: Situation, decision: Decision, now_s: float = 0.0
) -> str:
    """What was known, looked at, chosen and planned, and why; `now_s`: when it was decided."""
    parts = [
        _facts(policy, state, situation, decision),
        _table("shapes considered, the best of each kind", _shape_rows(decision)),
        _table("gates", _gate_rows(decision)),
        _table("decision", _outcome_rows(policy, decision, now_s)),
    ]
    if decision.plan is not None:
        parts.append(_table(_plan_title(decision.plan), _plan_rows(decision.plan)))
    return "\n\n".join(part for part in parts if part)


def _facts(policy: Policy, state: FleetState, situation: Situation, decision: Decision) -> str:
    work, platform = situation.profile.workload, situation.profile.platform
    progress = situation.progress
    counts = {owner: sum(gpu.owner is owner for gpu in state.gpus.values()) for owner in GpuOwner}
    gpus = " + ".join(f"{count} {owner.value}" for owner, count in counts.items() if count)
    model = platform.by_tp[platform.tps[0]]
    wanted = "" if policy.shape is None else f" ({policy.shape})"
    rows = [
        ("fleet", f"{gpus} GPUs; tp {', '.join(map(str, platform.tps))}"),
        ("engines", f"{model.model} on {model.device}"),
        ("policy", f"{policy.name}{wanted}, predicted by {policy.predictor.name}"),
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
    mean, middle, high = (_amount(value, 3) for value in (values.mean, values.quantile(0.5), values.quantile(0.95)))
    return f"mean {mean}{unit} (p50 {middle}, p95 {high})"


def _amount(value: float, digits: int) -> str:
    """Without an exponent where it can be told without."""
    return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.{digits}g}"


def _shape_rows(decision: Decision) -> Iterator[Sequence[str]]:
    special = [option for option in (decision.chosen, decision.current) if option is not None]
    options = list(decision.considered)
    asked = {gated.about for gated in decision.gates}
    options += [each for each in special if not any(_same(each, option) for option in options)]
    if not options:
        yield ("none: nothing that the policy may choose fits on the GPUs",)
        return
    yield ("shape", "borrowed", "closes in", "+-", "")
    ranked = sorted(options, key=lambda option: option.close_s)
    shown = [
        option
        for place, option in enumerate(ranked)
        if place < SHOWN or str(option.target) in asked or any(_same(option, each) for each in special)
    ]
    for option in shown:
        marks = [
            mark
            for mark, each in (("chosen", decision.chosen), ("serving", decision.current))
            if each is not None and _same(option, each)
        ]
        sure = math.isfinite(option.close_s)
        yield (
            str(option.target),
            str(option.borrowed),
            _seconds(option.close_s),
            _seconds(option.error_s) if sure else "",
            ", ".join(marks if sure else [*marks, _why_not(option)]),
        )
    if len(ranked) > len(shown):
        yield (f"... and {len(ranked) - len(shown)} more", "", "", "", "")


def _same(one: Option, other: Option) -> bool:
    return (one.target, one.borrowed) == (other.target, other.borrowed)


def _gate_rows(decision: Decision) -> Iterator[Sequence[str]]:
    for gated in decision.gates:
        numbers = ", ".join(f"{name} {_amount(value, 4)}" for name, value in gated.verdict.numbers)
        mark = "passed" if gated.verdict.passed else "refused"
        yield (gated.gate, gated.about, mark, gated.verdict.reason.value, numbers)


def _outcome_rows(policy: Policy, decision: Decision, now_s: float) -> Iterator[Sequence[str]]:
    chosen, current, wanted = decision.chosen, decision.current, policy.shape
    yield ("reason", f"{decision.reason.value}: {_WHY[decision.reason]}")
    yield ("shape", "none" if chosen is None else _option_text(chosen))
    if wanted is not None and (chosen is None or set(chosen.target.shape.pools) != set(wanted.pools)):
        yield ("instead of", f"{wanted}, which does not fit")
    if chosen and current and chosen.target.append_tokens != current.target.append_tokens:
        yield ("append", f"at most {_counted(chosen.target.append_tokens, 'token')} from now on, without a plan")
    if decision.refusal is not None:
        yield ("no plan", f"{decision.refusal.reason.value}: {decision.refusal.detail}")
    if decision.look_again_s is not None:
        yield ("look again", f"in {format_duration(max(0.0, decision.look_again_s - now_s))}")
    yield ("predicted", _counted(decision.evaluated, "shape"))


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _plan_title(plan: Plan) -> str:
    workers, roles = _counted(plan.d_worker, "worker"), _counted(plan.d_role, "role")
    return f"plan: {workers} and {roles} change, {format_duration(plan.cost_s)} of work in all"


def _plan_rows(plan: Plan) -> Iterator[Sequence[str]]:
    for number, group in enumerate(plan.groups, start=1):
        yield (f"group {number}", group.kind.value, "", "a role is not served for a while" if group.gap else "")
        for steps in _alike(group.steps):
            first, last = steps[0].index, steps[-1].index
            undo = "cannot be undone" if steps[0].undo is None else ""
            yield (f"  {first}" if first == last else f"  {first}-{last}", *_action_texts(steps), undo)


def _alike(steps: Sequence[Step]) -> Iterator[list[Step]]:
    """Runs of steps that do the same to different workers."""

    def kind(step: Step) -> tuple[str, object, object]:
        return type(step.action).__name__, getattr(step.action, "role", None), getattr(step.action, "to", None)

    for _, run in groupby(steps, key=kind):
        yield list(run)


def _action_texts(steps: Sequence[Step]) -> tuple[str, str]:
    """What is done, and to whom."""
    actions = [step.action for step in steps]
    match actions[0]:
        case Start(role=role):
            seats = [f"{each.worker} on {_gpus_text(each.gpus)}" for each in actions if isinstance(each, Start)]
            return f"start as {role.value}", _cut(seats, SEATS)
        case GiveBack(to=owner):
            gpus = [gpu for each in actions if isinstance(each, GiveBack) for gpu in each.gpus]
            return f"give back to {owner.value}", _cut(gpus, SHOWN)
        case Admit():
            return "admit together", _ranges(
                [slot for each in actions if isinstance(each, Admit) for slot in each.workers]
            )
        case Wake(role=role) | SetRole(role=role) as action:
            verb = f"{_VERBS[type(action)]} as {role.value}"
        case action:
            verb = _VERBS[type(action)]
    return verb, _ranges([each.worker for each in actions if not isinstance(each, Admit | GiveBack)])


def _gpus_text(gpus: Sequence[str]) -> str:
    return "+".join(gpus) if len(gpus) <= 2 else f"{gpus[0]}..{gpus[-1]}"


def _cut(names: Sequence[str], most: int) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f", ... {rest:,} more" if rest > 0 else "")


def _ranges(workers: Sequence[WorkerId]) -> str:
    """Neighbours together: `0-3, 7`."""
    runs: list[tuple[WorkerId, WorkerId]] = []
    for worker in workers:
        if runs and worker == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], worker)
        else:
            runs.append((worker, worker))
    return _cut([f"{first}" if first == last else f"{first}-{last}" for first, last in runs], SHOWN)


_VERBS = {
    Drain: "drain",
    LoadWeights: "load weights",
    SetRole: "go on",
    Sleep: "put to sleep",
    Stop: "stop",
    Wake: "wake",
}


def _option_text(option: Option) -> str:
    borrowed = f", {_counted(option.borrowed, 'worker')} borrowed" if option.borrowed else ""
    if math.isinf(option.close_s):
        return f"{option.target}{borrowed}: never closes ({_why_not(option)})"
    return f"{option.target}{borrowed}: closes in {_seconds(option.close_s)} +- {_seconds(option.error_s)}"


def _why_not(option: Option) -> str:
    """Why a batch never closes."""
    return option.infeasible.name.lower().replace("_", " ")


def _seconds(value: float) -> str:
    return f"{value:,.1f} s" if math.isfinite(value) else "never"


def _table(title: str, rows: Iterator[Sequence[str]]) -> str:
    """Columns side by side; nothing where there are no rows."""
    cells = list(rows)
    if not cells:
        return ""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
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
        "called_off": list(decision.called_off),
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
        "infeasible": None if math.isfinite(option.close_s) else option.infeasible.name.lower(),
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
