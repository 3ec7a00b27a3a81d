from collections.abc import Callable

import pytest


@pytest.fixture
def rejected() -> Callable[[Callable[[], None]], None]:
    """Runs a test of a suite that must fail."""

    def run(test: Callable[[], None]) -> None:
        try:
            test()
        except (Exception, pytest.fail.Exception):
            return
        raise AssertionError("the suite accepted what breaks the contract")

    return run
