from __future__ import annotations

import hashlib
import subprocess
import sys

from pearl.pipeline.tasks import TaskStream, derive_seed

STREAM = TaskStream(environment="maze", params={"size": 5}, seed=11)


def test_a_seed_is_the_hash_of_its_parts_less_one_bit() -> None:
    digest = hashlib.blake2b(b"task|11|3", digest_size=8).digest()
    assert derive_seed("task", 11, 3) == int.from_bytes(digest, "little") // 2


def test_seeds_fit_what_sampling_and_environments_take() -> None:
    assert all(0 <= STREAM.sampling_seed(group, attempt) < 2**63 for group in range(200) for attempt in range(5))
    assert all(0 <= STREAM.task(group).seed < 2**31 for group in range(200))


def test_groups_and_attempts_draw_apart() -> None:
    assert len({STREAM.task(group).seed for group in range(500)}) == 500
    assert len({STREAM.sampling_seed(group, attempt) for group in range(100) for attempt in range(10)}) == 1000


def test_a_task_is_a_function_of_seed_and_group() -> None:
    same = TaskStream(environment="maze", params={"size": 5}, seed=11)
    assert STREAM.task(3) == same.task(3)
    assert STREAM.task(3).id == "maze#3"
    assert STREAM.task(3).params == {"size": 5}
    assert TaskStream(environment="maze", params={"size": 5}, seed=12).task(3).seed != STREAM.task(3).seed


def test_seeds_are_alike_in_every_process() -> None:
    code = "from pearl.pipeline.tasks import derive_seed; print(derive_seed('a', 1))"
    seeds = [
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert seeds == [f"{derive_seed('a', 1)}\n"] * 2
