"""Contract of `WeightStore`: versions rise, two are kept, bytes are checked."""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

import pytest

from pearl.errors import WeightsError
from pearl.ports import WeightStore
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest
from pearl.testing.contracts.base import Contract


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightStoreSubject:
    """A weight store under test, empty, over a trainer at version 0."""

    store: WeightStore
    advance: Callable[[], Awaitable[WeightVersion]]
    """One training step; the trainer's version after it."""
    damage: Callable[[Manifest, str], None]
    """Changes a byte of a published shard where it is kept."""


class WeightStoreContract(Contract):
    """Subclass it and give `store`."""

    def store(self) -> AbstractAsyncContextManager[WeightStoreSubject]:
        """A fresh store."""
        raise NotImplementedError

    def test_what_is_published_can_be_fetched(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                assert await subject.store.newest() is None
                manifest = await subject.store.publish(WeightVersion(0))
                assert manifest.version == 0
                assert await subject.store.newest() == manifest
                names = [shard.name for shard in manifest.shards]
                assert names
                assert len(set(names)) == len(names)
                raw = await subject.store.fetch(manifest, names)
                assert set(raw) == set(names)
                for shard in manifest.shards:
                    assert len(raw[shard.name]) == shard.size_bytes
                    assert shard.checksum == f"crc32:{zlib.crc32(raw[shard.name]):08x}"
                    assert shard.locations
                assert set(await subject.store.fetch(manifest, names[:1])) == {names[0]}

        self.check(check())

    def test_a_training_step_changes_bytes_and_not_the_model(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                first = await subject.store.publish(WeightVersion(0))
                second = await subject.store.publish(await subject.advance())
                assert (first.version, second.version) == (0, 1)
                assert second.model_hash == first.model_hash
                assert [s.name for s in second.shards] == [s.name for s in first.shards]
                assert [s.checksum for s in second.shards] != [s.checksum for s in first.shards]

        self.check(check())

    def test_two_versions_are_kept(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                manifests = [await subject.store.publish(WeightVersion(0))]
                manifests += [await subject.store.publish(await subject.advance()) for _ in range(3)]
                name = manifests[0].shards[0].name
                for manifest in manifests[2:]:
                    assert set(await subject.store.fetch(manifest, [name])) == {name}
                for manifest in manifests[:2]:
                    with pytest.raises(WeightsError):
                        await subject.store.fetch(manifest, [name])
                assert await subject.store.newest() == manifests[3]

        self.check(check())

    def test_a_version_must_rise(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                newest = await subject.store.publish(await subject.advance())
                for version in (1, 0):
                    with pytest.raises(WeightsError):
                        await subject.store.publish(WeightVersion(version))
                assert await subject.store.newest() == newest
                assert await subject.store.fetch(newest, [newest.shards[0].name])

        self.check(check())

    def test_unknown_names_and_versions_are_refused(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                manifest = await subject.store.publish(WeightVersion(0))
                name = manifest.shards[0].name
                with pytest.raises(WeightsError):
                    await subject.store.fetch(manifest, [name, "no.such.tensor"])
                with pytest.raises(WeightsError):
                    await subject.store.fetch(replace(manifest, version=WeightVersion(7)), [name])

        self.check(check())

    def test_damage_is_noticed(self) -> None:
        async def check() -> None:
            async with self.store() as subject:
                manifest = await subject.store.publish(WeightVersion(0))
                name = manifest.shards[-1].name
                subject.damage(manifest, name)
                with pytest.raises(WeightsError):
                    await subject.store.fetch(manifest, [name])

        self.check(check())
