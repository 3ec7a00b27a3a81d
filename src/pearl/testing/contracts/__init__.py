"""Contract suites: what every implementation of a port must do, as pytest classes to subclass.

A subclass gives the factory that makes what is tested, and says what it cannot do:

    class TestMyEngine(EngineContract):
        supports_pd = False

        @asynccontextmanager
        async def engines(self, count):
            yield [EngineSubject(engine=..., vocab=..., manifest=..., foreign_manifest=...) for _ in range(count)]
"""

import pytest

_SUITES = ("codec", "engine", "engine_probe", "environment", "fleet", "gpu_source", "journal", "trainer", "weights")

# So that a failing suite says what it got, as a test file does.
pytest.register_assert_rewrite(*(f"{__name__}.{suite}" for suite in _SUITES))
