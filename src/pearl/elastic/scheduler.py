"""The elastic scheduler: every event takes the same path: what there is, what to do, how to get there, doing it.

Laws:

- *one at a time*: events are decided one after the other, each on the newest state; what a plan does meanwhile goes on beside;
- *training first*: when a batch is complete all borrowed GPUs come back, whatever was under way on them, and the trainer waits
  for that and for nothing else;
- *accounted*: each decision is journalled with what it saw, and what became of its plan.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from pearl.core.decide import decide
from pearl.core.decision import Decision, Moment, Situation
from pearl.core.policy import Policy
from pearl.core.progress import Progress
from pearl.core.state import Activity, ActivityChanged, FleetState, GpuOwner, Role, WorkerRemoved
from pearl.core.survival import LeaseHistory
from pearl.core.toggle import ToggleEstimate, observe
from pearl.elastic.executor import Executor, GroupOutcome, PlanOutcome
from pearl.elastic.hands import Hands
from pearl.elastic.journalled import decision_entry, outcome_entry
from pearl.elastic.tracker import Tracker
from pearl.errors import RunFailed
from pearl.pipeline.concurrency import Changed, GuardExpired, Nursery, guard
from pearl.pipeline.workers import Workers
from pearl.records.ids import WeightVersion, WorkerId

_log = logging.getLogger(__name__)

RETRY_S = 10.0
"""After a plan that failed; doubled for each further one in a row, up to `LONGEST_RETRY_S`."""
LONGEST_RETRY_S = 300.0
SHORTEST_S = 2.0
"""Between looking and looking again: a batch that takes longer than predicted is about to end again and again."""


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """Decides and carries out; also the hooks of the training loop."""

    policy: Policy
    workers: Workers
    hands: Hands
    executor: Executor
    tracker: Tracker
    nursery: Nursery
    progress: Callable[[], Progress]
    toggle: ToggleEstimate
    lease_prior_s: float
    start_s: float
    """Loop time at which the run began: what decisions call now counts from here."""
    return_timeout_s: float
    leases: LeaseHistory = field(default_factory=LeaseHistory)
    _moments: deque[Moment] = field(default_factory=deque)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: Changed = field(default_factory=Changed)
    _running: asyncio.Task[None] | None = None
    _stopped: bool = False
    _training: bool = False
    _began_s: float = 0.0
    """When the update under way began."""
    _finished_s: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _failures: int = 0
    """Plans in a row that failed."""
    _decisions: int = 0
    _last: str = "nothing was decided yet"
    """What the last decision, or the last failure, came down to."""
    _borrowed: bool = False
    """Whether rollout had training GPUs since the last update."""
    _waited_s: float = 0.0
    """What the trainer waited for them."""

    @property
    def now_s(self) -> float:
        """Since the run began."""
        return asyncio.get_running_loop().time() - self.start_s

    @property
    def state(self) -> FleetState:
        """The newest version."""
        return self.workers.state.snapshot

    def listen(self) -> None:
        """Hear of lost workers, and of what becomes of groups, from now on."""
        self.workers.on_lost, self.executor.on_group = self.lost, self._group_ended

    def begin(self) -> None:
        """Decide from now on."""
        self._running = self.nursery.spawn(self._run(), name="elastic: scheduler")
        self.tell(Moment.STARTED)

    async def stop(self) -> None:
        """Decide nothing more, and give up what is under way; processes that were told to end have ended."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._running is not None:
            self._running.cancel()
        await self.executor.stop()
        await self.hands.ended()

    def tell(self, moment: Moment) -> None:
        """There is something to decide about."""
        if self._stopped:
            return
        if moment not in self._moments:
            self._moments.append(moment)
        self._wake.set()

    def lost(self, worker: WorkerId, detail: str) -> None:
        """A worker died or hangs: its process, if there is one, is ended, and what was to bring it is called off."""
        if worker not in self.state.workers:
            return
        _log.warning("worker %d lost: %s", worker, detail)
        self.workers.state.submit(WorkerRemoved(worker=worker))
        self.hands.lost[worker] = None
        self.forget([worker])
        self.tell(Moment.WORKERS_CHANGED)

    def forget(self, workers: Collection[WorkerId]) -> None:
        """Workers that the state has no more: processes that are left end, and what was to bring them is called off."""
        for worker in workers:
            self.hands.end(worker).add_done_callback(lambda _: self._changed.notify())
        self.executor.forget(workers)

    async def serving(self) -> None:
        """Wait until a worker serves."""
        await self._changed.until(lambda: True if self.workers.router.workers else None)

    @property
    def last(self) -> str:
        """What the last decision came down to, for messages."""
        return self._last

    # -- the training loop's hooks --------------------------------------------------------------------------------------

    async def training_begin(self, version: WeightVersion) -> None:
        """All borrowed GPUs come back.

        Raises:
            RunFailed: they do not, within `return_timeout_s`.
        """
        began_s = self._began_s = self.now_s
        self._training, self.hands.loans.is_open = True, False
        self.tell(Moment.TRAINING_BEGAN)
        what = f"training step {version + 1}: borrowed GPUs"
        try:
            async with guard(self.return_timeout_s, what):
                await self._changed.until(lambda: True if self._all_back() else None)
                why_not = await self.hands.reclaim()
        except GuardExpired as error:
            raise RunFailed(f"{error}; on training GPUs are still {self._overlap_workers()}") from error
        if why_not is not None:
            raise RunFailed(f"{what}: {why_not}")
        self._waited_s = self.now_s - began_s
        self._set_training(Activity.ACTIVE)

    async def training_finished(self) -> None:
        """The profile follows what the step has shown; training GPUs may be borrowed."""
        self._set_training(Activity.INACTIVE)
        self._training, self._finished_s = False, self.now_s
        self.hands.loans.is_open = True
        self.toggle = observe(self.toggle, self._borrowed, self._waited_s)
        self._borrowed = False
        self.tracker.refit()
        self.tell(Moment.TRAINING_FINISHED)

    def _all_back(self) -> bool:
        # The moment itself has to be decided first: else something might still be about to wake.
        if self._moments or self._overlap_workers():
            return False
        training = [gpu.id for gpu in self.state.gpus.values() if gpu.owner is GpuOwner.TRAINING]
        return not self.hands.is_ending(training)

    def _overlap_workers(self) -> list[str]:
        """Those that are not asleep, or about to be otherwise."""
        state = self.executor.ahead(self.state)
        workers = [state.workers[slot] for slot in sorted(state.workers) if state.is_overlap(slot)]
        return [f"worker {w.id} ({w.activity.value})" for w in workers if w.activity is not Activity.INACTIVE]

    def _set_training(self, activity: Activity) -> None:
        for slot in sorted(self.state.workers):
            worker = self.state.workers[slot]
            if worker.role is Role.TRAINING and worker.activity is not activity:
                for each in (Activity.TRANSITIONING, activity):
                    if self.state.workers[slot].activity is not each:
                        self.workers.state.submit(ActivityChanged(worker=slot, activity=each))

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._moments:
                # Training waits for nobody.
                first = Moment.TRAINING_BEGAN if Moment.TRAINING_BEGAN in self._moments else self._moments[0]
                self._moments.remove(first)
                self._decide(first)
            self._changed.notify()

    def _decide(self, moment: Moment) -> None:
        situation, now_s = self.situation(), self.now_s
        state = self.executor.ahead(self.state)
        decision = decide(self.policy, state, situation, moment, now_s)
        number = self._decisions
        self._decisions += 1
        self._last = f"decision {number} ({moment.value}): {decision.reason.value}"
        ahead = [slot for slot in sorted(state.workers) if state.workers[slot] != self.state.workers.get(slot)]
        self.tracker.write(decision_entry(number, now_s, moment, self.state, situation, decision, ahead))
        if decision.called_off:
            self.executor.call_off(decision.called_off)
        if decision.plan is not None:
            self._borrowed = self._borrowed or bool(decision.plan.woken)
            self.executor.carry_out(decision.plan, lambda outcome: self._done(number, decision, outcome))
        else:
            self._settle(decision)
        self._look_again(decision.look_again_s)

    def situation(self) -> Situation:
        """What is known now beside the fleet's state."""
        since_s = None if self._training or self._finished_s is None else self.now_s - self._finished_s
        progress = self.progress()
        if progress.coming:
            under_way_s = self.now_s - self._began_s if self._training else 0.0
            left_s = max(0.0, self.tracker.update_s - under_way_s)
            progress = replace(progress, coming_s=left_s, pause_s=min(left_s, self.tracker.publish_s))
        return Situation(
            profile=self.tracker.profile,
            progress=progress,
            toggle=self.toggle,
            append_tokens=self.workers.router.append_tokens,
            leases=self.leases,
            lease_prior_s=self.lease_prior_s,
            training=self._training,
            since_training_s=since_s,
        )

    def _settle(self, decision: Decision) -> None:
        """A shape that is reached is used as it was predicted."""
        if decision.chosen is not None and not self.executor.busy:
            self.workers.router.append_tokens = decision.chosen.target.append_tokens

    def _done(self, number: int, decision: Decision, outcome: PlanOutcome) -> None:
        self.tracker.write(outcome_entry(number, self.now_s, outcome))
        if outcome.done:
            self._failures = 0
            self._settle(decision)
        if outcome.failure:
            after_s = min(LONGEST_RETRY_S, RETRY_S * 2**self._failures)
            self._failures += 1
            self._last = outcome.failure
            self._look_again(self.now_s + after_s)
        else:
            self.tell(Moment.WORKERS_CHANGED)
        self._changed.notify()

    def _group_ended(self, outcome: GroupOutcome) -> None:
        if outcome.called_off:
            # What it was called off for has been told before, when its workers were still in transition.
            self.tell(Moment.WORKERS_CHANGED)
        self._changed.notify()

    def _look_again(self, at_s: float | None) -> None:
        if at_s is None or self._stopped:
            return
        loop_s = self.start_s + max(at_s, self.now_s + SHORTEST_S)
        if self._timer is not None and not self._timer.cancelled() and self._timer.when() <= loop_s:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(loop_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.tell(Moment.TICK)
