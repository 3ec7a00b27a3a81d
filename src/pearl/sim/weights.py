"""A simulated weight store: versions take time to be gathered and to travel, and who has one serves it on.

Laws: at most two versions are kept; a holder serves a version to at most `fan_out` receivers at once, and receivers are
served in the order of asking, each by the holder that serves the fewest; a receiver that has a version is a holder of it
until it asks for another or leaves. Tensors are names and sizes: bytes are made up when fetched, and only of small ones.
"""

from __future__ import annotations

import asyncio
import math
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from pearl.errors import WeightsError, WorkerLost
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest, Shard, model_hash
from pearl.sim.network import Network

SOURCE = "trainer"
"""The network's end that published weights come from."""

_MADE_UP_BYTES = 1 << 20
"""Largest tensor that is made up on `fetch`; larger ones only travel."""


class Published(Protocol):
    """Whose weights are published."""

    @property
    def version(self) -> WeightVersion:
        """Its current one."""


class _Spread:
    """Who has one version, and who waits for it."""

    def __init__(self, fan_out: int) -> None:
        self._serving: list[dict[str, None]] = [{} for _ in range(fan_out + 1)]
        """Holders by how many receivers they serve, each in order of becoming so."""
        self._load: dict[str, int] = {}
        self._busy: dict[str, int] = {}
        """Holders that were taken out -> receivers that they still serve."""
        self.waiting: deque[asyncio.Future[str]] = deque()

    def add(self, holder: str) -> None:
        load = self._busy.pop(holder, 0)
        self._load[holder] = load
        self._serving[load][holder] = None
        self._serve()

    def remove(self, holder: str) -> None:
        """Let a holder serve nobody new."""
        load = self._load.pop(holder, None)
        if load is not None:
            del self._serving[load][holder]
            if load:
                self._busy[holder] = load

    async def take(self) -> str:
        """The next holder that can serve."""
        if not self.waiting and (holder := self._least()) is not None:
            return holder
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            raise

    def give_back(self, holder: str) -> None:
        """A holder serves one less."""
        if holder in self._load:
            self._move(holder, -1)
            self._serve()
        elif holder in self._busy:
            self._busy[holder] -= 1
            if not self._busy[holder]:
                del self._busy[holder]

    def _serve(self) -> None:
        while self.waiting:
            if self.waiting[0].done():
                self.waiting.popleft()
            elif (holder := self._least()) is not None:
                self.waiting.popleft().set_result(holder)
            else:
                return

    def _least(self) -> str | None:
        for holders in self._serving[:-1]:
            if holders:
                holder = next(iter(holders))
                self._move(holder, 1)
                return holder
        return None

    def _move(self, holder: str, by: int) -> None:
        load = self._load[holder]
        del self._serving[load][holder]
        self._load[holder] = load + by
        self._serving[load + by][holder] = None


class SimWeightStore:
    """A `WeightStore` whose versions travel over a `Network`."""

    def __init__(
        self,
        trainer: Published,
        network: Network,
        tensors: Mapping[str, int],
        *,
        hash_of_model: str | None = None,
        gather_s: float | Callable[[int], float] = 0.0,
        fan_out: int = 2,
        peers: bool = True,
        budget_bytes: int | None = None,
    ) -> None:
        """`tensors`: name -> bytes of each; `hash_of_model`: what is published as such, for engines that refuse others.

        `gather_s`: seconds of a publication, or those of so many bytes. `peers`: whether receivers serve on what they
        have. `budget_bytes`: host memory for two versions, None for no bound.

        Raises:
            ValueError: a number out of range.
        """
        if not tensors or min(tensors.values()) < 0:
            raise ValueError(f"weight store: tensors: got {dict(tensors)}, want at least one, none below 0 bytes")
        if fan_out < 1:
            raise ValueError(f"weight store: fan_out: got {fan_out}, want >= 1")
        self._trainer = trainer
        self._network = network
        self._tensors = dict(tensors)
        self._gather_s = gather_s
        self._fan_out = fan_out
        self._peers = peers
        self._budget_bytes = budget_bytes
        made_up = model_hash((name, "U8", (size,)) for name, size in self._tensors.items())
        self.model_hash = made_up if hash_of_model is None else hash_of_model
        """Of all that is published."""
        self._kept: dict[WeightVersion, Manifest] = {}
        self._spreads: dict[WeightVersion, _Spread] = {}
        self._held: dict[str, WeightVersion] = {}
        """Receiver -> the version that it serves on."""
        self._left: dict[str, int] = {}
        """Receiver -> how often it has left."""
        self._damaged: dict[tuple[WeightVersion, str], None] = {}
        self.published: list[WeightVersion] = []
        """Every version ever published, in order."""
        self.pulls: list[tuple[WeightVersion, str, str]] = []
        """`(version, holder, receiver)` of every pull that was completed, in order."""

    @property
    def size_bytes(self) -> int:
        """Of one version."""
        return sum(self._tensors.values())

    @property
    def kept(self) -> tuple[WeightVersion, ...]:
        """Versions that can be fetched and pulled, oldest first."""
        return tuple(self._kept)

    async def publish(self, version: WeightVersion) -> Manifest:
        """Gather the trainer's weights, which takes its time, and keep them with the version before."""
        if self.published and version <= self.published[-1]:
            raise WeightsError(f"weight store: publish: got version {version}, want > {self.published[-1]}")
        if self._trainer.version != version:
            raise WeightsError(
                f"weight store: publish: got version {version}, want {self._trainer.version}, the trainer's current one"
            )
        if self._budget_bytes is not None and 2 * self.size_bytes > self._budget_bytes:
            raise WeightsError(
                f"weight store: publish of version {version}: got two versions of {self.size_bytes} bytes, "
                f"want them within {self._budget_bytes} bytes; raise weights.host_budget_gib"
            )
        # There is room for two, the one that is being gathered included.
        for old in self.kept[:-1]:
            self._forget(old)
        gather_s = self._gather_s(self.size_bytes) if callable(self._gather_s) else self._gather_s
        if gather_s > 0:
            await asyncio.sleep(gather_s)
        manifest = self._manifest(version)
        self._kept[version] = manifest
        spread = self._spreads[version] = _Spread(self._fan_out)
        spread.add(SOURCE)
        self.published.append(version)
        return manifest

    async def newest(self) -> Manifest | None:
        """The last version published."""
        return self._kept[self.kept[-1]] if self._kept else None

    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        """Raw bytes by name, made up from version and name; those of large tensors are not to be had."""
        where = f"weight store: fetch of version {manifest.version}"
        self._check_kept(manifest.version, where)
        fetched: dict[str, bytes] = {}
        for name in names:
            size = self._tensors.get(name)
            if size is None:
                raise WeightsError(f"{where}: got name {name!r}, want one of {sorted(self._tensors)}")
            if size > _MADE_UP_BYTES:
                raise WeightsError(
                    f"{where}: {name}: got {size} simulated bytes, want at most {_MADE_UP_BYTES}; pull them instead"
                )
            self._check_whole(manifest.version, name, where)
            fetched[name] = _made_up(manifest.version, name, size)
        return fetched

    async def pull(self, receiver: str, manifest: Manifest) -> None:
        """Bring a whole version to a receiver, from whoever has it; returns when it is there.

        The receiver serves what it had to nobody new from now on, and serves the version on once it has it.

        Raises:
            WeightsError: the version is not kept, or damaged.
            WorkerLost: the receiver left meanwhile.
        """
        where = f"weight store: pull of version {manifest.version} by {receiver}"
        self._check_kept(manifest.version, where)
        self._stop_serving(receiver)
        holder = await self._travel(receiver, manifest, where)
        self._check_kept(manifest.version, where)
        for shard in manifest.shards:
            self._check_whole(manifest.version, shard.name, where)
        self.pulls.append((manifest.version, holder, receiver))
        if self._peers:
            self._stop_serving(receiver)
            self._held[receiver] = manifest.version
            self._spreads[manifest.version].add(receiver)

    def leave(self, receiver: str) -> None:
        """A receiver is gone, or has released its memory: it serves nobody, and what travels to or from it ends."""
        self._stop_serving(receiver)
        self._left[receiver] = self._left.get(receiver, 0) + 1
        self._network.lose(receiver)

    def damage(self, version: WeightVersion, name: str) -> None:
        """Spoil a kept tensor."""
        self._damaged[version, name] = None

    async def _travel(self, receiver: str, manifest: Manifest, where: str) -> str:
        """Move the bytes of a version; whom they came from. A holder that leaves on the way is replaced by another."""
        spread, left = self._spreads[manifest.version], self._left.get(receiver, 0)
        while True:
            holder = await spread.take()
            try:
                if self._left.get(receiver, 0) == left:
                    self._check_kept(manifest.version, where)
                    await self._network.transfer(holder, receiver, manifest.size_bytes)
                    return holder
            except WorkerLost:
                pass
            finally:
                spread.give_back(holder)
            if self._left.get(receiver, 0) != left:
                raise WorkerLost(f"{where}: it left meanwhile")

    def _stop_serving(self, receiver: str) -> None:
        version = self._held.pop(receiver, None)
        if version is not None and version in self._spreads:
            self._spreads[version].remove(receiver)

    def _forget(self, version: WeightVersion) -> None:
        del self._kept[version]
        spread = self._spreads.pop(version)
        error = WeightsError(f"weight store: version {version} is no longer kept; pull the newest")
        for waiter in spread.waiting:
            if not waiter.done():
                waiter.set_exception(error)
        self._held = {receiver: held for receiver, held in self._held.items() if held != version}

    def _check_kept(self, version: WeightVersion, where: str) -> None:
        if version not in self._kept:
            raise WeightsError(f"{where}: no longer kept, want one of {list(self.kept)}; fetch the newest")

    def _check_whole(self, version: WeightVersion, name: str, where: str) -> None:
        if (version, name) in self._damaged:
            raise WeightsError(f"{where}: {name}: its checksum is another; publish again")

    def _manifest(self, version: WeightVersion) -> Manifest:
        shards = tuple(
            Shard(
                name=name,
                dtype="U8",
                shape=(size,),
                start=(0,),
                size_bytes=size,
                checksum=_checksum(version, name, size),
                locations=(SOURCE,),
            )
            for name, size in self._tensors.items()
        )
        return Manifest(version=version, model_hash=self.model_hash, shards=shards)


def _made_up(version: WeightVersion, name: str, size_bytes: int) -> bytes:
    text = f"{version}|{name}|".encode()
    return (text * math.ceil(size_bytes / len(text)))[:size_bytes]


def _checksum(version: WeightVersion, name: str, size_bytes: int) -> str:
    """Of the bytes; of a large tensor, of its first ones."""
    return f"crc32:{zlib.crc32(_made_up(version, name, min(size_bytes, _MADE_UP_BYTES))):08x}"
