"""A worker that the router may use: what it has to do, and the streams to and from it.

Laws:

- one coroutine sends, so that interrupts, releases and requests reach the engine in the order in which they came up;
- a request that was given up before it was sent is never sent;
- a worker that does not answer, or whose stream ends, is lost: said once, to `on_lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.core.state import Role
from pearl.errors import EngineError, WorkerLost
from pearl.pipeline.concurrency import GuardExpired, guard
from pearl.pipeline.turns import Pending
from pearl.ports import Engine
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest

CONTROL_TIMEOUT_S = 30.0
"""Bound on submit, interrupt and release: queue operations that take milliseconds on a healthy worker."""


@dataclass(slots=True, eq=False)
class Seat:
    """A worker that is admitted."""

    id: WorkerId
    engine: Engine
    version: WeightVersion
    role: Role
    on_lost: Callable[[Seat, str], None]
    on_idle: Callable[[], None]
    """Called when a draining worker has nothing left to do."""
    on_eased: Callable[[Seat], None] = lambda _: None
    """Called when its load has fallen."""
    draining: bool = False
    loading: bool = False
    """Whether it takes new weights, which may delay every answer."""
    lost: bool = False
    load: int = 0
    """Requests that it has, or will have as soon as their prefill, elsewhere, is done."""
    heard_s: float = 0.0
    """When its event stream last said something."""
    inflight: dict[RequestId, Pending] = field(default_factory=dict)
    _given_up: dict[RequestId, TrajectoryId] = field(default_factory=dict)
    """Requests that nobody waits for any more and that the engine may still work on."""
    _outbox: list[TurnRequest] = field(default_factory=list)
    _interrupts: list[RequestId] = field(default_factory=list)
    _releases: list[tuple[TrajectoryId, KvHandle | None]] = field(default_factory=list)
    _wake: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def idle(self) -> bool:
        """Whether its engine has nothing left of what it was sent."""
        return not self.inflight and not self._given_up

    # --- what it is told -----------------------------------------------------------------------------------------

    def begin(self, request: TurnRequest, on_answer: Callable[[], None] | None) -> Pending:
        """Send it a request, soon."""
        loop = asyncio.get_running_loop()
        pending = Pending(request, loop.time(), loop.create_future(), request.context[:0], on_answer)
        self.inflight[request.id] = pending
        self.load += 1
        self._outbox.append(request)
        self._wake.set()
        return pending

    def end(self, pending: Pending) -> None:
        """Nobody waits for a request any more; what the engine still does for it is interrupted."""
        request = pending.request
        del self.inflight[request.id]
        self.ease()
        if pending.working and not self.lost:
            self._given_up[request.id] = request.trajectory
            self._interrupts.append(request.id)
            self._wake.set()
        if self.draining:
            self._tell_idle()

    def ease(self) -> None:
        """It has one request less."""
        self.load -= 1
        self.on_eased(self)

    def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Let it forget a handle, or the prefix of a trajectory."""
        self._releases.append((trajectory, kv))
        self._wake.set()

    def drain(self) -> None:
        """Interrupt everything that it has; what it was not sent yet goes elsewhere at once."""
        self.draining = True
        for request in self._outbox:
            if (pending := self.inflight.get(request.id)) is not None:
                pending.working = False
                pending.finish(EndReason.INTERRUPTED)
        self._interrupts += [pending.request.id for pending in self.inflight.values() if pending.working]
        self._wake.set()

    def withdraw(self) -> None:
        """It is gone, or about to be."""
        self.lost = True
        self._wake.set()
        for pending in self.inflight.values():
            pending.finish(EndReason.INTERRUPTED)

    # --- its streams ---------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Give its chunks to the requests that they are of, until it is lost."""
        try:
            async for chunks in self.engine.events():
                self.heard_s = asyncio.get_running_loop().time()
                for chunk in chunks:
                    pending = self.inflight.get(chunk.request)
                    if pending is not None:
                        pending.take(chunk)
                    elif chunk.end is not None:
                        self._bury(chunk)
                if self.lost:
                    return
        except WorkerLost as error:
            self.on_lost(self, str(error))
            return
        self.on_lost(self, "its event stream ended")

    def _bury(self, chunk: Chunk) -> None:
        """The end of a request that nobody waits for."""
        trajectory = self._given_up.pop(chunk.request, None)
        if trajectory is not None and chunk.kv is not None:
            self.release(trajectory, chunk.kv)
        self._tell_idle()

    def _tell_idle(self) -> None:
        if self.draining and self.idle:
            self.on_idle()

    async def send(self) -> None:
        """Tell its engine what has come up, until it is lost."""
        while not self.lost:
            await self._wake.wait()
            self._wake.clear()
            requests = self._take_outbox()
            interrupts, self._interrupts = self._interrupts, []
            releases, self._releases = self._releases, []
            try:
                async with guard(CONTROL_TIMEOUT_S, f"worker {self.id}: taking requests"):
                    if interrupts:
                        await self.engine.interrupt(interrupts)
                    for trajectory, kv in releases:
                        await self.engine.release(trajectory, kv)
                    if requests:
                        await self.engine.submit(requests)
            except EngineError as error:
                self._refuse(requests, str(error))
            except (WorkerLost, GuardExpired) as error:
                self.on_lost(self, str(error))

    def _take_outbox(self) -> list[TurnRequest]:
        """What is to be sent: all but what was given up meanwhile."""
        outbox, self._outbox = self._outbox, []
        wanted: list[TurnRequest] = []
        dropped: list[TurnRequest] = []
        for request in outbox:
            pending = self.inflight.get(request.id)
            if pending is not None and not pending.ended.done():
                wanted.append(request)
                continue
            dropped.append(request)
            if pending is not None:
                pending.working = False
        if dropped:
            self._forget(dropped)
        return wanted

    def _forget(self, requests: list[TurnRequest]) -> None:
        """The engine never had them."""
        for request in requests:
            self._given_up.pop(request.id, None)
        self._tell_idle()

    def _refuse(self, requests: list[TurnRequest], error: str) -> None:
        """None of the requests was taken; the engine itself goes on."""
        for request in requests:
            if (pending := self.inflight.get(request.id)) is not None:
                pending.refuse(error)
        self._forget(requests)
