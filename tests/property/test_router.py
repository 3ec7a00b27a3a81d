"""Turns of many trajectories through a router whose workers die, fail, drain and change roles, on virtual time.

Invariants, as long as one worker serves: every turn has exactly the tokens that one undisturbed worker would have drawn,
with a log-probability and a version for each; when all trajectories have ended, no worker that is left holds a prefix or a
handle of one, has load, or anything to end.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pearl.core.state import Role
from pearl.errors import EngineError
from pearl.records.ids import TrajectoryId, WorkerId
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.training import LoadMode
from pearl.testing.weights import fake_manifest
from tests.unit.pipeline._router import PROMPT, House, in_house, job, now_s, undisturbed

ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@dataclass(frozen=True)
class Play:
    """One trajectory."""

    begins_s: float
    observations: tuple[int, ...]
    cancelled_s: float | None
    """Of its life."""


@dataclass(frozen=True)
class Event:
    at_s: float
    worker: int
    kind: str


@dataclass(frozen=True)
class Schedule:
    letters: str
    append: int
    readback: bool
    ttl_s: float
    plays: tuple[Play, ...]
    events: tuple[Event, ...]


KINDS = ("kill", "to prefill", "to decode", "to colocated", "fail", "forget", "recompute", "keep_kv")

schedules = st.builds(
    Schedule,
    letters=st.text("PDC", min_size=1, max_size=4),
    append=st.sampled_from([0, 10, 64]),
    readback=st.booleans(),
    ttl_s=st.sampled_from([0.05, 1.0, 60.0]),
    plays=st.lists(
        st.builds(
            Play,
            begins_s=st.floats(0, 4),
            observations=st.lists(st.integers(1, 90), max_size=3).map(tuple),
            cancelled_s=st.one_of(st.none(), st.floats(0, 5)),
        ),
        min_size=1,
        max_size=6,
    ).map(tuple),
    events=st.lists(
        st.builds(Event, at_s=st.floats(0, 6), worker=st.integers(1, 3), kind=st.sampled_from(KINDS)), max_size=6
    ).map(tuple),
)


async def _turns(house: House, name: str, play: Play) -> None:
    await asyncio.sleep(play.begins_s)
    context: Tokens = PROMPT
    try:
        async with asyncio.timeout(play.cancelled_s):
            for turn, new in enumerate((*play.observations, 0)):
                completion = await house.router.generate(job(name, turn=turn, context=context))
                assert completion.token_ids.tolist() == undisturbed(7, 12, len(context))
                assert len(completion.logprobs) == len(completion.versions) == 12
                context = context + completion.token_ids + TokenIds([5] * new)
    except (TimeoutError, EngineError):
        pass
    finally:
        house.router.release(TrajectoryId(name))


async def _disturb(house: House, schedule: Schedule) -> None:
    loads = 0
    for event in sorted(schedule.events, key=lambda one: one.at_s):
        await asyncio.sleep(max(0.0, event.at_s - now_s()))
        # Worker 0 lives, so that there is always one.
        worker = WorkerId(event.worker % len(schedule.letters))
        engine = house.engines[worker]
        match event.kind.split():
            case ["to", role]:
                if await house.router.drain(worker):
                    assert not engine.busy
                    house.router.set_role(worker, Role(role))
            case ["kill"] if worker != 0:
                engine.kill()
            case ["fail"]:
                engine.fail_next(2)
            case ["forget"]:
                engine.kv.forget_all()
            case ["recompute" | "keep_kv"]:
                loads += 1
                await house.router.load(fake_manifest(loads), LoadMode(event.kind))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules)
def test_tokens_are_right_and_nothing_is_left_behind(schedule: Schedule) -> None:
    async def test(house: House) -> None:
        house.add_shape(schedule.letters, ttl_s=schedule.ttl_s)
        tasks = [house.nursery.spawn(_turns(house, f"t{n}", play), f"t{n}") for n, play in enumerate(schedule.plays)]
        tasks.append(house.nursery.spawn(_disturb(house, schedule), "disturb"))
        await asyncio.gather(*tasks)
        await asyncio.sleep(1)
        house.engines = {n: engine for n, engine in house.engines.items() if not engine.gone}
        assert house.kv_left() == []
        for seat in house.router._seats.values():
            assert (seat.load, seat.idle, house.engines[seat.id].busy) == (0, True, False)
        assert len(house.router._trails) == 0

    in_house(test, append=schedule.append, readback=schedule.readback)
