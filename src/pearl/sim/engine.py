"""The simulated engine: the `Engine` port over `Batching`, on the running loop's clock, with one timer.

What it generates is counted and prescribed: a request's context is `ScriptedTokens`, and its script says how long the turn
is. Laws:

- *told*: ends are delivered at once, and with them what their requests generated. Progress is arithmetic: when the worker
  dies, everything up to the last multiple of `progress_interval_s` had been delivered, and the rest is lost and counted.
  Somebody who listens for a sign of life gets progress every `report_interval_s` too;
- *handed over*: KV travels once its receiver has room for it, and takes `hand_off.fixed_s` and its transfer; a handle
  whose owner is gone, whose epoch or time is over, or that was read, fails its request, and only that;
- *loaded*: new weights pause the engine at a boundary for what their way takes, and `weight_load_s`.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence

from pearl.errors import EngineError, WeightsError
from pearl.ports import EngineInfo, EngineStats
from pearl.records.ids import HandleId, RequestId, TrajectoryId, WorkerId
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest
from pearl.sim.batching import Batching
from pearl.sim.imports import Imports
from pearl.sim.iterations import IterationCosts
from pearl.sim.kv import KvExports, kv_refusal
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.process import Process
from pearl.sim.requests import begin, end_of
from pearl.sim.sequence import Sequence as Running
from pearl.sim.settings import EngineSettings, EngineWorld, end_name
from pearl.sim.stream import Stream


class SimEngine:
    """One worker's engine; up as soon as it is made."""

    def __init__(
        self,
        worker: WorkerId,
        settings: EngineSettings,
        world: EngineWorld,
        *,
        costs: IterationCosts | None = None,
        epoch: int = 0,
        on_death: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`costs` of the profile may be shared between engines; `on_death` is told of an unannounced one."""
        profile = settings.profile
        self.worker, self.settings, self._world, self._on_death = worker, settings, world, on_death
        self._cache = PrefixCache(profile.kv_capacity_tokens)
        self.exports = KvExports(
            self._cache,
            worker=worker,
            model_hash=profile.model_hash,
            bytes_per_token=profile.kv_bytes_per_token,
            ttl_s=settings.kv_ttl_s,
            epoch=epoch,
        )
        self.exports.give_back = self._give_back
        keep_s = 2 * settings.progress_interval_s
        self._batching = Batching(
            costs or IterationCosts(profile.iterations), settings.limits, self._cache, self.exports, keep_s=keep_s
        )
        self._batching.scale = settings.time_scale
        self._roster = self._batching.roster
        self._limit = min(settings.max_context_tokens, profile.kv_capacity_tokens)
        self._stream: Stream[Chunk] = Stream()
        self._timer: asyncio.TimerHandle | None = None
        self._report_s = math.inf
        """When progress is told next."""
        self._kept_back: list[TurnRequest] = []
        """Submitted while weights were loaded."""
        self._loading = asyncio.Lock()
        self._boundary: list[asyncio.Future[None]] = []
        """Wait for no iteration to be under way."""
        self._process = Process(worker)
        self._imports = Imports(
            worker, self._process, self._batching, world.links, hand_off=profile.hand_off, settle=self._settle
        )
        self._unready: str | None = None
        self._is_asleep = False
        self.lost_tokens = 0
        """Generated, and not delivered when the worker died."""

    # -- the port ---------------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What the engine is."""
        await self._process.answer()
        return EngineInfo(
            model_hash=self.settings.profile.model_hash,
            epoch=self.exports.epoch,
            max_context_tokens=self._limit,
            kv_capacity_tokens=self._cache.capacity_tokens,
        )

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests; one that cannot be served ends as failed.

        Raises:
            EngineError: a request's id is in use; none of the requests was taken.
            WorkerLost: the worker is gone.
        """
        await self._process.answer()
        for request in requests:
            if request.id in self._roster.requests:
                raise EngineError(f"worker {self.worker}: request {request.id} is here already, want an id per attempt")
        if self._batching.is_paused:
            self._kept_back += requests
        else:
            self._submit(requests)

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End requests at the next token boundary; unknown ids are ignored."""
        await self._process.answer()
        self._interrupt(ids)

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Forget a handle if one is given, else a prefix."""
        await self._process.answer()
        if kv is not None:
            self._give_back(trajectory, kv.id)
        else:
            self._batching.forget(trajectory, _now_s())

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights; nothing is generated meanwhile."""
        await self._process.answer()
        profile, where = self.settings.profile, f"worker {self.worker}: load of version {manifest.version}"
        if manifest.model_hash != profile.model_hash:
            raise WeightsError(
                f"{where}: got model {manifest.model_hash}, want {profile.model_hash}; publish the model of the profile"
            )
        if self._is_asleep:
            raise WeightsError(f"{where}: it sleeps; wake it first")
        async with self._loading:
            return await self._load(manifest, mode, where)

    async def _load(self, manifest: Manifest, mode: LoadMode, where: str) -> LoadReport:
        began_s = _now_s()
        await self._pause()
        try:
            if self._world.weights is not None:
                await self._process.call(self._world.weights.pull(end_name(self.worker), manifest), "weights")
            await self._process.call(asyncio.sleep(self.settings.profile.weight_load_s), "weights")
            await self._process.answer()
            if self._is_asleep:
                raise WeightsError(f"{where}: it was put to sleep meanwhile; wake it first")
            recomputed = self._batching.reload(manifest.version, mode, _now_s())
            self._unready = None
            if mode is LoadMode.RECOMPUTE:
                self._imports.cancel_all()
        finally:
            self._resume()
        return LoadReport(
            version=manifest.version,
            load_s=_now_s() - began_s,
            loaded_bytes=manifest.size_bytes,
            recomputed_tokens=recomputed,
        )

    @property
    def busy_s(self) -> float:
        """Inside iterations since its start, as of when it was last looked at."""
        return self._roster.counts.busy_s

    async def stats(self) -> EngineStats:
        """Counters since start, and the load now."""
        await self._process.answer()
        self._settle()
        return self._batching.stats(_now_s(), kept_back=len(self._kept_back))

    def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        """The one stream of chunks."""
        return self._stream.read()

    # -- the process's life, for the fleet ----------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """Whether it has requests."""
        return bool(self._roster.requests or self._kept_back)

    @property
    def is_gone(self) -> bool:
        """Whether it died or was shut down."""
        return self._process.is_gone

    @property
    def is_hung(self) -> bool:
        """Whether `hang` was called, and `unhang` was not."""
        return self._process.is_hung

    @property
    def preemptions(self) -> int:
        """Requests that gave their memory up and were computed again."""
        return self._roster.counts.preemptions

    def kill(self, detail: str = "killed") -> None:
        """Die without notice: what was generated since the last multiple of the progress interval is lost."""
        if self.is_gone:
            return
        now_s = _now_s()
        self._settle()
        told_s = math.floor(now_s / self.settings.progress_interval_s) * self.settings.progress_interval_s
        steps = self._batching.steps_by(now_s)
        for sequence in self._roster.requests.values():
            length = self._batching.length(sequence, steps)
            told = min(length, self._batching.length_at(sequence, told_s))
            self.lost_tokens += length - told
            if told > sequence.told:
                self._stream.put(sequence.chunk(told, None))
        self._batching.abandon(now_s)
        self._leave(detail)
        self._on_death(detail)

    def hang(self) -> None:
        """Let time stand still in it: nothing is generated, and no call returns."""
        if not (self._process.is_hung or self.is_gone):
            self._settle()
            self._process.hang()
            self._batching.freeze(_now_s())
            self._schedule()

    def unhang(self) -> None:
        """Go on where `hang` stopped."""
        if self._process.is_hung:
            self._process.unhang()
            self._batching.thaw(_now_s())
            self._settle()

    def slow(self, factor: float) -> None:
        """Make iterations that begin from now on take so many times what they take by the settings.

        Raises:
            ValueError: not a finite number > 0.
        """
        if not (math.isfinite(factor) and factor > 0):
            raise ValueError(f"worker {self.worker}: slow: got {factor}, want a finite number > 0")
        self._batching.rescale(self.settings.time_scale * factor, _now_s())
        self._settle()

    def shut_down(self, detail: str = "stopped") -> None:
        """Leave with notice: requests end as interrupted with all their tokens; the stream ends behind that."""
        if not self.is_gone:
            self._end_all()
            self._leave(detail)

    async def sleep(self) -> None:
        """Give memory up at the next boundary: requests end as interrupted, KV is gone, nothing is served."""
        await self._process.answer()
        await self._pause()
        self._is_asleep, self._unready = True, "asleep; wake it and load weights"
        self._end_all()
        self.exports.invalidate()
        self._resume()

    def wake(self) -> None:
        """Take memory again; weights must be loaded before anything is served."""
        if self._is_asleep:
            self._is_asleep, self._unready = False, "awake without weights; load weights"

    # -- the inside: requests ---------------------------------------------------------------------------------------

    def _submit(self, requests: Sequence[TurnRequest]) -> None:
        now_s = _now_s()
        taken: list[Running] = []
        for request in requests:
            refused = self._unready and f"the engine is {self._unready}"
            begun = begin(
                request,
                worker=self.worker,
                limit_tokens=self._limit,
                version=self._roster.version,
                refused=refused or kv_refusal(request, self.settings.profile.model_hash, now_s),
            )
            if isinstance(begun, Chunk):
                self._stream.put(begun)
            else:
                taken.append(begun)
        if taken:
            if not self._roster.requests:
                self._report_s = now_s + self.settings.report_interval_s
            self._batching.submit(taken, now_s)
        self._settle()

    def _interrupt(self, ids: Sequence[RequestId]) -> None:
        if self._kept_back:
            going = dict.fromkeys(ids)
            for request in self._kept_back:
                if request.id in going:
                    self._stream.put(end_of(request, EndReason.INTERRUPTED))
            self._kept_back = [request for request in self._kept_back if request.id not in going]
        self._batching.interrupt(ids, _now_s())
        self._settle()

    def _end_all(self) -> None:
        """End every request with the tokens that it has by now, without waiting for a boundary."""
        now_s = _now_s()
        self._settle()
        for request in self._kept_back:
            self._stream.put(end_of(request, EndReason.INTERRUPTED))
        self._kept_back = []
        self._batching.abandon(now_s)
        self._settle()

    def _give_back(self, trajectory: TrajectoryId, handle: HandleId) -> None:
        self._batching.unpin(trajectory, handle, _now_s())
        self._settle()

    # -- the inside: time -------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Do what is over by now, tell what ended, and set the timer."""
        if not self.is_gone:
            self._batching.advance(_now_s())
            self._tell()

    def _tell(self) -> None:
        batching, roster = self._batching, self._roster
        while roster.ended or roster.importing:
            ended, roster.ended = roster.ended, []
            for sequence, reason, kv, error in ended:
                self._imports.cancel(sequence)
                self._stream.put(sequence.chunk(sequence.length, reason, kv=kv, error=error))
            importing, roster.importing = roster.importing, []
            for sequence in importing:
                self._imports.begin(sequence)
        if self._boundary and batching.is_between:
            waiting, self._boundary = self._boundary, []
            for waiter in waiting:
                if not waiter.done():
                    waiter.set_result(None)
        self._schedule()

    def _schedule(self) -> None:
        due_s = None if self.is_gone else self._batching.due_s
        if due_s is not None and self._report_s < due_s:
            due_s = self._report_s
        timer = self._timer
        if timer is not None:
            if timer.when() == due_s:
                return
            timer.cancel()
            self._timer = None
        if due_s is not None:
            self._timer = asyncio.get_running_loop().call_at(due_s, self._on_timer, due_s)

    def _on_timer(self, due_s: float) -> None:
        self._timer = None
        # A loop may be early by its resolution.
        now_s = max(due_s, _now_s())
        self._batching.advance(now_s)
        if now_s >= self._report_s:
            self._report(now_s)
        self._tell()

    def _report(self, now_s: float) -> None:
        """Tell the progress of every request that has some."""
        self._report_s = now_s + self.settings.report_interval_s
        steps = self._batching.steps_by(now_s)
        for sequence in self._roster.requests.values():
            length = self._batching.length(sequence, steps)
            if length > sequence.told:
                self._stream.put(sequence.chunk(length, None))

    async def _pause(self) -> None:
        """Begin no iteration any more, and wait for the end of the one under way."""
        self._batching.pause(_now_s())
        self._settle()
        try:
            if not self._batching.is_between:
                waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                self._boundary.append(waiter)
                await self._process.wait(waiter)
        except BaseException:
            self._resume()
            raise

    def _resume(self) -> None:
        if self.is_gone:
            return
        self._batching.resume(_now_s())
        if self._kept_back and not self._batching.is_paused:
            kept_back, self._kept_back = self._kept_back, []
            self._submit(kept_back)
        self._settle()

    def _leave(self, detail: str) -> None:
        self._process.end(detail)
        self.exports.lost = True
        self._schedule()
        self._stream.close(self._process.loss)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
