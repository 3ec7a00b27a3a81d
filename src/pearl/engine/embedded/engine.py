"""The embedded engine: continuous batching on one thread, synchronous, without a clock of its own for behaviour.

One call of `step` is one iteration. The caller takes what was generated with `take_chunks`. Laws:

- a request produces chunks that join without gap or overlap, and exactly one of them has an end;
- tokens do not depend on what else is in the batch, on chunking, on eviction or on interruption (beyond float32 rounding);
- a fault of one request ends that request; a fault of new weights leaves the old ones serving.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.attention import Batch, Ints
from pearl.engine.embedded.kv import CopyTransport, KvExports, KvTransport, import_kv, kv_refusal
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.model import Model
from pearl.engine.embedded.pace import Pace
from pearl.engine.embedded.sampling import Draw, draw, uniform
from pearl.engine.embedded.scheduler import Scheduler, refusal
from pearl.engine.embedded.slots import SlotTable
from pearl.engine.embedded.weights import Place, release_memory
from pearl.errors import ConfigError, EngineError, WeightsError
from pearl.ports import EngineInfo, EngineStats
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, EndReason, KvHandle, Mode, TurnRequest

_log = logging.getLogger(__name__)

FIRST_WORKER = WorkerId(0)
INITIAL_VERSION = WeightVersion(0)
"""Of the weights in the model folder."""

_NOT_FINITE = (
    "the model's logits are not finite: its weights have diverged, or KV that was handed over or kept is of such weights; "
    "load sound ones, and send the whole context"
)


class EmbeddedEngine:
    """One model, its KV slots, and the requests that use them. Not thread-safe."""

    def __init__(
        self,
        model: Path | Model,
        config: EngineConfig,
        *,
        worker: WorkerId = FIRST_WORKER,
        epoch: int = 0,
        version: WeightVersion = INITIAL_VERSION,
        transport: KvTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        pace: Pace | None = None,
    ) -> None:
        """Read the model if a folder is given; sets torch's thread count for the calling thread.

        `clock` is what handles expire by: that of the event loop around. `pace` replaces that of the configuration.

        Raises:
            ModelError: the folder does not hold a supported checkpoint.
            ConfigError: the model has fewer positions than `config.max_context_tokens`; there is no such device; the file
                of `config.pacing` is no profile.
        """
        torch.set_num_threads(config.threads)
        self._pace = Pace.read(config) if pace is None else pace
        place = Place.of(config.device, config.dtype)
        self._model = model if isinstance(model, Model) else Model.read(model, place)
        positions = self._model.architecture.max_positions
        if config.max_context_tokens > positions:
            raise ConfigError(
                f"engine.max_context_tokens: got {config.max_context_tokens}, want <= {positions} "
                "(max_position_embeddings of the model)"
            )
        self._config = config
        self._worker = worker
        self._epoch = epoch
        self._version = version
        budget = config.kv_budget_tokens or config.max_sequences * config.max_context_tokens
        self._limit = min(config.max_context_tokens, budget)
        self._slots = budget // self._limit
        self._cache: KvCache | None = self._new_cache()
        self._table = SlotTable(self._slots, self._limit)
        self._scheduler = self._new_scheduler()
        self._clock = clock
        self._exports = KvExports(worker=worker, ttl_s=config.kv_ttl_s, transport=transport or CopyTransport())
        self._load_mode = LoadMode(config.on_load)
        self._unready: str | None = None
        self._ended: list[Chunk] = []
        self._progress_due_s = -np.inf
        self._generated_tokens = 0
        self._computed_prompt_tokens = 0
        self._iterations = 0
        self._busy_s = 0.0

    # -- the port, synchronous --------------------------------------------------------------------------------------

    def info(self) -> EngineInfo:
        """What the engine is."""
        return EngineInfo(
            model_hash=self._model.hash,
            epoch=self._epoch,
            max_context_tokens=self._limit,
            kv_capacity_tokens=self._slots * self._limit,
        )

    def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests; one that cannot be served ends with `EndReason.FAILED`.

        Raises:
            EngineError: a request id is in use; none of the requests was taken.
        """
        ids = [request.id for request in requests]
        for index, request_id in enumerate(ids):
            if self._scheduler.holds(request_id) or request_id in ids[:index]:
                raise EngineError(f"{self._name(request_id)}: this id is in use; want a new id per attempt")
        for request in requests:
            try:
                fault = self._refusal(request)
            except (TypeError, ValueError, AttributeError, OverflowError) as error:
                # A value of a type that nobody foresaw is this request's fault alone.
                fault = f"got a value that cannot be used: {error}"
            if fault is None and len(request.context) == self._limit:
                # A turn that is continued elsewhere may have grown to the limit there.
                self._ended.append(Chunk.only_end(request, EndReason.LENGTH))
            elif fault is None:
                self._scheduler.add(request)
            else:
                self._ended.append(Chunk.only_end(request, EndReason.FAILED, f"{self._name(request.id)}: {fault}"))

    def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End requests with the tokens that they have; unknown ids are ignored."""
        for request_id in ids:
            slot = self._table.running_slot(request_id)
            if slot is not None:
                self._end(slot, EndReason.INTERRUPTED)
                continue
            request = self._scheduler.withdraw(request_id)
            if request is not None:
                self._ended.append(Chunk.only_end(request, EndReason.INTERRUPTED))

    def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Take a handle back if one is given, else forget a trajectory's prefix, at the end of its request if one runs."""
        if kv is None:
            self._table.release(trajectory)
        else:
            self._exports.release(kv)

    def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights.

        Raises:
            WeightsError: another model's weights, damaged or vanished bytes, or asleep; nothing has changed.
        """
        began_s = time.perf_counter()
        if self._cache is None:
            raise WeightsError(f"worker {self._worker}: load of version {manifest.version}: it sleeps; wake it first")
        try:
            self._model.load(manifest)
        except (OSError, RuntimeError, MemoryError) as error:
            where = f"worker {self._worker}: load of version {manifest.version}"
            raise WeightsError(f"{where}: {error}; the old weights stay") from error
        self._version, self._load_mode, self._unready = manifest.version, mode, None
        recomputed = 0
        if mode is LoadMode.RECOMPUTE:
            recomputed = self._table.forget_kv()
            for slot in range(self._slots):
                self._cache.clear(slot)
        return LoadReport(
            version=manifest.version,
            load_s=time.perf_counter() - began_s,
            loaded_bytes=manifest.size_bytes,
            recomputed_tokens=recomputed,
        )

    def sleep(self) -> EngineInfo:
        """Free weights and KV: requests end as interrupted, and KV and handles of before are void (a new epoch)."""
        running = np.flatnonzero(self._table.running).tolist()
        self.interrupt([self._table.request(slot).id for slot in running])
        self.interrupt(self._scheduler.waiting)
        self._exports.release_all()
        self._table = SlotTable(self._slots, self._limit)
        self._scheduler = self._new_scheduler()
        self._cache = None
        self._model.unload()
        release_memory(self._model.place.device)
        self._epoch += 1
        self._unready = "it sleeps; wake it and load weights"
        return self.info()

    def wake(self) -> EngineInfo:
        """Take memory for KV again; weights must be loaded before it serves."""
        if self._cache is None:
            self._cache = self._new_cache()
            self._unready = "it woke without weights; load some"
        return self.info()

    def stats(self) -> EngineStats:
        """Counters since start, and the load now."""
        self._exports.expire(self._clock())
        return EngineStats(
            version=self._version,
            running=self._table.running_count,
            waiting=self._scheduler.waiting_count,
            kv_used_tokens=self._table.cached_tokens,
            generated_tokens=self._generated_tokens,
            computed_prompt_tokens=self._computed_prompt_tokens,
            iterations=self._iterations,
            busy_s=self._busy_s,
            late_iterations=0 if self._pace is None else self._pace.late_iterations,
        )

    # -- iterations -------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one iteration; False when there was nothing to do."""
        began_s = time.perf_counter()
        if self._pace is not None:
            self._pace.begin()
        cache = self._cache
        if cache is None:
            return False
        self._scheduler.admit()
        for slot in self._scheduler.take_started():
            cache.clear(slot, int(self._table.cached[slot]))
            self._import(cache, slot)
        batch = self._scheduler.batch()
        if batch is None:
            return False
        self._iterate(cache, batch)
        if self._pace is not None:
            self._pace.end(batch)
        self._iterations += 1
        self._busy_s += time.perf_counter() - began_s
        return True

    def take_chunks(self, now_s: float, force: bool = False) -> tuple[Chunk, ...]:
        """Take ended requests, and progress of running ones when it is due (or asked for by `force`).

        `now_s` is any clock that does not run backwards.
        """
        chunks, self._ended = self._ended, []
        if force or now_s >= self._progress_due_s:
            table = self._table
            fresh = np.flatnonzero(table.running & (table.length > table.reported))
            chunks += [self._chunk(slot) for slot in fresh.tolist()]
            if len(fresh):
                self._progress_due_s = now_s + self._config.progress_interval_s
        return tuple(chunks)

    def _import(self, cache: KvCache, slot: int) -> None:
        """Take over the KV that came with a request, unless it is of weights that the engine has left behind."""
        table, handle = self._table, self._table.request(slot).kv
        if handle is None or (handle.version != self._version and self._load_mode is LoadMode.RECOMPUTE):
            return
        held = int(table.cached[slot])
        table.cached[slot] = import_kv(cache, slot, handle, held, int(table.length[slot]) - 1)
        table.kv_version[slot] = min(int(table.kv_version[slot]), handle.version) if held else handle.version

    def _iterate(self, cache: KvCache, batch: Batch) -> None:
        table, slots = self._table, batch.slots
        table.kv_version[slots[batch.starts == 0]] = self._version
        reached = batch.starts + batch.counts
        complete = reached == table.length[slots]
        logits = self._model.forward(
            cache, batch, table.token_ids[batch.token_slots, batch.token_positions], batch.lasts[complete]
        )
        context = np.clip(table.prompt[slots] - batch.starts, 0, batch.counts)
        table.computed[slots] += context
        table.cached[slots] = reached
        self._computed_prompt_tokens += int(context.sum())
        if len(logits):
            drawing = slots[complete]
            positions = table.length[drawing].astype(np.uint64)
            numbers = uniform(table.seed[drawing], positions)
            self._record(drawing, draw(logits, table.temperature[drawing], numbers))

    def _record(self, slots: Ints, drawn: Draw) -> None:
        """Append the drawn tokens and end the requests that are complete."""
        table = self._table
        if not drawn.finite.all():
            for slot in slots[~drawn.finite].tolist():
                self._fail(slot, _NOT_FINITE)
            slots, drawn = slots[drawn.finite], drawn.only(drawn.finite)
        at = table.length[slots]
        table.token_ids[slots, at] = drawn.token_ids
        table.logprobs[slots, at] = drawn.logprobs
        table.versions[slots, at] = self._version
        table.length[slots] = at + 1
        self._generated_tokens += len(slots)
        stopped = (table.stops[slots] == drawn.token_ids[:, None]).any(1)
        ended = stopped | (at + 1 >= table.limit[slots])
        for slot, stop in zip(slots[ended].tolist(), stopped[ended].tolist(), strict=True):
            self._end(slot, EndReason.STOP if stop else EndReason.LENGTH)

    # -- ends -------------------------------------------------------------------------------------------------------

    def _refusal(self, request: TurnRequest) -> str | None:
        fault = self._unready or refusal(
            request,
            vocabulary=self._model.architecture.vocabulary,
            max_context_tokens=self._limit,
            version=self._version,
        )
        if fault is None:
            fault = kv_refusal(request, self._model, self._clock())
        if fault is None and self._scheduler.serves(request.trajectory):
            return f"trajectory {request.trajectory}: has a request here already, want one at a time"
        return fault

    def _end(self, slot: int, end: EndReason) -> None:
        kv = self._export(slot)
        self._ended.append(self._chunk(slot, end, kv=kv))
        self._table.end(slot)

    def _export(self, slot: int) -> KvHandle | None:
        table, request = self._table, self._table.request(slot)
        cached = int(table.cached[slot])
        if (
            self._cache is None
            or not (request.export_kv or request.mode is Mode.PREFILL)
            or cached <= request.export_from
        ):
            return None
        try:
            return self._exports.export(
                self._cache,
                self._model,
                slot,
                request,
                TokenIds(table.token_ids[slot, :cached]),
                epoch=self._epoch,
                version=WeightVersion(int(table.kv_version[slot])),
                now_s=self._clock(),
            )
        except Exception:
            # KV saves work and decides nothing: whatever a transport does, the request has its tokens.
            _log.exception("%s: its KV was not exported", self._name(request.id))
            return None

    def _fail(self, slot: int, fault: str) -> None:
        name = self._name(self._table.request(slot).id)
        self._ended.append(self._chunk(slot, EndReason.FAILED, f"{name}: {fault}"))
        self._table.end(slot, keep=False)  # the next request in this slot clears it

    def _chunk(
        self, slot: int, end: EndReason | None = None, error: str | None = None, kv: KvHandle | None = None
    ) -> Chunk:
        table = self._table
        token_ids, logprobs, versions = table.undelivered(slot)
        start = int(table.reported[slot])
        table.reported[slot] = table.length[slot]
        return Chunk(
            request=table.request(slot).id,
            start=start,
            token_ids=token_ids,
            logprobs=logprobs,
            versions=versions,
            end=end,
            kv=kv,
            computed_prompt_tokens=int(table.computed[slot]),
            error=error,
        )

    def _new_cache(self) -> KvCache:
        try:
            return KvCache(self._model.architecture, self._slots, self._limit, self._model.place)
        except RuntimeError as error:  # torch's way to say that there is no memory
            raise ConfigError(
                f"engine.kv_budget_tokens: {self._slots} slots of {self._limit} tokens do not fit into memory ({error}); "
                "want fewer tokens, or a smaller engine.max_sequences or engine.max_context_tokens"
            ) from error

    def _new_scheduler(self) -> Scheduler:
        return Scheduler(
            self._table,
            prefill_chunk_tokens=self._config.prefill_chunk_tokens,
            max_running=min(self._config.max_sequences, self._slots),
        )

    def _name(self, request: RequestId) -> str:
        return f"worker {self._worker}: request {request}"
