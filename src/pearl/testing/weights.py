"""A fake weight store: versions in memory, two kept, with damage on request."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

from pearl.errors import WeightsError
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest, Shard, model_hash

_TENSORS = (("embedding", "U8", (16,)), ("head", "U8", (8,)))
FAKE_MODEL_HASH = model_hash(_TENSORS)
"""Of the model that all fakes hold."""


class FakeWeights(Protocol):
    """What a fake weight store publishes."""

    @property
    def version(self) -> WeightVersion: ...

    @property
    def state(self) -> bytes:
        """Bytes that differ between versions."""


def fake_tensors(version: WeightVersion, state: bytes = b"") -> dict[str, bytes]:
    """Raw bytes of every tensor of the fake model, by name."""
    text = f"{version}|".encode() + state
    return {name: (text * shape[0])[: shape[0]] for name, _, shape in _TENSORS}


def fake_manifest(version: int, *, hash_: str = FAKE_MODEL_HASH, state: bytes = b"") -> Manifest:
    """The manifest that a fake store publishes for a version."""
    tensors = fake_tensors(WeightVersion(version), state)
    shards = tuple(
        Shard(
            name=name,
            dtype=dtype,
            shape=shape,
            start=(0,) * len(shape),
            size_bytes=len(tensors[name]),
            checksum=checksum(tensors[name]),
            locations=(f"memory:{version}/{name}",),
        )
        for name, dtype, shape in _TENSORS
    )
    return Manifest(version=WeightVersion(version), model_hash=hash_, shards=shards)


def checksum(raw: bytes) -> str:
    """CRC-32 as `Shard.checksum` writes it."""
    return f"crc32:{zlib.crc32(raw):08x}"


class FakeWeightStore:
    """A `WeightStore` in this process."""

    def __init__(self, trainer: FakeWeights | None = None, *, budget_bytes: int | None = None) -> None:
        """`trainer` says what is published; without one, the bytes are made up from the version."""
        self._trainer = trainer
        self._budget_bytes = budget_bytes
        self._manifests: dict[WeightVersion, Manifest] = {}
        self._tensors: dict[WeightVersion, dict[str, bytes]] = {}
        self.published: list[WeightVersion] = []
        """Every version ever published, in order."""

    @property
    def kept(self) -> tuple[WeightVersion, ...]:
        """Versions that can be fetched, oldest first."""
        return tuple(self._manifests)

    async def publish(self, version: WeightVersion) -> Manifest:
        """Keep a version and forget all but the one before it."""
        if self.published and version <= self.published[-1]:
            raise WeightsError(f"weight store: publish: got version {version}, want > {self.published[-1]}")
        if self._trainer is not None and self._trainer.version != version:
            raise WeightsError(
                f"weight store: publish: got version {version}, want {self._trainer.version}, the trainer's current one"
            )
        state = self._trainer.state if self._trainer is not None else b""
        manifest = fake_manifest(version, state=state)
        if self._budget_bytes is not None and 2 * manifest.size_bytes > self._budget_bytes:
            raise WeightsError(
                f"weight store: publish of version {version}: got two versions of {manifest.size_bytes} bytes, "
                f"want them within {self._budget_bytes} bytes; raise weights.host_budget_gib"
            )
        for old in self.kept[:-1]:
            self.forget(old)
        self._manifests[version] = manifest
        self._tensors[version] = fake_tensors(version, state)
        self.published.append(version)
        return manifest

    async def newest(self) -> Manifest | None:
        """The last version published."""
        return self._manifests[self.kept[-1]] if self._manifests else None

    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        """Raw bytes by name, checked."""
        tensors = self._tensors.get(manifest.version)
        where = f"weight store: fetch of version {manifest.version}"
        if tensors is None:
            raise WeightsError(f"{where}: no longer kept, want one of {list(self.kept)}; fetch the newest")
        expected = {shard.name: shard.checksum for shard in manifest.shards}
        fetched: dict[str, bytes] = {}
        for name in names:
            if name not in expected or name not in tensors:
                raise WeightsError(f"{where}: got name {name!r}, want one of {sorted(expected)}")
            if (found := checksum(tensors[name])) != expected[name]:
                raise WeightsError(f"{where}: {name}: got checksum {found}, want {expected[name]}; publish again")
            fetched[name] = tensors[name]
        return fetched

    def damage(self, version: WeightVersion, name: str) -> None:
        """Flip a bit of a kept tensor."""
        raw = self._tensors[version][name]
        self._tensors[version][name] = bytes([raw[0] ^ 1]) + raw[1:]

    def forget(self, version: WeightVersion) -> None:
        """Lose a kept version."""
        del self._manifests[version]
        del self._tensors[version]
