import asyncio

import pytest

from pearl.testing.mailbox import Mailbox
from pearl.testing.virtual_time import run_virtual


def test_what_is_there_is_taken_at_once_and_in_order() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        for n in range(3):
            box.put(n)
        assert len(box) == 3
        assert await box.take() == (0, 1, 2)
        box.put(3)
        assert await box.take() == (3,)

    run_virtual(check())


def test_a_reader_waits_for_the_first_item() -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        box: Mailbox[str] = Mailbox()
        loop.call_later(5, box.put, "late")
        assert await box.take() == ("late",)
        assert loop.time() == 5

    run_virtual(check())


def test_a_reader_that_gave_up_takes_nothing_along() -> None:
    async def check() -> None:
        box: Mailbox[str] = Mailbox()
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        box.put("kept")
        assert await box.take() == ("kept",)

    run_virtual(check())


@pytest.mark.parametrize("drop", [True, False])
def test_a_closed_box_ends_with_its_error(drop: bool) -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        box.put(1)
        box.close(KeyError("end"), drop=drop)
        box.put(2)
        if not drop:
            assert await box.take() == (1,)
        for _ in range(2):
            with pytest.raises(KeyError):
                await box.take()

    run_virtual(check())


def test_closing_wakes_the_reader_and_the_first_error_counts() -> None:
    async def check() -> None:
        box: Mailbox[int] = Mailbox()
        reader = asyncio.create_task(box.take())
        await asyncio.sleep(1)
        box.close(KeyError("first"), drop=True)
        box.close(ValueError("second"), drop=True)
        with pytest.raises(KeyError):
            await reader

    run_virtual(check())
