"""A decision as text and as JSON: made by hand, with everything that can be in one; and as the core makes it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import MappingProxyType

import pytest

from pearl.core.actions import (
    Action,
    ActionGroup,
    Admit,
    Drain,
    GiveBack,
    GroupKind,
    LoadWeights,
    SetRole,
    Sleep,
    Start,
    Step,
    Stop,
    Wake,
)
from pearl.core.choose import Option
from pearl.core.decide import decide
from pearl.core.decision import Decision, Gated, Moment, Reason, Situation
from pearl.core.distribution import Distribution, constant
from pearl.core.gate import GateReason, Verdict
from pearl.core.makespan import Infeasible, Profile, Target
from pearl.core.plan import Plan, PlanRefusal, PlanRefusalReason
from pearl.core.platform import Platform
from pearl.core.policy import Policy, PolicyOptions, policy_named
from pearl.core.priors import platform_prior
from pearl.core.progress import fresh_batch
from pearl.core.shape import parse_shape
from pearl.core.state import FleetState, Gpu, GpuOwner, GpusJoined, Role
from pearl.core.toggle import ToggleEstimate
from pearl.core.workload import WorkloadProfile
from pearl.records.ids import GpuId, NodeId, WorkerId
from pearl.report.explain import SEATS, SHOWN, decision_json, decision_text
from pearl.report.planning import folded

PEARL = policy_named("pearl", PolicyOptions())
WORK = WorkloadProfile(
    turns=Distribution((1.0, 4.0), (0.5, 0.5)),
    prompt_tokens=constant(12_345),
    new_tokens=Distribution((0.5, 2000.0), (0.9, 0.1)),
    generated_tokens=constant(250),
    env_s=Distribution((0.0, 0.0412), (0.5, 0.5)),
)
PLATFORM = Platform(by_tp=MappingProxyType({tp: platform_prior("qwen3-8b-h200").by_tp[tp] for tp in (1, 2)}))


def gpus(**counts: int) -> FleetState:
    events = [
        GpusJoined(
            gpus=tuple(
                Gpu(id=GpuId(f"{owner[0]}{index}"), node=NodeId(owner), owner=GpuOwner(owner)) for index in range(count)
            )
        )
        for owner, count in counts.items()
    ]
    return folded(FleetState(), events)


FLEET = gpus(reserved=4, training=2)
SITUATION = Situation(
    profile=Profile(workload=WORK, platform=PLATFORM),
    progress=fresh_batch(3, 4, batches=2),
    toggle=ToggleEstimate(prior_s=1.0),
    since_training_s=0.0,
)


def option(
    shape: str,
    close_s: float,
    error_s: float = 1.0,
    *,
    borrowed: int = 0,
    append: int = 0,
    why: Infeasible = Infeasible.NO,
) -> Option:
    target = Target(shape=parse_shape(shape), append_tokens=append)
    return Option(target=target, borrowed=borrowed, close_s=close_s, error_s=error_s, infeasible=why)


def text(decision: Decision, *, policy: Policy = PEARL, now_s: float = 0.0, state: FleetState = FLEET) -> list[str]:
    return decision_text(policy, state, SITUATION, decision, now_s).splitlines()


def section(lines: list[str], title: str) -> list[str]:
    """Lines below a title, until the next empty one."""
    begin = next(place for place, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((place for place in range(begin, len(lines)) if not lines[place]), len(lines))
    return lines[begin:end]


def plan_of(*groups: ActionGroup, cost_s: float = 75.0, d_worker: int = 2, d_role: int = 1) -> Plan:
    return Plan(
        kept=(),
        reassigned=MappingProxyType({}),
        woken=MappingProxyType({}),
        added=(),
        removed=(),
        returned=(),
        groups=groups,
        cost_s=cost_s,
        d_worker=d_worker,
        d_role=d_role,
    )


def group(*actions: Action, first: int = 0, gap: bool = False, kind: GroupKind = GroupKind.EXPAND) -> ActionGroup:
    steps = tuple(
        Step(index=first + place, action=action, after=(), undo=None if isinstance(action, Stop | GiveBack) else ())
        for place, action in enumerate(actions)
    )
    return ActionGroup(kind=kind, steps=steps, gap=gap)


def planned(*groups: ActionGroup) -> list[str]:
    """Rows of the plan, blanks between columns squeezed."""
    lines = section(text(Decision(reason=Reason.MOVED, plan=plan_of(*groups))), "plan")
    return [" | ".join(part.strip() for part in line.split("  ") if part.strip()) for line in lines]


W = WorkerId


class TestFacts:
    def test_by_hand(self) -> None:
        """Turns: 1 or 4, mean 2.5. New tokens: 0.9 of 0.5 and 0.1 of 2,000 are 200.45 on average."""
        assert text(Decision(reason=Reason.BEST))[:9] == [
            "fleet        4 reserved + 2 training GPUs; tp 1, 2",
            "engines      Qwen3-8B on NVIDIA H200 (prior)",
            "policy       pearl, predicted by pearl",
            "batch        12 of 12 trajectories to finish, 24 in flight",
            "turns        mean 2.5 (p50 1, p95 4)",
            "new tokens   mean 200 (p50 0.5, p95 2,000) per turn, 12,345 at the first",
            "generated    mean 250 (p50 250, p95 250) per turn",
            "environment  mean 0.0206 s (p50 0, p95 0.0412) per turn",
            "serving      nothing",
        ]

    def test_what_serves(self) -> None:
        lines = text(Decision(reason=Reason.BEST, current=option("2C", 12.34, 0.56)))
        assert "serving      2C: closes in 12.3 s +- 0.6 s" in lines

    def test_what_serves_and_cannot(self) -> None:
        broken = option("2C", math.inf, math.inf, why=Infeasible.KV_CAPACITY)
        lines = text(Decision(reason=Reason.NOTHING_FITS, current=broken))
        assert "serving      2C: never closes (kv capacity)" in lines

    def test_the_shape_that_a_policy_wants(self) -> None:
        static = policy_named("static", PolicyOptions(shape=parse_shape("1P3D@tp2")))
        lines = text(Decision(reason=Reason.BEST), policy=static)
        assert "policy       static (1P3D@tp2), predicted by pearl" in lines

    def test_all_owners(self) -> None:
        lines = text(Decision(reason=Reason.BEST), state=gpus(reserved=1, external=2, training=3))
        assert lines[0] == "fleet        1 reserved + 2 external + 3 training GPUs; tp 1, 2"


class TestShapes:
    def test_by_hand(self) -> None:
        chosen = option("1P3D", 10.0, 2.0, borrowed=2, append=256)
        serving = option("4C", 30.0, 4.0)
        never = option("2C@tp2", math.inf, math.inf, why=Infeasible.UNKNOWN_TP)
        decision = Decision(reason=Reason.MOVED, chosen=chosen, current=serving, considered=(never, serving, chosen))
        assert section(text(decision), "shapes considered, the best of each kind") == [
            "  shape             borrowed  closes in  +-",
            "  1P3D append<=256  2         10.0 s     2.0 s  chosen",
            "  4C                0         30.0 s     4.0 s  serving",
            "  2C@tp2            0         never             unknown tp",
        ]

    def test_what_stays_is_both(self) -> None:
        stays = option("4C", 30.0, 4.0)
        lines = section(text(Decision(reason=Reason.BEST, chosen=stays, current=stays, considered=(stays,))), "shapes")
        assert lines[1:] == ["  4C     0         30.0 s     4.0 s  chosen, serving"]

    def test_shapes_alike_but_for_append_prefill_or_borrowing(self) -> None:
        chosen = option("1P3D", 10.0, append=256)
        others = (option("1P3D", 11.0), option("1P3D", 12.0, append=256, borrowed=1))
        lines = section(text(Decision(reason=Reason.MOVED, chosen=chosen, considered=(*others, chosen))), "shapes")
        assert [line for line in lines if "chosen" in line] == [
            "  1P3D append<=256  0         10.0 s     1.0 s  chosen"
        ]

    def test_what_serves_is_shown_where_it_was_no_choice(self) -> None:
        serving = option("3C", math.inf, math.inf, why=Infeasible.KV_CAPACITY)
        found = Decision(reason=Reason.FORCED, current=serving, considered=(option("4C", 5.0),))
        lines = section(text(found), "shapes")
        assert lines[1:] == [
            "  4C     0         5.0 s      1.0 s",
            "  3C     0         never             serving, kv capacity",
        ]

    def test_nothing(self) -> None:
        lines = section(text(Decision(reason=Reason.NOTHING_FITS)), "shapes")
        assert lines == ["  none: nothing that the policy may choose fits on the GPUs"]

    @pytest.mark.parametrize(("count", "more"), [(SHOWN, None), (SHOWN + 1, 1), (SHOWN + 3, 3)])
    def test_no_more_than_fit_a_screen(self, count: int, more: int | None) -> None:
        considered = tuple(option(f"{index + 1}C", float(index)) for index in range(count))
        lines = section(text(Decision(reason=Reason.BEST, considered=considered)), "shapes")
        assert lines[SHOWN].split()[0] == f"{SHOWN}C"
        assert lines[SHOWN + 1 :] == ([] if more is None else [f"  ... and {more} more"])

    def test_the_chosen_and_the_serving_one_always_are(self) -> None:
        considered = tuple(option(f"{index + 1}C", float(index)) for index in range(SHOWN + 5))
        last, before = considered[-1], considered[-3]
        found = Decision(reason=Reason.GATED, chosen=last, current=before, considered=considered)
        lines = section(text(found), "shapes")
        assert [line.split()[0] for line in lines[SHOWN + 1 :]] == [f"{SHOWN + 3}C", f"{SHOWN + 5}C", "..."]
        assert lines[-1] == "  ... and 3 more"

    def test_so_is_what_a_gate_speaks_of(self) -> None:
        considered = tuple(option(f"{index + 1}C", float(index)) for index in range(SHOWN + 5))
        about = str(considered[-2].target)
        gate = Gated(gate="borrow", about=about, verdict=Verdict(passed=False, reason=GateReason.DUE_AT_ONCE))
        lines = section(text(Decision(reason=Reason.GATED, considered=considered, gates=(gate,))), "shapes")
        assert [line.split()[0] for line in lines[SHOWN + 1 :]] == [f"{SHOWN + 4}C", "..."]
        assert lines[-1] == "  ... and 4 more"


class TestGates:
    def test_by_hand(self) -> None:
        gates = (
            Gated(
                gate="hysteresis",
                about="2C",
                verdict=Verdict(
                    passed=False,
                    reason=GateReason.BELOW_THRESHOLD,
                    numbers=(("old_s", 999.94), ("new_s", 12345.6), ("gain_share", 0.012345)),
                ),
            ),
            Gated(
                gate="return",
                about="1 workers",
                verdict=Verdict(passed=True, reason=GateReason.DUE, numbers=(("old_s", math.inf), ("x", -1234.5))),
            ),
        )
        assert section(text(Decision(reason=Reason.GATED, gates=gates)), "gates") == [
            "  hysteresis  2C         refused  below_threshold  old_s 999.9, new_s 12,346, gain_share 0.01235",
            "  return      1 workers  passed   due              old_s inf, x -1,234",
        ]

    def test_a_thousand_is_whole(self) -> None:
        verdict = Verdict(passed=True, reason=GateReason.GAIN, numbers=(("a", 1000.0), ("b", 999.0)))
        decision = Decision(reason=Reason.MOVED, gates=(Gated(gate="g", about="x", verdict=verdict),))
        assert section(text(decision), "gates") == ["  g  x  passed  gain  a 1,000, b 999"]

    def test_none_were_asked(self) -> None:
        assert "gates" not in text(Decision(reason=Reason.BEST))


class TestOutcome:
    def test_by_hand(self) -> None:
        decision = Decision(
            reason=Reason.NO_PLAN,
            chosen=option("2C", 1234.56, 7.0, borrowed=1),
            refusal=PlanRefusal(reason=PlanRefusalReason.NO_ROOM, detail="here and there"),
            look_again_s=75.0,
            evaluated=1234,
        )
        assert section(text(decision, now_s=15.0), "decision") == [
            "  reason      no_plan: there is no way to the shape",
            "  shape       2C, 1 worker borrowed: closes in 1,234.6 s +- 7.0 s",
            "  no plan     no_room: here and there",
            "  look again  in 1 min 00 s",
            "  predicted   1,234 shapes",
        ]

    @pytest.mark.parametrize(
        ("before", "after", "told"),
        [
            (0, 256, "  append     at most 256 tokens from now on, without a plan"),
            (2048, 1, "  append     at most 1 token from now on, without a plan"),
            (256, 256, None),
        ],
    )
    def test_another_bound_of_append_prefill(self, before: int, after: int, told: str | None) -> None:
        current, chosen = option("1P1D", 9.0, append=before), option("1P1D", 8.0, append=after)
        lines = text(Decision(reason=Reason.GATED, current=current, chosen=chosen))
        assert [line for line in lines if line.startswith("  append ")] == ([] if told is None else [told])
        assert not [line for line in text(Decision(reason=Reason.MOVED, chosen=chosen)) if line.startswith("  append ")]

    def test_the_least(self) -> None:
        lines = section(text(Decision(reason=Reason.NOTHING_FITS, evaluated=1)), "decision")
        assert lines == [
            "  reason     nothing_fits: no shape on these GPUs can serve",
            "  shape      none",
            "  predicted  1 shape",
        ]

    def test_what_is_overdue_is_due_now(self) -> None:
        assert "  look again  in 0.0 s" in text(Decision(reason=Reason.BEST, look_again_s=5.0), now_s=9.0)

    @pytest.mark.parametrize("reason", list(Reason))
    def test_every_reason_is_told(self, reason: Reason) -> None:
        (line,) = [line for line in text(Decision(reason=reason)) if line.startswith("  reason ")]
        assert f"{reason.value}: " in line

    @pytest.mark.parametrize(
        ("chosen", "told"), [("1P3D@tp2", False), ("3D1P@tp2", False), ("1P2D@tp2", True), (None, True)]
    )
    def test_a_shape_that_was_not_to_be_had(self, chosen: str | None, told: bool) -> None:
        static = policy_named("static", PolicyOptions(shape=parse_shape("1P3D@tp2")))
        found = Decision(reason=Reason.FORCED, chosen=None if chosen is None else option(chosen, 5.0))
        lines = text(found, policy=static)
        assert ("  instead of  1P3D@tp2, which does not fit" in lines) is told


class TestPlan:
    def test_nothing_changes(self) -> None:
        assert not [line for line in text(Decision(reason=Reason.BEST)) if line.startswith("plan")]

    @pytest.mark.parametrize(
        ("workers", "roles", "title"),
        [
            (2, 1, "plan: 2 workers and 1 role change, 1 min 15 s of work in all"),
            (1, 0, "plan: 1 worker and 0 roles change, 1 min 15 s of work in all"),
        ],
    )
    def test_title(self, workers: int, roles: int, title: str) -> None:
        plan = plan_of(group(Drain(worker=W(0))), d_worker=workers, d_role=roles)
        assert title in text(Decision(reason=Reason.MOVED, plan=plan))

    def test_every_action(self) -> None:
        """In columns; a run of steps alike takes one row."""
        first = group(
            Drain(worker=W(0)),
            Drain(worker=W(1)),
            Drain(worker=W(4)),
            Stop(worker=W(0)),
            GiveBack(gpus=(GpuId("e0"), GpuId("e1")), to=GpuOwner.EXTERNAL),
            GiveBack(gpus=(GpuId("t0"),), to=GpuOwner.TRAINING),
            Sleep(worker=W(1)),
            kind=GroupKind.VACATE,
            gap=True,
        )
        second = group(
            Wake(worker=W(1), role=Role.DECODE),
            Wake(worker=W(2), role=Role.PREFILL),
            SetRole(worker=W(3), role=Role.COLOCATED),
            Start(worker=W(5), gpus=(GpuId("r0"), GpuId("r1")), role=Role.PREFILL),
            Start(worker=W(6), gpus=(GpuId("r2"),), role=Role.DECODE),
            Start(worker=W(7), gpus=(GpuId("r3"), GpuId("r4"), GpuId("r5")), role=Role.DECODE),
            LoadWeights(worker=W(5)),
            LoadWeights(worker=W(6)),
            Admit(workers=(W(1), W(2), W(3), W(5))),
            first=7,
        )
        assert planned(first, second) == [
            "group 1 | vacate | a role is not served for a while",
            "0-2 | drain | 0-1, 4",
            "3 | stop | 0 | cannot be undone",
            "4 | give back to external | e0, e1 | cannot be undone",
            "5 | give back to training | t0 | cannot be undone",
            "6 | put to sleep | 1",
            "group 2 | expand",
            "7 | wake as decode | 1",
            "8 | wake as prefill | 2",
            "9 | go on as colocated | 3",
            "10 | start as prefill | 5 on r0+r1",
            "11-12 | start as decode | 6 on r2, 7 on r3..r5",
            "13-14 | load weights | 5-6",
            "15 | admit together | 1-3, 5",
        ]

    def test_large_plans_stay_readable(self) -> None:
        started = [Start(worker=W(index), gpus=(GpuId(f"r{index}"),), role=Role.COLOCATED) for index in range(5000)]
        loaded = [LoadWeights(worker=W(index)) for index in range(5000)]
        given = GiveBack(gpus=tuple(GpuId(f"e{index}") for index in range(5000)), to=GpuOwner.EXTERNAL)
        admitted = Admit(workers=tuple(W(index) for index in range(0, 5000, 2)))
        lines = planned(group(*started, *loaded, given, admitted))
        assert max(map(len, lines)) < 200
        assert lines[1] == "0-4999 | start as colocated | " + ", ".join(
            [*(f"{index} on r{index}" for index in range(SEATS)), "... 4,994 more"]
        )
        assert lines[2] == "5000-9999 | load weights | 0-4999"
        assert lines[3].endswith(", e11, ... 4,988 more | cannot be undone")
        assert lines[4] == "10001 | admit together | 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... 2,488 more"

    @pytest.mark.parametrize(("count", "end"), [(SEATS, f"{SEATS - 1} on r{SEATS - 1}"), (SEATS + 1, "... 1 more")])
    def test_as_many_as_fit_are_named(self, count: int, end: str) -> None:
        started = [Start(worker=W(index), gpus=(GpuId(f"r{index}"),), role=Role.DECODE) for index in range(count)]
        assert planned(group(*started))[1].endswith(end)


class TestJson:
    def test_by_hand(self) -> None:
        never = option("2C@tp2", math.inf, math.inf, why=Infeasible.KV_CAPACITY)
        chosen = option("1P3D", 10.0, 2.0, borrowed=2, append=256)
        verdict = Verdict(passed=False, reason=GateReason.BELOW_COST, numbers=(("old_s", math.inf), ("new_s", 1.5)))
        step = Step(
            index=0,
            action=Start(worker=W(3), gpus=(GpuId("r0"), GpuId("r1")), role=Role.DECODE),
            after=(),
            undo=(Stop(worker=W(3)),),
        )
        back = Step(index=1, action=GiveBack(gpus=(GpuId("e0"),), to=GpuOwner.EXTERNAL), after=(0,), undo=None)
        given = ActionGroup(kind=GroupKind.VACATE, steps=(step, back), gap=True)
        decision = Decision(
            reason=Reason.MOVED,
            current=never,
            chosen=chosen,
            plan=plan_of(given),
            refusal=PlanRefusal(reason=PlanRefusalReason.NO_BLOCK, detail="why"),
            gates=(Gated(gate="borrow", about="x", verdict=verdict),),
            considered=(chosen,),
            evaluated=7,
            look_again_s=3.5,
        )
        chosen_json = {
            "shape": "1P3D",
            "append_tokens": 256,
            "borrowed": 2,
            "close_s": 10.0,
            "error_s": 2.0,
            "infeasible": None,
        }
        assert decision_json(PEARL, decision) == {
            "policy": "pearl",
            "predictor": "pearl",
            "reason": "moved",
            "current": {
                "shape": "2C@tp2",
                "append_tokens": 0,
                "borrowed": 0,
                "close_s": None,
                "error_s": None,
                "infeasible": "kv_capacity",
            },
            "chosen": chosen_json,
            "considered": [chosen_json],
            "evaluated": 7,
            "gates": [
                {
                    "gate": "borrow",
                    "about": "x",
                    "passed": False,
                    "reason": "below_cost",
                    "numbers": {"old_s": None, "new_s": 1.5},
                }
            ],
            "refusal": {"reason": "no_block", "detail": "why"},
            "plan": {
                "cost_s": 75.0,
                "d_worker": 2,
                "d_role": 1,
                "groups": [
                    {
                        "kind": "vacate",
                        "gap": True,
                        "steps": [
                            {
                                "index": 0,
                                "action": {"kind": "Start", "worker": 3, "gpus": ["r0", "r1"], "role": "decode"},
                                "after": [],
                                "undo": [{"kind": "Stop", "worker": 3}],
                            },
                            {
                                "index": 1,
                                "action": {"kind": "GiveBack", "gpus": ["e0"], "to": "external"},
                                "after": [0],
                                "undo": None,
                            },
                        ],
                    }
                ],
            },
            "look_again_s": 3.5,
            "called_off": [],
        }

    def test_the_least(self) -> None:
        found = decision_json(PEARL, Decision(reason=Reason.BAD_TIME))
        assert [name for name, value in found.items() if value is None] == [
            "current",
            "chosen",
            "refusal",
            "plan",
            "look_again_s",
        ]
        assert (found["considered"], found["gates"], found["evaluated"], found["called_off"]) == ([], [], 0, [])

    @pytest.mark.parametrize("moment", [Moment.TRAINING_FINISHED, Moment.TRAINING_BEGAN])
    def test_it_is_the_decision(self, moment: Moment) -> None:
        decision = decide(PEARL, FLEET, SITUATION, moment, 0.0)
        assert decision.plan is not None
        document = json.loads(json.dumps(decision_json(PEARL, decision), allow_nan=False))
        assert decision.chosen is not None
        assert document["chosen"]["shape"] == str(decision.chosen.target.shape)
        assert document["chosen"]["close_s"] == decision.chosen.close_s
        assert [each["error_s"] for each in document["considered"]] == [each.error_s for each in decision.considered]
        assert len(document["gates"]) == len(decision.gates) > 0
        steps = [step for part in document["plan"]["groups"] for step in part["steps"]]
        assert [step["index"] for step in steps] == list(range(len(steps)))
        assert document["plan"]["cost_s"] == decision.plan.cost_s

    def test_the_text_is_of_the_same_decision(self) -> None:
        decision = decide(PEARL, FLEET, replace(SITUATION, since_training_s=None), Moment.STARTED, 0.0)
        assert decision.chosen is not None
        lines = text(decision)
        assert next(line for line in lines if "  chosen" in line).split()[0] == str(decision.chosen.target.shape)
        assert f"  predicted  {decision.evaluated} shapes" in lines
