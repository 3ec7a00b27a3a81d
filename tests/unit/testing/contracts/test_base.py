import asyncio

import pytest

from pearl.testing.contracts.base import Contract
from pearl.testing.virtual_time import run_virtual


class OnVirtualTime(Contract):
    guard_s = 5

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)


async def sleep(seconds: float, done: list[float]) -> None:
    await asyncio.sleep(seconds)
    done.append(seconds)


def test_work_is_run_to_its_end() -> None:
    done: list[float] = []
    Contract().check(sleep(0, done))
    OnVirtualTime().check(sleep(4.9, done))
    assert done == [0, 4.9]


def test_work_that_does_not_end_is_stopped_by_the_guard() -> None:
    done: list[float] = []
    with pytest.raises(TimeoutError):
        OnVirtualTime().check(sleep(5.1, done))
    assert done == []


def test_errors_come_out() -> None:
    async def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError):
        Contract().check(fail())
