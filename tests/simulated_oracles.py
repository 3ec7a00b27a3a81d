"""What must hold of every run of the simulated world, whatever happened in it, judged from outside.

From journal, the batches that the trainer was given, the environments that were asked for, and the scripts of the workload:
never from counters of the code that is judged. Of every run:

- *once*: what began ended, exactly once: trajectories, groups, requests, environments, workers, tasks, time-outs;
- *whole*: every turn read and generated what its script says, however often it was interrupted, moved or begun again;
- *trained once*: no trajectory, group or token twice, only what ended well, and all that it generated;
- *fresh*: no token staler than `rollout.max_staleness`, none older than its group's admission;
- *apart*: nobody on the trainer's GPUs while it trains, no GPU with two workers, nobody on GPUs that are gone;
- *back in time*: the trainer waits for borrowed GPUs no longer than `return_bound_s`, and who is on GPUs that go has left
  them before, given `NOTICE_S`;
- *awake*: nothing stalls but what the schedule makes stall;
- *over*: the run ends, or fails for a reason that the schedule has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from pearl.core.state import Role
from pearl.records.journal import GroupEntry, StateEntry, TrajectoryEntry, TurnEntry
from pearl.records.training import TrainingBatch, TrainingSample
from pearl.records.trajectory import GroupStatus, TrajectoryStatus
from pearl.sim.faults import FaultKind
from pearl.sim.script import Script
from pearl.sim.workload import truncated
from tests.simulated_world import Run

NOTICE_S = 5.0
"""In which a worker can leave: a plan under way is called off, requests end at the next token, and the worker ends."""

TRAINABLE = frozenset(status.value for status in TrajectoryStatus if status.trainable)


def findings(run: Run) -> list[str]:
    """What is wrong with a run that has been played; nothing, if all is well."""
    return [
        *run.watch.wrong,
        *ends(run),
        *turns(run),
        *training(run),
        *state(run),
        *waits(run),
        *over(run),
    ]


def ends(run: Run) -> Iterator[str]:
    """*once*."""
    entries = run.of(TrajectoryEntry)
    yield from (f"{name} ended {count} times" for name, count in _again(entry.trajectory for entry in entries))
    groups = run.of(GroupEntry)
    yield from (f"group {name} ended {count} times" for name, count in _again(entry.group for entry in groups))
    ended = Counter(entry.group for entry in entries)
    for entry in groups:
        if ended[entry.group] != entry.attempts:
            yield f"group {entry.group}: {entry.attempts} attempts began, {ended[entry.group]} ended"
    unended = sorted(set(ended) - {entry.group for entry in groups})
    if unended:
        yield f"groups without an end: {unended}"
    asked = {f"g{task.rpartition('#')[2]}": count for task, count in run.watch.opened.items()}
    for group, count in asked.items():
        if count > ended[group]:
            yield f"group {group}: {count} environments were asked for, {ended[group]} trajectories ended"


def _again(names: Iterable[str]) -> list[tuple[str, int]]:
    return [(name, count) for name, count in Counter(names).items() if count > 1]


def script_for(run: Run, trajectory: str) -> Script | None:
    """What a trajectory is to play under the limits of its run; None: nothing of it fits."""
    group, _, attempt = trajectory.removeprefix("g").partition(".")
    limits = run.recipe.rollout
    script = run.conditions.workload.script(int(group), int(attempt))
    return truncated(script, max_turns=limits.max_turns, max_context_tokens=limits.max_context_tokens)


def turns(run: Run) -> Iterator[str]:
    """*whole*."""
    played: dict[str, list[TurnEntry]] = {}
    for turn in run.of(TurnEntry):
        played.setdefault(turn.trajectory, []).append(turn)
    for end in run.of(TrajectoryEntry):
        mine = played.pop(end.trajectory, [])
        if [turn.turn for turn in mine] != list(range(end.turns)):
            yield f"{end.trajectory}: turns {[turn.turn for turn in mine]} of {end.turns}"
        if sum(turn.generated for turn in mine) != end.generated:
            yield f"{end.trajectory}: {end.generated} tokens, its turns have {[turn.generated for turn in mine]}"
        script = script_for(run, end.trajectory)
        want = [(turn.input_tokens, turn.output_tokens) for turn in script.turns] if script else []
        got = [(turn.prompt, turn.generated) for turn in mine]
        if got != (want if end.status in TRAINABLE else want[: len(got)]):
            yield f"{end.trajectory} ({end.status}): played {got}, its script is {want}"
        for turn in mine:
            if sum(tokens for _, tokens in turn.versions) != turn.generated:
                yield f"{end.trajectory}: turn {turn.turn}: {turn.generated} tokens, of versions {turn.versions}"
    if played:
        yield f"turns of trajectories without an end: {sorted(played)}"


def training(run: Run) -> Iterator[str]:
    """*trained once*, *fresh*."""
    batches = run.watch.batches
    samples = [sample for batch in batches for sample in batch.samples]
    yield from (f"{name} was trained {count} times" for name, count in _again(sample.trajectory for sample in samples))
    groups = (group for batch in batches for group in batch.groups)
    yield from (f"group {name} was trained {count} times" for name, count in _again(groups))
    for sample in samples:
        yield from _sample(run, sample)
    for step, batch in enumerate(batches):
        yield from _batch(run, step, batch)
    trained = [sum(len(sample.logprobs) for sample in batch.samples) for batch in batches[: len(run.steps)]]
    if [step.trained_tokens for step in run.steps] != trained:
        yield "the journal has other trained tokens than the trainer was given"


def _sample(run: Run, sample: TrainingSample) -> Iterator[str]:
    """It ended well, and all that it generated is trained."""
    name = sample.trajectory
    statuses = [entry.status for entry in run.of(TrajectoryEntry) if entry.trajectory == name]
    if not statuses or not TRAINABLE.issuperset(statuses):
        yield f"{name} was trained, and ended as {statuses}"
        return
    of_group = [entry.status for entry in run.of(GroupEntry) if entry.group == sample.group]
    if set(of_group) != {GroupStatus.COMPLETED.value}:
        yield f"{name} was trained, its group ended as {of_group}"
    script = script_for(run, name)
    spans = (
        tuple((at, at + turn.output_tokens) for at, turn in zip(script.starts, script.turns, strict=True))
        if script
        else ()
    )
    total = spans[-1][1] if spans else 0
    if sample.trained != spans or len(sample.token_ids) != total:
        yield f"{name}: trained {sample.trained} of {len(sample.token_ids)}, generated were {spans} of {total}"
    if not len(sample.logprobs) == len(sample.versions) == sum(stop - start for start, stop in spans):
        yield f"{name}: {len(sample.logprobs)} log-probabilities, {len(sample.versions)} versions for {spans}"


def _batch(run: Run, step: int, batch: TrainingBatch) -> Iterator[str]:
    """Whole groups, as many as there are to be, of tokens that are not stale."""
    limits = run.recipe.rollout
    admitted = {entry.group: entry.admitted_version for entry in run.of(GroupEntry)}
    if batch.version != step:
        yield f"step {step} trained version {batch.version}"
    for sample in batch.samples:
        for part in sample.versions.runs:
            if not 0 <= batch.version - part.version <= limits.max_staleness:
                yield f"{sample.trajectory}: version {part.version} in the step of {batch.version}"
            if part.version < admitted.get(sample.group, 0):
                yield f"{sample.trajectory}: version {part.version} is older than its group"
    by_group = Counter(sample.group for sample in batch.samples)
    if sorted(by_group.values()) != [limits.group_size] * limits.groups_per_batch:
        yield f"step {step}: trained groups of {dict(by_group)}"


def state(run: Run) -> Iterator[str]:
    """The state of the fleet takes what it is told, and ends without workers."""
    entries = run.of(StateEntry)
    yield from (f"state: {entry.event} refused: {entry.refused}" for entry in entries if entry.refused)
    if [entry.state_version for entry in entries if not entry.refused] != list(
        range(1, 1 + sum(not entry.refused for entry in entries))
    ):
        yield "a version of the fleet state is missing"
    for workers in run.world.workers:
        left = [w.id for w in workers.state.snapshot.workers.values() if w.role is not Role.TRAINING]
        if left and run.failure is run.error is None:
            yield f"the state ends with workers {left}"


def return_bound_s(run: Run) -> float:
    """Longest that the trainer may wait: whatever is under way on its GPUs ends, then sleeps, then its state moves back.

    A start or a wake under way is not cut short by everybody; a worker that hangs is asked in vain first.
    """
    costs, times = run.recipe.platform, run.conditions.times
    change_s = (
        (costs.return_s or 0.0) + (costs.stop_s or 0.0) + (costs.role_change_s or 0.0) + (costs.activate_s or 0.0)
    )
    bound_s = change_s + times.lend_s + 2 * times.reclaim_s + (costs.start_s or 0.0) + 10.0
    if any(fault.kind is FaultKind.HANG for _, fault in run.applied):
        bound_s += 2 * run.world.control.options.change_timeout_s
    return bound_s


def waits(run: Run) -> Iterator[str]:
    """*awake*, *back in time*, and nothing left behind."""
    yield from (f"stall: {stall}" for stall, why in run.watch.stalls if not why)
    late = [f"{seconds:.1f}" for seconds in run.watch.returns_s if seconds > return_bound_s(run)]
    if late:
        yield f"the trainer waited {', '.join(late)} s for its GPUs, at most {return_bound_s(run):.1f} s"
    for notice_s, who in run.watch.surprised:
        if notice_s >= NOTICE_S and who.endswith("[] hang"):
            yield f"GPUs went {notice_s:.1f} s after their notice, with workers: {who}"
    if run.failure is run.error is None:
        yield from run.watch.at_end


def over(run: Run) -> Iterator[str]:
    """*over*."""
    if run.error is not None:
        yield f"{type(run.error).__name__}: {run.error}"
        return
    done = len(run.watch.batches)
    if run.failure is None:
        if done != run.recipe.run.steps:
            yield f"{done} steps of {run.recipe.run.steps}"
        return
    if not explained(run):
        yield f"failed: {run.failure}"


def explained(run: Run) -> bool:
    """Whether the schedule has what the run says that it failed of."""
    text, fleet = str(run.failure), run.recipe.fleet
    kinds = {fault.kind for _, fault in run.applied}
    if text.startswith("rollout workers on training GPUs: worker"):
        return bool(kinds & {FaultKind.FAIL_START, FaultKind.KILL})
    if text.startswith("no rollout worker serves within"):
        return not fleet.reserved_gpus and not run.world.control.options.policy.external
    return False
