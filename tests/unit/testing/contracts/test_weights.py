"""The suite accepts the fake, and finds broken stores made from it."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest, TrainingBatch
from pearl.testing.contracts.weights import WeightStoreContract, WeightStoreSubject
from pearl.testing.trainer import FakeTrainer
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import FakeWeightStore, fake_manifest, fake_tensors


class KeepsOne(FakeWeightStore):
    async def publish(self, version: WeightVersion) -> Manifest:
        manifest = await super().publish(version)
        for old in self.kept[:-1]:
            self.forget(old)
        return manifest


class KeepsAll(FakeWeightStore):
    def forget(self, version: WeightVersion) -> None:
        pass


class PublishesTheSameTwice(FakeWeightStore):
    async def publish(self, version: WeightVersion) -> Manifest:
        self.published.clear()
        return await super().publish(version)


class ForgetsTheNewest(FakeWeightStore):
    async def newest(self) -> Manifest | None:
        return self._manifests[self.kept[0]] if self.kept else None


class TrustsItsBytes(FakeWeightStore):
    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        return {name: self._tensors[manifest.version][name] for name in names}


class MakesUpWhatIsMissing(FakeWeightStore):
    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        return {name: fake_tensors(manifest.version).get(name, b"") for name in names}


class FetchesEverything(FakeWeightStore):
    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        return await super().fetch(manifest, [shard.name for shard in manifest.shards])


class NeverChanges(FakeWeightStore):
    async def publish(self, version: WeightVersion) -> Manifest:
        return replace(await super().publish(version), shards=fake_manifest(0).shards)


class Suite(WeightStoreContract):
    def __init__(self, make: type[FakeWeightStore]) -> None:
        self.make = make

    def run_work(self, work) -> None:  # type: ignore[no-untyped-def]
        run_virtual(work)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[WeightStoreSubject]:
        trainer = FakeTrainer()
        store = self.make(trainer)

        async def advance() -> WeightVersion:
            return (await trainer.train(TrainingBatch(version=trainer.version, samples=()))).version

        yield WeightStoreSubject(
            store=store, advance=advance, damage=lambda manifest, name: store.damage(manifest.version, name)
        )


BREACHES = [
    (KeepsOne, "two_versions_are_kept"),
    (KeepsAll, "two_versions_are_kept"),
    (MakesUpWhatIsMissing, "two_versions_are_kept"),
    (ForgetsTheNewest, "two_versions_are_kept"),
    (PublishesTheSameTwice, "a_version_must_rise"),
    (TrustsItsBytes, "damage_is_noticed"),
    (TrustsItsBytes, "unknown_names_and_versions_are_refused"),
    (MakesUpWhatIsMissing, "what_is_published_can_be_fetched"),
    (FetchesEverything, "what_is_published_can_be_fetched"),
    (NeverChanges, "a_training_step_changes_bytes_and_not_the_model"),
]


@pytest.mark.parametrize("name", sorted({name for _, name in BREACHES}))
def test_a_sound_store_is_accepted(name: str) -> None:
    getattr(Suite(FakeWeightStore), f"test_{name}")()


@pytest.mark.parametrize(("broken", "name"), BREACHES)
def test_a_broken_store_is_found(
    broken: type[FakeWeightStore], name: str, rejected: Callable[[Callable[[], None]], None]
) -> None:
    rejected(getattr(Suite(broken), f"test_{name}"))
