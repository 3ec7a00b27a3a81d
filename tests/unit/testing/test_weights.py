import zlib
from dataclasses import dataclass

import pytest

from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.testing.virtual_time import run_virtual
from pearl.testing.weights import FAKE_MODEL_HASH, FakeWeightStore, checksum, fake_manifest, fake_tensors

V0, V1, V2, V3 = map(WeightVersion, range(4))


@dataclass
class Model:
    version: WeightVersion
    state: bytes


def test_bytes_are_those_of_version_and_state() -> None:
    tensors = fake_tensors(V1, b"ab")
    assert tensors == {"embedding": b"1|ab1|ab1|ab1|ab", "head": b"1|ab1|ab"}
    assert fake_tensors(V2, b"ab") != tensors
    assert fake_tensors(V1, b"ac") != tensors


def test_a_manifest_describes_them() -> None:
    manifest = fake_manifest(1, state=b"ab")
    assert (manifest.version, manifest.model_hash, manifest.size_bytes) == (1, FAKE_MODEL_HASH, 24)
    assert [(s.name, s.shape, s.start, s.size_bytes) for s in manifest.shards] == [
        ("embedding", (16,), (0,), 16),
        ("head", (8,), (0,), 8),
    ]
    assert manifest.shards[1].checksum == f"crc32:{zlib.crc32(b'1|ab1|ab'):08x}"


def test_a_checksum_is_written_in_full() -> None:
    assert checksum(b"") == "crc32:00000000"


def test_what_the_trainer_holds_is_published() -> None:
    async def check() -> None:
        model = Model(V0, b"x")
        store = FakeWeightStore(model)
        first = await store.publish(V0)
        assert await store.fetch(first, ["head"]) == {"head": b"0|x0|x0|"}
        with pytest.raises(WeightsError, match="got version 1, want 0, the trainer's current one"):
            await store.publish(V1)
        model.version, model.state = V1, b"y"
        await store.publish(V1)
        assert (store.published, store.kept) == ([0, 1], (0, 1))

    run_virtual(check())


def test_two_are_kept() -> None:
    async def check() -> None:
        store = FakeWeightStore()
        for version in (V0, V1, V3):
            await store.publish(version)
        assert store.kept == (1, 3)
        with pytest.raises(WeightsError, match=r"version 0: no longer kept, want one of \[1, 3\]"):
            await store.fetch(fake_manifest(0), ["head"])
        with pytest.raises(WeightsError, match="got version 2, want > 3"):
            await store.publish(V2)

    run_virtual(check())


def test_two_versions_must_fit_the_budget() -> None:
    async def check() -> None:
        with pytest.raises(WeightsError, match="two versions of 24 bytes, want them within 47"):
            await FakeWeightStore(budget_bytes=47).publish(V0)
        assert (await FakeWeightStore(budget_bytes=48).publish(V0)).version == 0

    run_virtual(check())


def test_damage_is_found_and_named() -> None:
    async def check() -> None:
        store = FakeWeightStore()
        manifest = await store.publish(V0)
        store.damage(V0, "head")
        assert set(await store.fetch(manifest, ["embedding"])) == {"embedding"}
        with pytest.raises(WeightsError, match="head: got checksum"):
            await store.fetch(manifest, ["embedding", "head"])
        with pytest.raises(WeightsError, match="got name 'tail', want one of"):
            await store.fetch(manifest, ["tail"])

    run_virtual(check())


def test_a_version_that_was_forgotten_is_not_the_newest() -> None:
    async def check() -> None:
        store = FakeWeightStore()
        first = await store.publish(V0)
        await store.publish(V1)
        store.forget(V1)
        assert await store.newest() == first
        store.forget(V0)
        assert await store.newest() is None

    run_virtual(check())
