"""The async `Engine` port over one `EmbeddedEngine` in a thread of its own.

The thread owns the engine: it takes commands between two iterations, sleeps when there is nothing to do, and hands chunk
batches to the event loop. `submit`, `interrupt` and `release` do not wait for it; their order is kept. When the thread
dies of an exception, the stream ends behind what it still holds with `WorkerLost`, and so does every later call.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence, Set
from functools import partial
from pathlib import Path
from typing import TypeVar

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import FIRST_WORKER, EmbeddedEngine
from pearl.engine.embedded.kv import KvTransport
from pearl.errors import EngineError, PearlError, WorkerLost
from pearl.ports import EngineInfo, EngineStats
from pearl.records.ids import RequestId, TrajectoryId, WorkerId
from pearl.records.training import LoadMode, LoadReport, Manifest
from pearl.records.turn import Chunk, KvHandle, TurnRequest

T = TypeVar("T")

Command = Callable[[EmbeddedEngine], None]

CLOSE_TIMEOUT_S = 30.0
"""Longest wait of `close` for the thread to finish its iteration."""


class ThreadedEngine:
    """A rollout worker in this process. Made with `create`; all methods belong to the loop that made it."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._batches: asyncio.Queue[tuple[Chunk, ...] | None] = asyncio.Queue()
        self._open: set[RequestId] = set()
        self._answers: set[asyncio.Future[object]] = set()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._gone: str | None = None
        self._closed = False
        self._info: EngineInfo | None = None
        self._thread = threading.current_thread()

    @classmethod
    async def create(
        cls,
        model: Path,
        config: EngineConfig,
        *,
        worker: WorkerId = FIRST_WORKER,
        epoch: int = 0,
        transport: KvTransport | None = None,
        make: Callable[[], EmbeddedEngine] | None = None,
    ) -> ThreadedEngine:
        """Start the thread and load the model in it; `make` replaces the engine, for tests.

        `transport` moves exported KV to where other processes can fetch it; by default it stays in this one.

        Raises:
            ModelError: the folder does not hold a supported checkpoint.
            ConfigError: the configuration does not fit the model.
        """
        engine = cls(worker)
        ready: asyncio.Future[EngineInfo] = engine._loop.create_future()
        build = make or partial(EmbeddedEngine, model, config, worker=worker, epoch=epoch, transport=transport)
        engine._thread = threading.Thread(
            target=engine._run, args=(build, ready), name=f"pearl-engine-{worker}", daemon=True
        )
        engine._thread.start()
        atexit.register(engine._stop)
        try:
            engine._info = await ready
        except BaseException:
            engine._commands.put(None)  # also when the wait was cancelled and the model is still loading
            raise
        return engine

    # -- the port ---------------------------------------------------------------------------------------------------

    async def info(self) -> EngineInfo:
        """What the engine is."""
        self._check_alive()
        assert self._info is not None
        return self._info

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests; one that cannot be served ends with `EndReason.FAILED`.

        Raises:
            WorkerLost: the thread is gone; none of the requests was taken.
            EngineError: a request id is in use; none of the requests was taken.
        """
        self.check_ids(requests)
        self._open.update(request.id for request in requests)
        taken = tuple(requests)
        self._commands.put(lambda engine: engine.submit(taken))

    def check_ids(self, requests: Sequence[TurnRequest], others: Set[RequestId] = frozenset()) -> None:
        """Whether `submit` would take these requests together, after `others`.

        Raises:
            WorkerLost: the thread is gone.
            EngineError: a request id is in use.
        """
        self._check_alive()
        ids = [request.id for request in requests]
        if len(set(ids)) < len(ids) or not self._open.isdisjoint(ids) or not others.isdisjoint(ids):
            used = self._open | others
            twice = [request_id for request_id in ids if request_id in used or ids.count(request_id) > 1]
            raise EngineError(
                f"worker {self._worker}: request {twice[0]}: this id is in use; want a new id per attempt"
            )

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End running requests at the next token boundary, losing none; unknown ids are ignored."""
        self._check_alive()
        chosen = tuple(ids)
        self._commands.put(lambda engine: engine.interrupt(chosen))

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Forget a handle if one is given, else the cached prefix of a trajectory."""
        self._check_alive()
        self._commands.put(lambda engine: engine.release(trajectory, kv))

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights between two iterations.

        Raises:
            WeightsError: another model's weights, damaged or vanished bytes; the old weights stay.
            WorkerLost: the thread is gone.
        """
        return await self._ask(lambda engine: engine.load(manifest, mode))

    async def sleep(self) -> EngineInfo:
        """Free weights and KV; running requests end as interrupted."""
        self._info = await self._ask(lambda engine: engine.sleep())
        return self._info

    async def wake(self) -> EngineInfo:
        """Take memory for KV again; load weights before it serves."""
        self._info = await self._ask(lambda engine: engine.wake())
        return self._info

    async def stats(self) -> EngineStats:
        """Counters since start, and the load now."""
        return await self._ask(lambda engine: engine.stats())

    async def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        """The one stream of chunks, for one reader; ends after `close`.

        Raises:
            WorkerLost: the thread died.
        """
        while True:
            batch = await self._batches.get()
            if batch is None:
                self._batches.put_nowait(None)  # for whoever asks again
                if self._gone is not None:
                    raise WorkerLost(self._gone)
                return
            # A reader that was slow gets everything at once.
            while not self._batches.empty():
                more = self._batches.get_nowait()
                if more is None:
                    self._batches.put_nowait(None)
                    break
                batch += more
            yield batch

    async def close(self) -> None:
        """End the thread after its current iteration; running requests are dropped.

        Raises:
            WorkerLost: the iteration did not end in time.
        """
        self._closed = True
        self._commands.put(None)
        try:
            await asyncio.wait_for(asyncio.shield(self._ended), CLOSE_TIMEOUT_S)
            self._stop()
        except TimeoutError:
            raise WorkerLost(
                f"worker {self._worker}: the engine's iteration did not end within {CLOSE_TIMEOUT_S:g} s of close()"
            ) from None

    # -- on the loop ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """End the thread and wait for it: one that is still inside torch when the interpreter goes aborts the process."""
        atexit.unregister(self._stop)
        self._commands.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _check_alive(self) -> None:
        if self._gone is not None:
            raise WorkerLost(self._gone)
        if self._closed:
            raise WorkerLost(f"worker {self._worker}: the engine was closed")

    async def _ask(self, question: Callable[[EmbeddedEngine], T]) -> T:
        self._check_alive()
        answer: asyncio.Future[T] = self._loop.create_future()
        self._answers.add(answer)  # type: ignore[arg-type]
        self._commands.put(partial(self._answer, question, answer))
        try:
            return await answer
        finally:
            self._answers.discard(answer)

    def _deliver(self, chunks: tuple[Chunk, ...]) -> None:
        self._open.difference_update(chunk.request for chunk in chunks if chunk.end is not None)
        self._batches.put_nowait(chunks)

    def _finish(self, gone: str | None) -> None:
        """The thread has ended, of an exception when `gone` says so."""
        self._gone = gone
        lost = gone or f"worker {self._worker}: the engine was closed"
        for answer in tuple(self._answers):
            if not answer.done():
                answer.set_exception(WorkerLost(lost))
        self._batches.put_nowait(None)
        if not self._ended.done():
            self._ended.set_result(None)

    # -- on the thread ----------------------------------------------------------------------------------------------

    def _run(self, build: Callable[[], EmbeddedEngine], ready: asyncio.Future[EngineInfo]) -> None:
        try:
            engine = build()
        except BaseException as error:
            self._tell(_set_exception, ready, error)
            self._tell(self._finish, f"worker {self._worker}: the engine did not start: {error!r}")
            return
        self._tell(_set_result, ready, engine.info())
        gone = None
        try:
            self._serve(engine)
        except BaseException as error:
            gone = f"worker {self._worker}: the engine's thread died: {error!r}"
        self._tell(self._finish, gone)

    def _serve(self, engine: EmbeddedEngine) -> None:
        while True:
            while not self._commands.empty():
                command = self._commands.get()
                if command is None:
                    return
                command(engine)
            worked = engine.step()
            chunks = engine.take_chunks(time.monotonic())
            if chunks:
                self._tell(self._deliver, chunks)
            if not worked and not chunks:
                command = self._commands.get()
                if command is None:
                    return
                command(engine)

    def _answer(
        self, question: Callable[[EmbeddedEngine], T], answer: asyncio.Future[T], engine: EmbeddedEngine
    ) -> None:
        try:
            value = question(engine)
        except PearlError as error:
            self._tell(_set_exception, answer, error)
        else:
            self._tell(_set_result, answer, value)

    def _tell(self, function: Callable[..., None], *arguments: object) -> None:
        # A closed loop raises: nobody is left to be told.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)


def _set_result(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _set_exception(future: asyncio.Future[T], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
