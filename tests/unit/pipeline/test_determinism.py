"""The same world twice is the same run: entry for entry, whatever the process's hash seed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys

from pearl.records.ids import WorkerId
from pearl.records.trajectory import Task
from pearl.testing.engine import FakeEngineConfig
from pearl.testing.environment import Behaviour, Fault
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_recipe


def script(task: Task, attempt: int) -> Behaviour:
    """Faults, stragglers and ties."""
    number = int(task.id.removeprefix("fake#"))
    fault = Fault.LOST if (number + attempt) % 5 == 0 else Fault.HANG if (number * 7 + attempt) % 11 == 0 else None
    return Behaviour(turns=1 + number % 3, step_s=float(number % 4), reward=number / 8, fault=fault)


def journal_of_a_run() -> list[str]:
    recipe = fake_recipe(
        run={"steps": 5},
        engine={"shape": "3C"},
        environment={"kind": "fake", "slots": 12},
        rollout={"groups_per_batch": 3, "group_size": 3, "max_staleness": 2, "straggler_timeout_s": 150},
    )
    world = FakeWorld(
        recipe,
        engine=FakeEngineConfig(token_s=0.1, load_s=1),
        script=script,
        train_s=3,
        start_s=2,
    )

    async def work() -> None:
        loop = asyncio.get_running_loop()
        for at_s, worker in ((5, 0), (9, 1), (9, 2), (30, 0)):
            loop.call_at(at_s, lambda worker=worker: world.fleet.engines[WorkerId(worker)].kill())
        await world.run()

    run_virtual(work())
    world.check_ledger()
    return [repr(entry) for entry in world.journal.entries]


def test_the_same_world_twice_gives_the_same_journal() -> None:
    first, second = journal_of_a_run(), journal_of_a_run()
    assert first == second
    assert len(first) > 100


def test_the_journal_does_not_depend_on_the_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, __file__],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "77")
    }
    assert len(digests) == 1


if __name__ == "__main__":
    print(hashlib.sha256("\n".join(journal_of_a_run()).encode()).hexdigest())
