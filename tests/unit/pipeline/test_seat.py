"""One worker: what reaches its engine, in which order, and when it has nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import pytest

from pearl.core.state import Role
from pearl.errors import EngineError
from pearl.pipeline.concurrency import Nursery
from pearl.pipeline.seat import Seat
from pearl.pipeline.turns import Pending
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.turn import EndReason, KvHandle, Sampling, TurnRequest
from pearl.testing.virtual_time import run_virtual
from tests.unit.pipeline._router import PROMPT, Puppet
from tests.unit.pipeline.test_trails import handle

T = TypeVar("T")


class Scribe(Puppet):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.submit_s = 0.0
        self.refuses = False

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        self.told += [f"submit {request.id}" for request in requests]
        await asyncio.sleep(self.submit_s)
        if self.refuses:
            raise EngineError("no")

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        self.told += [f"interrupt {one}" for one in ids]

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        self.told.append(f"release {kv.id if kv else trajectory}")


class Desk:
    """A seat whose engine is a scribe."""

    def __init__(self, nursery: Nursery) -> None:
        self.engine = Scribe()
        self.idle_told = 0
        self.lost: list[str] = []
        self.seat = Seat(
            WorkerId(0),
            self.engine,
            WeightVersion(0),
            Role.COLOCATED,
            lambda _, detail: self.lost.append(detail),
            self._idle,
        )
        nursery.spawn(self.seat.listen(), name="listen")
        nursery.spawn(self.seat.send(), name="send")

    def _idle(self) -> None:
        self.idle_told += 1

    def begin(self, name: str) -> Pending:
        request = TurnRequest(
            id=RequestId(name),
            trajectory=TrajectoryId(f"of {name}"),
            turn=0,
            context=PROMPT,
            sampling=Sampling(seed=1),
            max_new_tokens=9,
            min_version=WeightVersion(0),
        )
        return self.seat.begin(request, None)


def at_desk(test: Callable[[Desk], Awaitable[T]]) -> T:
    async def work() -> T:
        async with Nursery() as nursery:
            return await test(Desk(nursery))

    return run_virtual(work())


def test_interrupts_and_releases_go_before_requests() -> None:
    async def test(desk: Desk) -> list[str]:
        first = desk.begin("a")
        await asyncio.sleep(1)
        desk.begin("b")
        desk.seat.release(TrajectoryId("t"))
        desk.seat.release(TrajectoryId("t"), handle(3))
        desk.seat.end(first)
        await asyncio.sleep(1)
        return desk.engine.told

    assert at_desk(test) == ["submit a", "interrupt a", "release t", "release 3", "submit b"]


def test_the_load_is_what_is_waited_for() -> None:
    async def test(desk: Desk) -> list[tuple[int, bool]]:
        seen = []
        first, second = desk.begin("a"), desk.begin("b")
        seen.append((desk.seat.load, desk.seat.idle))
        await asyncio.sleep(1)
        desk.engine.say(first.request, [1], end=EndReason.STOP)
        await asyncio.sleep(1)
        desk.seat.end(first)
        seen.append((desk.seat.load, desk.seat.idle))
        desk.seat.end(second)  # given up: the engine still works on it
        seen.append((desk.seat.load, desk.seat.idle))
        await asyncio.sleep(1)
        desk.engine.say(second.request, [], end=EndReason.INTERRUPTED)
        await asyncio.sleep(1)
        seen.append((desk.seat.load, desk.seat.idle))
        return seen

    assert at_desk(test) == [(2, False), (1, False), (0, False), (0, True)]


@pytest.mark.parametrize("refuses", [False, True])
def test_a_request_given_up_while_it_is_being_taken_is_interrupted_if_it_was(refuses: bool) -> None:
    async def test(desk: Desk) -> tuple[list[str], bool]:
        desk.engine.submit_s, desk.engine.refuses = 5.0, refuses
        first = desk.begin("a")
        await asyncio.sleep(1)
        desk.seat.end(first)
        await asyncio.sleep(10)
        return desk.engine.told, desk.seat.idle

    assert at_desk(test) == (["submit a", "interrupt a"], refuses)


def test_the_handle_of_a_request_that_nobody_waits_for_is_given_back() -> None:
    async def test(desk: Desk) -> list[str]:
        first = desk.begin("a")
        await asyncio.sleep(1)
        desk.seat.end(first)
        desk.engine.say(first.request, [1], end=EndReason.INTERRUPTED, kv=handle(0))
        await asyncio.sleep(1)
        return desk.engine.told

    assert at_desk(test) == ["submit a", "interrupt a", "release 0"]


def test_a_draining_worker_says_when_it_has_nothing_left() -> None:
    async def test(desk: Desk) -> tuple[list[str], list[int]]:
        sent = desk.begin("a")
        await asyncio.sleep(1)
        unsent = desk.begin("b")
        desk.seat.drain()
        assert await unsent.ended is EndReason.INTERRUPTED
        desk.seat.end(unsent)
        await asyncio.sleep(1)
        told = [desk.idle_told]
        desk.engine.say(sent.request, [1], end=EndReason.INTERRUPTED)
        assert await sent.ended is EndReason.INTERRUPTED
        desk.seat.end(sent)
        told.append(desk.idle_told)
        return desk.engine.told, told

    assert at_desk(test) == (["submit a", "interrupt a"], [0, 1])


def test_a_worker_that_leaves_ends_its_requests() -> None:
    async def test(desk: Desk) -> tuple[EndReason, bool]:
        first = desk.begin("a")
        await asyncio.sleep(1)
        desk.seat.withdraw()
        end = await first.ended
        desk.seat.end(first)
        return end, desk.seat.idle

    assert at_desk(test) == (EndReason.INTERRUPTED, True)
