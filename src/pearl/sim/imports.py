"""KV on its way to a simulated engine: one task per import, between its admission and the boundary that it takes effect at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pearl.core.profile import HandOff
from pearl.errors import WorkerLost
from pearl.records.ids import RequestId, WorkerId
from pearl.records.turn import KvHandle
from pearl.sim.batching import Batching
from pearl.sim.kv import SimKvPayload
from pearl.sim.process import Process
from pearl.sim.sequence import Phase, Sequence
from pearl.sim.settings import KvLinks, end_name


class Imports:
    """Of one engine."""

    def __init__(
        self,
        worker: WorkerId,
        process: Process,
        batching: Batching,
        links: KvLinks | None,
        *,
        hand_off: HandOff | None,
        settle: Callable[[], None],
    ) -> None:
        """`settle` is called when something has changed."""
        self._worker, self._process, self._batching, self._links = worker, process, batching, links
        self._hand_off, self._settle = hand_off, settle
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    def begin(self, sequence: Sequence) -> None:
        """Fetch the KV of a request that has room for it."""
        handle = sequence.imports
        if handle is not None and sequence.phase is Phase.IMPORTING:
            work = self._fetch(sequence, handle)
            self._tasks[sequence.request.id] = self._process.spawn(work, f"KV of {sequence.request.id}")

    def cancel(self, sequence: Sequence) -> None:
        """A request has ended; what it does not fetch is ignored."""
        if self._tasks and (task := self._tasks.pop(sequence.request.id, None)) is not None:
            task.cancel()

    def cancel_all(self) -> None:
        """KV of before is no use any more."""
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            task.cancel()

    async def _fetch(self, sequence: Sequence, handle: KvHandle) -> None:
        payload, request = handle.payload, sequence.request
        assert isinstance(payload, SimKvPayload), "checked when the request came"
        now_s = asyncio.get_running_loop().time
        error = payload.exports.refusal(handle, payload.trajectory, now_s())
        if error is None:
            error = await self._transfer(handle) or payload.exports.refusal(handle, payload.trajectory, now_s())
        await self._process.answer()
        self._tasks.pop(request.id, None)
        if error is None:
            payload.exports.give_back(payload.trajectory, handle.id)
            self._batching.imported(sequence, now_s())
        else:
            self._batching.fail(sequence, f"worker {self._worker}: request {request.id}: {error}", now_s())
        self._settle()

    async def _transfer(self, handle: KvHandle) -> str | None:
        """Move the KV; why it did not arrive, if it did not."""
        hand_off = self._hand_off
        if self._links is None:
            await asyncio.sleep(0.0 if hand_off is None else hand_off.seconds(handle.size_bytes))
            return None
        if hand_off is not None:
            await asyncio.sleep(hand_off.fixed_s)
        try:
            await self._links.transfer(end_name(handle.owner), end_name(self._worker), handle.size_bytes)
        except WorkerLost as lost:
            return f"KV handle {handle.id}: {lost}; send the whole context"
        return None
