"""The ports of the simulated world beside engine and fleet keep their contracts, on virtual time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass

from pearl.records.ids import WeightVersion
from pearl.sim.network import Network
from pearl.sim.weights import SimWeightStore
from pearl.testing.contracts.weights import WeightStoreContract, WeightStoreSubject
from pearl.virtual_time import run_virtual


class OnVirtualTime:
    """Runs a suite on a clock that jumps."""

    def run_work(self, work: Coroutine[object, object, None]) -> None:
        run_virtual(work)


@dataclass
class _Versions:
    version: WeightVersion = WeightVersion(0)  # noqa: RUF009 - a number


class TestSimWeightStore(OnVirtualTime, WeightStoreContract):
    @asynccontextmanager
    async def store(self) -> AsyncIterator[WeightStoreSubject]:
        trainer = _Versions()
        store = SimWeightStore(
            trainer, Network(lambda _: 1e9), {"embedding": 64, "head": 16}, gather_s=3.0, budget_bytes=160
        )

        async def advance() -> WeightVersion:
            trainer.version = WeightVersion(trainer.version + 1)
            return trainer.version

        yield WeightStoreSubject(
            store=store,
            advance=advance,
            damage=lambda manifest, name: store.damage(manifest.version, name),
        )
