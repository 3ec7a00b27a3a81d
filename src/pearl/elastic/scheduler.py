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
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.core.decide import decide
from pearl.core.decision import Decision, Moment, Situation
from pearl.core.policy import Policy
from pearl.core.progress import Progress
from pearl.core.state import Activity, ActivityChanged, FleetState, Role, WorkerRemoved
from pearl.core.survival import LeaseHistory
from pearl.core.toggle import ToggleEstimate, observe
from pearl.elastic.executor import Executor, PlanOutcome
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
    _training: bool = False
    _finished_s: float | None = None
    _timer: asyncio.TimerHandle | None = None
    _failures: int = 0
    _decisions: int = 0
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

    def begin(self) -> None:
        """Decide from now on."""
        self.workers.on_lost = self.lost
        self.nursery.spawn(self._run(), name="elastic: scheduler")
        self.tell(Moment.STARTED)

    def tell(self, moment: Moment) -> None:
        """There is something to decide about."""
        if moment not in self._moments:
            self._moments.append(moment)
        self._wake.set()

    def lost(self, worker: WorkerId, detail: str) -> None:
        """A worker died or hangs; its process, if it has one, is ended."""
        if worker not in self.state.workers:
            return
        _log.warning("worker %d lost: %s", worker, detail)
        self.workers.state.submit(WorkerRemoved(worker=worker))
        self.end(worker)
        self.tell(Moment.WORKERS_CHANGED)
        self._changed.notify()

    def end(self, worker: WorkerId) -> None:
        """End what is left of a worker's process, in the background."""
        self.nursery.spawn(self.workers.fleet.stop([worker], 0.0), name=f"elastic: end of worker {worker}")

    async def serving(self) -> None:
        """Wait until a worker serves."""
        await self._changed.until(lambda: True if self.workers.router.workers else None)

    # -- the training loop's hooks --------------------------------------------------------------------------------------

    async def training_begin(self, version: WeightVersion) -> None:
        """All borrowed GPUs come back.

        Raises:
            RunFailed: they do not, within `return_timeout_s`.
        """
        began_s = self.now_s
        self._training = True
        self.tell(Moment.TRAINING_BEGAN)
        try:
            async with guard(self.return_timeout_s, f"training step {version + 1}: borrowed GPUs"):
                await self._changed.until(lambda: True if self._all_back() else None)
                await self.hands.reclaim()
        except GuardExpired as error:
            raise RunFailed(str(error)) from error
        self._waited_s = self.now_s - began_s
        self._set_training(Activity.ACTIVE)

    async def training_finished(self) -> None:
        """The profile follows what the step has shown; training GPUs may be borrowed."""
        self._set_training(Activity.INACTIVE)
        self._training, self._finished_s = False, self.now_s
        self.toggle = observe(self.toggle, self._borrowed, self._waited_s)
        self._borrowed = False
        self.tracker.refit()
        self.tell(Moment.TRAINING_FINISHED)

    def _all_back(self) -> bool:
        state = self.state
        overlap = [worker for slot, worker in state.workers.items() if state.is_overlap(slot)]
        # The moment itself has to be decided first: else something might still be about to wake.
        return not self._moments and all(worker.activity is Activity.INACTIVE for worker in overlap)

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
        situation, state, now_s = self.situation(), self.state, self.now_s
        decision = decide(self.policy, state, situation, moment, now_s)
        number = self._decisions
        self._decisions += 1
        self.tracker.write(decision_entry(number, now_s, moment, state, situation, decision))
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
        return Situation(
            profile=self.tracker.profile,
            progress=self.progress(),
            toggle=self.toggle,
            append_tokens=self.workers.router.append_tokens,
            leases=self.leases,
            lease_prior_s=self.lease_prior_s,
            training=self._training,
            since_training_s=since_s,
        )

    def _settle(self, decision: Decision) -> None:
        """A shape that is reached is used as it was predicted."""
        if decision.chosen is not None:
            self.workers.router.append_tokens = decision.chosen.target.append_tokens

    def _done(self, number: int, decision: Decision, outcome: PlanOutcome) -> None:
        self.tracker.write(outcome_entry(number, self.now_s, outcome))
        if outcome.done:
            self._failures = 0
            self._settle(decision)
            self.tell(Moment.WORKERS_CHANGED)
        else:
            after_s = min(LONGEST_RETRY_S, RETRY_S * 2**self._failures)
            self._failures += 1
            self._look_again(self.now_s + after_s)
        self._changed.notify()

    def _look_again(self, at_s: float | None) -> None:
        if at_s is None:
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
