"""The router: serves turns on workers and keeps every generated token through whatever happens to them.

Laws:

- *sticky*: a turn goes to the worker that holds the trajectory's prefix, unless that one has `STICKY_SLACK` requests more
  than the least loaded; otherwise to the worker with the least outstanding work, ties to the lowest slot.
- *fit*: never to a worker that does not serve, or whose weights are older than the turn's `min_version`; and not back to
  one that failed this turn while another serves, because a worker that fails fast always has the least to do.
- *kept*: when a worker leaves or dies, what it delivered stays and the turn is continued elsewhere from there.
- *bounded*: a turn is attempted on at most `max_turn_attempts` workers; the caller bounds its whole wait.
- *alive*: when a turn is given up and its worker said nothing, about any request, for `silence_s` or more, the worker is
  lost: one that answers every call and generates nothing is otherwise found by nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pearl.errors import EngineError, WeightsError, WorkerLost
from pearl.pipeline.concurrency import Changed, GuardExpired, Nursery, guard
from pearl.ports import Engine
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, Tokens
from pearl.records.training import LoadMode, Manifest
from pearl.records.turn import Chunk, Completion, EndReason, Sampling, TurnRequest, Versions

_log = logging.getLogger(__name__)

STICKY_SLACK = 16
"""Requests that a prefix is worth: below it, moving a trajectory costs a prefill and balances little."""

CONTROL_TIMEOUT_S = 30.0
"""Bound on submit, interrupt and release: queue operations that take milliseconds on a healthy worker."""

_NOWHERE = WorkerId(-1)
_NO_LOGPROBS = Floats()
_NO_VERSIONS = Versions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnJob:
    """A turn to generate, wherever."""

    trajectory: TrajectoryId
    turn: int
    context: Tokens
    sampling: Sampling
    max_new_tokens: int
    min_version: WeightVersion


@dataclass(slots=True)
class _Pending:
    """One request on one worker."""

    start: int
    began_s: float
    ended: asyncio.Future[EndReason]
    token_ids: Tokens
    logprobs: Floats = _NO_LOGPROBS
    versions: Versions = _NO_VERSIONS
    computed: int = 0
    error: str = ""
    working: bool = True
    """Whether the worker may still generate for it."""

    def take(self, chunk: Chunk) -> None:
        """Append a chunk; a duplicate is dropped, a gap or an overlap ends the request as failed.

        A turn is one or a few chunks, so appending copies little.
        """
        expected = self.start + len(self.token_ids)
        if chunk.start > expected or chunk.start < expected < chunk.start + len(chunk.token_ids):
            self.error = f"a chunk begins at token {chunk.start}, want {expected}: tokens were lost on the way"
            self.working = chunk.end is None
            self.finish(EndReason.FAILED)
            return
        if chunk.start == expected:
            self.token_ids = self.token_ids + chunk.token_ids
            self.logprobs = self.logprobs + chunk.logprobs
            self.versions = self.versions + chunk.versions
        self.computed = max(self.computed, chunk.computed_prompt_tokens)
        if chunk.end is not None:
            self.error = chunk.error or ""
            self.working = False
            self.finish(chunk.end)

    def finish(self, reason: EndReason) -> None:
        """End it, once."""
        if not self.ended.done():
            self.ended.set_result(reason)


@dataclass(slots=True)
class _Worker:
    """A worker that is admitted."""

    id: WorkerId
    engine: Engine
    version: WeightVersion
    inflight: dict[RequestId, _Pending] = field(default_factory=dict)
    outbox: list[TurnRequest] = field(default_factory=list)
    interrupts: list[RequestId] = field(default_factory=list)
    releases: list[TrajectoryId] = field(default_factory=list)
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    heard_s: float = 0.0
    """When its event stream last said something."""
    lost: bool = False


@dataclass(slots=True)
class RouterCounts:
    """What happened to turns, for reports."""

    turns: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    continued: int = 0
    """Turns that went on with another request after an interruption or a loss."""
    worker_losses: int = 0
    failed_requests: int = 0


class Router:
    """Sends turns to workers; one per run."""

    def __init__(
        self,
        nursery: Nursery,
        max_turn_attempts: int,
        on_lost: Callable[[WorkerId, str], None],
        *,
        load_timeout_s: float = 600.0,
        silence_s: float = 600.0,
    ) -> None:
        self._nursery = nursery
        self._max_attempts = max_turn_attempts
        self._on_lost = on_lost
        self._load_timeout_s = load_timeout_s
        self._silence_s = silence_s
        self._workers: dict[WorkerId, _Worker] = {}
        self._homes: dict[TrajectoryId, WorkerId] = {}
        self._changed = Changed()
        self._requests = 0
        self.counts = RouterCounts()

    # --- workers -------------------------------------------------------------------------------------------------

    def admit(self, worker: WorkerId, engine: Engine, version: WeightVersion) -> None:
        """Let a started worker, whose weights are loaded, serve."""
        if worker in self._workers:
            self._withdraw(worker)
        admitted = _Worker(id=worker, engine=engine, version=version)
        self._workers[worker] = admitted
        self._nursery.spawn(self._pump(admitted), name=f"router: events of worker {worker}")
        self._nursery.spawn(self._send(admitted), name=f"router: requests to worker {worker}")
        self._changed.notify()

    def retire(self, worker: WorkerId, detail: str) -> None:
        """Forget a worker that is gone; its turns go on elsewhere. Repeating it does nothing."""
        if worker not in self._workers:
            return
        self._withdraw(worker)
        self.counts.worker_losses += 1
        _log.warning("worker %d lost: %s", worker, detail)

    def close(self) -> None:
        """Forget all workers, because they are about to be stopped: that is no loss."""
        for worker in self.workers:
            self._withdraw(worker)

    def _withdraw(self, worker: WorkerId) -> None:
        gone = self._workers.pop(worker)
        gone.lost = True
        gone.wake.set()
        self._homes = {t: w for t, w in self._homes.items() if w != worker}
        for pending in gone.inflight.values():
            pending.finish(EndReason.INTERRUPTED)
        self._changed.notify()

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Serving workers, in slot order."""
        return tuple(sorted(self._workers))

    @property
    def served_version(self) -> WeightVersion | None:
        """The oldest weights that a serving worker holds; None when nobody serves."""
        return min((worker.version for worker in self._workers.values()), default=None)

    def engine(self, worker: WorkerId) -> Engine | None:
        """The engine of a serving worker."""
        found = self._workers.get(worker)
        return found.engine if found else None

    async def load(self, manifest: Manifest, mode: LoadMode) -> None:
        """Load new weights into every serving worker; one that cannot is given up."""
        loads = [self._load(self._workers[worker], manifest, mode) for worker in self.workers]
        await asyncio.gather(*loads)

    async def _load(self, worker: _Worker, manifest: Manifest, mode: LoadMode) -> None:
        try:
            async with guard(self._load_timeout_s, f"worker {worker.id}: loading weights {manifest.version}"):
                await worker.engine.load(manifest, mode)
        except (WorkerLost, WeightsError, GuardExpired) as error:
            self._lose(worker, f"loading weights {manifest.version}: {error}")
            return
        worker.version = max(worker.version, manifest.version)
        self._changed.notify()

    # --- turns ---------------------------------------------------------------------------------------------------

    async def generate(self, job: TurnJob) -> Completion:
        """Generate one turn.

        Raises:
            EngineError: no worker could serve it within the bound on attempts.
        """
        token_ids = job.context[:0]
        logprobs, versions = _NO_LOGPROBS, _NO_VERSIONS
        workers: list[WorkerId] = []
        failed: dict[WorkerId, None] = {}
        computed = 0
        for _ in range(self._max_attempts):
            worker = await self._changed.until(lambda: self._pick(job, failed))
            pending, end = await self._attempt(worker, job, token_ids)
            workers.append(worker.id)
            token_ids = token_ids + pending.token_ids
            logprobs, versions = logprobs + pending.logprobs, versions + pending.versions
            computed += pending.computed
            if end in (EndReason.STOP, EndReason.LENGTH):
                return self._complete(token_ids, logprobs, versions, end, workers, computed)
            if self._is_complete(job, token_ids):
                end = EndReason.LENGTH
                return self._complete(token_ids, logprobs, versions, end, workers, computed)
            self.counts.continued += 1
            if end is EndReason.FAILED:
                self.counts.failed_requests += 1
                failed[worker.id] = None
                _log.warning("turn %s/%d failed on worker %d: %s", job.trajectory, job.turn, worker.id, pending.error)
        raise EngineError(
            f"trajectory {job.trajectory}, turn {job.turn}: given up after {self._max_attempts} attempts on workers "
            f"{workers}: {pending.error or 'each was interrupted'}"
        )

    def release(self, trajectory: TrajectoryId) -> None:
        """Let the worker that holds a trajectory's prefix forget it."""
        home = self._workers.get(self._homes.pop(trajectory, _NOWHERE))
        if home is not None:
            home.releases.append(trajectory)
            home.wake.set()

    def _move(self, trajectory: TrajectoryId, worker: WorkerId) -> None:
        if self._homes.get(trajectory, worker) != worker:
            self.release(trajectory)
        self._homes[trajectory] = worker

    @staticmethod
    def _is_complete(job: TurnJob, token_ids: Tokens) -> bool:
        # A worker may be lost after its last token and before its end was told.
        return len(token_ids) >= job.max_new_tokens

    def _complete(
        self,
        token_ids: Tokens,
        logprobs: Floats,
        versions: Versions,
        end: EndReason,
        workers: list[WorkerId],
        computed: int,
    ) -> Completion:
        self.counts.turns += 1
        self.counts.generated_tokens += len(token_ids)
        self.counts.computed_prompt_tokens += computed
        return Completion(
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            end=end,
            workers=tuple(workers),
            computed_prompt_tokens=computed,
        )

    def _pick(self, job: TurnJob, failed: Mapping[WorkerId, None]) -> _Worker | None:
        best: _Worker | None = None
        best_key = (False, 0, _NOWHERE)
        for worker in self._workers.values():
            if worker.version < job.min_version:
                continue
            key = (worker.id in failed, len(worker.inflight), worker.id)
            if best is None or key < best_key:
                best, best_key = worker, key
        if best is None:
            return None
        home = self._workers.get(self._homes.get(job.trajectory, _NOWHERE))
        if home is None or home.version < job.min_version or home.id in failed:
            return best
        return home if len(home.inflight) <= len(best.inflight) + STICKY_SLACK else best

    async def _attempt(self, worker: _Worker, job: TurnJob, done: Tokens) -> tuple[_Pending, EndReason]:
        self._requests += 1
        request = TurnRequest(
            id=RequestId(f"{job.trajectory}/{job.turn}#{self._requests}"),
            trajectory=job.trajectory,
            turn=job.turn,
            context=job.context + done,
            sampling=job.sampling,
            max_new_tokens=job.max_new_tokens - len(done),
            min_version=job.min_version,
        )
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[EndReason] = loop.create_future()
        pending = _Pending(start=len(request.context), began_s=loop.time(), ended=ended, token_ids=job.context[:0])
        self._move(job.trajectory, worker.id)
        worker.inflight[request.id] = pending
        worker.outbox.append(request)
        worker.wake.set()
        try:
            return pending, await ended
        except asyncio.CancelledError:
            self._lose_if_silent(worker, pending, loop.time())
            raise
        finally:
            worker.inflight.pop(request.id, None)
            if pending.working:
                worker.interrupts.append(request.id)
                worker.wake.set()

    # --- one worker's streams ------------------------------------------------------------------------------------

    async def _pump(self, worker: _Worker) -> None:
        try:
            async for chunks in worker.engine.events():
                worker.heard_s = asyncio.get_running_loop().time()
                for chunk in chunks:
                    pending = worker.inflight.get(chunk.request)
                    if pending is not None:
                        pending.take(chunk)
                if worker.lost:
                    return
        except WorkerLost as error:
            self._lose(worker, str(error))
            return
        self._lose(worker, "its event stream ended")

    async def _send(self, worker: _Worker) -> None:
        while not worker.lost:
            await worker.wake.wait()
            worker.wake.clear()
            # A request that was given up before it was sent is not sent.
            requests = [request for request in worker.outbox if request.id in worker.inflight]
            worker.outbox = []
            interrupts, worker.interrupts = worker.interrupts, []
            releases, worker.releases = worker.releases, []
            try:
                async with guard(CONTROL_TIMEOUT_S, f"worker {worker.id}: taking requests"):
                    if interrupts:
                        await worker.engine.interrupt(interrupts)
                    for trajectory in releases:
                        await worker.engine.release(trajectory)
                    if requests:
                        await worker.engine.submit(requests)
            except EngineError as error:
                self._refuse(worker, requests, str(error))
            except (WorkerLost, GuardExpired) as error:
                self._lose(worker, str(error))

    @staticmethod
    def _refuse(worker: _Worker, requests: list[TurnRequest], error: str) -> None:
        """None of the requests was taken; the engine itself goes on."""
        for request in requests:
            pending = worker.inflight.get(request.id)
            if pending is not None:
                pending.error, pending.working = error, False
                pending.finish(EndReason.FAILED)

    def _lose_if_silent(self, worker: _Worker, pending: _Pending, now_s: float) -> None:
        silent_s = now_s - max(worker.heard_s, pending.began_s)
        if silent_s >= self._silence_s:
            self._lose(worker, f"silent for {silent_s:g} s with requests to work on")

    def _lose(self, worker: _Worker, detail: str) -> None:
        if worker.lost:
            return
        self.retire(worker.id, detail)
        self._on_lost(worker.id, detail)
