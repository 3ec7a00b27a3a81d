"""Plans for random fleets, targets and prices.

Invariants:

- a plan is made exactly where trying everything finds a way, costs what the cheapest way does, and changes no more;
- done in order, its steps fold into the state one by one and end at the target, with as many borrowed as asked for;
- it changes as many workers and roles as the paper's bound says, none more;
- it never names a worker that is on its way or trains, starts nobody on the trainer's GPUs and ends nobody there;
- GPUs stay, but for external ones that the target may not use;
- a step comes after those that it names; a group that is undone from anywhere leaves the workers as they were before it;
- service that was and will be there is never away during a group that is not marked;
- workers that wake and workers that start are in one group, or wait for each other, only where they need each other.
"""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._plans import ROLES, Instance, changes, least_cost_ms, optimal_fraction, random_instance
from pearl.core.actions import Admit, Drain, GiveBack, GroupKind, Start, Stop, perform
from pearl.core.plan import Plan, apply, plan
from pearl.core.schedule import Arrival, finishes_turns, parties
from pearl.core.seats import is_overlap, untouchable
from pearl.core.state import FleetState, GpuOwner, Role, Worker
from pearl.records.ids import WorkerId

# By seed: drawing each choice on its own takes far longer than planning.
instances = st.integers(0, 2**32 - 1).map(lambda seed: random_instance(random.Random(seed)))
few = settings(max_examples=120)


def made(instance: Instance) -> Plan | None:
    result = plan(instance.state, instance.request, instance.costs)
    return result if isinstance(result, Plan) else None


def rollout(state: FleetState) -> tuple[Worker, ...]:
    """Workers that serve and that a plan may touch."""
    return tuple(worker for worker in state.active() if worker.role is not Role.TRAINING)


def done(state: FleetState, change: Plan) -> FleetState:
    after = apply(state, change)
    assert isinstance(after, FleetState), after
    return after


@few
@given(instances)
def test_as_cheap_as_the_cheapest(instance: Instance) -> None:
    change, least = made(instance), least_cost_ms(instance)
    assert (change is None) is (least is None)
    if change is not None:
        assert (round(1000 * change.cost_s), changes(change)) == least


@few
@given(instances)
def test_the_target_is_reached(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    after = done(instance.state, change)
    serving = rollout(after)
    wanted = Counter({(pool.role, pool.tp): pool.workers for pool in instance.request.shape.pools})
    assert Counter((worker.role, len(worker.gpus)) for worker in serving) == wanted
    assert sum(is_overlap(after, worker) for worker in serving) == instance.request.borrowed
    allowed = instance.request.usable | instance.request.lendable
    assert all(allowed.issuperset(worker.gpus) for worker in serving)
    assert apply(instance.state, change) == after


@few
@given(instances)
def test_the_papers_bound(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    before = {worker.id: worker for worker in rollout(instance.state)}
    after = {worker.id: worker for worker in rollout(done(instance.state, change))}
    both = before.keys() & after.keys()
    assert change.d_worker == len(before.keys() ^ after.keys())
    assert change.d_role == len(change.reassigned)
    assert change.reassigned == {w: after[w].role for w in sorted(both) if before[w].role is not after[w].role}
    assert set(change.kept) == both - change.reassigned.keys()
    if len({len(worker.gpus) for worker in after.values()}) == 1:
        source = Counter(before[slot].role for slot in both)
        target = Counter(worker.role for worker in after.values())
        assert change.d_role == sum(count - min(count, target[role]) for role, count in source.items())


@few
@given(instances)
def test_nobody_is_touched_who_must_not_be(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    state, after = instance.state, done(instance.state, change)
    for slot, worker in state.workers.items():
        if untouchable(worker):
            assert after.workers[slot] == worker
    actions = [step.action for group in change.groups for step in group.steps]
    named = {getattr(action, "worker", None) for action in actions}
    named |= {slot for action in actions if isinstance(action, Admit) for slot in action.workers}
    assert not any(untouchable(worker) for slot, worker in state.workers.items() if slot in named)
    for action in actions:
        if isinstance(action, Stop):
            assert not is_overlap(state, state.workers[action.worker])
        if isinstance(action, Start):
            assert all(state.gpus[gpu].owner is not GpuOwner.TRAINING for gpu in action.gpus)


@few
@given(instances)
def test_gpus_stay_but_for_those_that_leave(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    state, after = instance.state, done(instance.state, change)
    given_back = [step.action for group in change.groups for step in group.steps if isinstance(step.action, GiveBack)]
    to_source = {gpu for action in given_back if action.to is GpuOwner.EXTERNAL for gpu in action.gpus}
    assert after.gpus.keys() == state.gpus.keys() - to_source
    assert not to_source & instance.request.usable
    assert all(state.gpus[gpu].owner is GpuOwner.EXTERNAL for gpu in to_source)
    to_training = {gpu for action in given_back if action.to is GpuOwner.TRAINING for gpu in action.gpus}
    assert all(state.gpus[gpu].owner is GpuOwner.TRAINING for gpu in to_training)
    assert not any(to_training.intersection(worker.gpus) for worker in rollout(after))


@few
@given(instances)
def test_every_prefix_folds_and_every_group_can_be_undone_until_it_no_longer_can(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    state, written = instance.state, 0
    for group in change.groups:
        for count in range(len(group.steps) + 1):
            partly = perform(state, [step.action for step in group.steps[:count]])
            assert isinstance(partly, FleetState), partly
            undo = group.undo(count)
            assert (undo is None) is any(isinstance(s.action, Stop | GiveBack) for s in group.steps[:count])
            if undo is not None:
                restored = perform(partly, undo)
                assert isinstance(restored, FleetState), restored
                assert (restored.workers, restored.gpus) == (state.workers, state.gpus)
        for step in group.steps:
            assert step.index == written
            assert all(0 <= index < step.index for index in step.after)
            written += 1
        state = partly


@few
@given(instances)
def test_service_is_kept_up_where_no_gap_is_marked(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return

    def roles(state: FleetState) -> Counter[Role]:
        return Counter(worker.role for worker in rollout(state))

    state, target = instance.state, roles(done(instance.state, change))
    kept = [role for role, count in roles(state).items() if count and target[role]]
    turns = finishes_turns(roles(state)) and finishes_turns(target)
    for group in change.groups:
        away = False
        for step in group.steps:
            after = perform(state, [step.action])
            assert isinstance(after, FleetState), after
            state = after
            away = away or any(not roles(state)[role] for role in kept) or (turns and not finishes_turns(roles(state)))
        # Admission comes last in a group, so a gap that it ends was there before it.
        assert group.gap or not away


@st.composite
def arriving(draw: st.DrawFn) -> tuple[list[Arrival], set[Role]]:
    kinds = draw(st.lists(st.tuples(st.sampled_from(ROLES), st.booleans()), max_size=6))
    coming = [Arrival(worker=WorkerId(i), gpus=(), role=role, wakes=wakes) for i, (role, wakes) in enumerate(kinds)]
    return coming, draw(st.sets(st.sampled_from(ROLES)))


@given(arriving())
def test_who_comes_together_needs_each_other(drawn: tuple[list[Arrival], set[Role]]) -> None:
    coming, there = drawn
    made = list(parties(coming, there))
    assert sorted((each for party in made for each in party), key=lambda each: each.worker) == coming
    other = {Role.PREFILL: Role.DECODE, Role.DECODE: Role.PREFILL, Role.COLOCATED: Role.COLOCATED}
    every, serving, started = {each.role for each in coming}, set(there), False
    for party in made:
        waking, starting = ({each.role for each in party if each.wakes is wakes} for wakes in (True, False))
        if waking and starting:
            # One side prefills, the other decodes, and nobody else does either.
            assert waking == {other[role] for role in starting}
            assert len(waking) == 1
            assert not (waking | starting) & (serving | {Role.COLOCATED})
        for role in waking if started else ():
            assert other[role] not in there | {each.role for each in coming if each.wakes}
        serving |= waking | starting
        started = started or bool(starting)
        # Whoever is admitted finds the other one there, unless it never comes.
        assert all(other[role] in serving or other[role] not in every for role in waking | starting)


@few
@given(instances)
def test_plans_keep_apart_who_wakes_and_who_starts(instance: Instance) -> None:
    change = made(instance)
    if change is None:
        return
    steps = {step.index: step for group in change.groups for step in group.steps}
    needed: dict[int, set[int]] = {}
    for index in sorted(steps):
        # What makes way may have to wait until others serve.
        after = () if isinstance(steps[index].action, Drain) else steps[index].after
        needed[index] = {index}.union(*(needed[each] for each in after))
    starting = {each.role for each in change.added}
    for step in steps.values():
        if isinstance(step.action, Admit) and any(slot in change.woken for slot in step.action.workers):
            hangs_on = any(isinstance(steps[index].action, Start) for index in needed[step.index])
            roles = {change.woken[slot] for slot in step.action.workers if slot in change.woken}
            assert not hangs_on or (len(roles) == 1 and roles != {Role.COLOCATED} and starting - roles)
    for group in change.groups:
        if group.kind is GroupKind.EXPAND:
            assert len([step for step in group.steps if isinstance(step.action, Admit)]) == 1
            assert isinstance(group.steps[-1].action, Admit)


def test_the_benchmark_counts_optimal_plans() -> None:
    assert optimal_fraction(40, seed=1) == 1.0


@few
@given(st.integers(0, 10_000))
def test_plans_are_the_same_each_time_and_in_whatever_order_the_state_lists_its_workers(seed: int) -> None:
    instance = random_instance(random.Random(seed))
    state = instance.state
    turned = FleetState(
        version=state.version,
        gpus=dict(reversed(state.gpus.items())),
        workers=dict(reversed(state.workers.items())),
        slots=dict(reversed(state.slots.items())),
    )
    assert plan(turned, instance.request, instance.costs) == plan(state, instance.request, instance.costs)
