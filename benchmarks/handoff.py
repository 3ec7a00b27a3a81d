"""What handing KV from one worker to another costs, beside Ray's own way of moving one array of as many bytes.

    python -m benchmarks.handoff [--quick]

On a local Ray, in turn, medians, after a warm-up that touches the object store's pages for both sides alike:

- *hand-off*: the owner exports a slot's KV (`KvExports.export` through the object store), the driver passes the handle on,
  the importer fetches it, checks it and copies it into its cache. Both are called by the driver, as in a run; what is timed
  goes from before the export to when the importer says that the KV is in its cache.
- *array*: a plain actor puts one contiguous array into the object store, another one gets it and copies it to memory of its
  own, since a hand-off ends in the importer's cache and not in the store. The array only mapped is information: there the
  ratio says what copying costs on this machine, which for large arrays is as much as all the rest.

Small is a prompt of 32 tokens of the demo's model; as its time is no ratio, it is taken last, over hand-offs one after another,
when the processes and their object store have come to rest. The
cache has 128 runs of memory per context (16 layers, 4 KV heads, keys and values), 16 KiB per token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from benchmarks._models import checkpoint
from benchmarks._report import Check, report
from pearl.cluster.kv_transport import ObjectStoreTransport, fetched
from pearl.cluster.local_ray import ray_session
from pearl.config.cluster import ClusterConfig
from pearl.engine.embedded.engine import INITIAL_VERSION
from pearl.engine.embedded.kv import KvExports, import_kv, kv_refusal
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.model import Model
from pearl.records.ids import RequestId, TrajectoryId, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import KvHandle, Mode, Sampling, TurnRequest
from pearl.units import KIB, MIB
from scripts.make_tiny_qwen3 import TinyQwen3

SHAPE = TinyQwen3(hidden=32, layers=16, heads=4, kv_heads=4, head_dim=32, max_positions=4097)
TOKEN_BYTES = 16 * 1024
SMALL_BYTES = 64 * KIB
SIZES_BYTES = (8 * MIB, 64 * MIB)
OBJECT_STORE_MIB = 512
TTL_S = 60.0
WARM_UP = 4
SMALL_REPEATS = 10
"""Times as many, since each takes so little."""
OWNER, IMPORTER = WorkerId(0), WorkerId(1)


PAGE_BYTES = 4096


class Peer:
    """A process that takes part."""

    async def touch(self, references: list[Any]) -> int:
        """Read a byte of every page, so that no page of the object store is new to this process afterwards."""
        return sum([int((await reference)[::PAGE_BYTES].sum()) for reference in references])


class KvPeer(Peer):
    """What an engine has for hand-offs: a model (of which no forward pass is run), a cache, and exports."""

    def __init__(self, folder: str, worker: WorkerId) -> None:
        torch.set_num_threads(1)
        self._model = Model.read(Path(folder))
        self._cache = KvCache(self._model.architecture, slots=2, positions=SHAPE.max_positions)
        self._exports = KvExports(worker=worker, ttl_s=TTL_S, transport=ObjectStoreTransport())

    async def fill(self, seed: int) -> None:
        """Give every position numbers of its own."""
        generator = torch.Generator().manual_seed(seed)
        for side in (self._cache.keys, self._cache.values):
            side.copy_(torch.rand(side.shape, generator=generator))

    async def export(self, tokens: int) -> KvHandle:
        """Export the first tokens of slot 0, as at the end of a prefill."""
        request = _request(tokens, mode=Mode.PREFILL)
        context = request.context
        assert isinstance(context, TokenIds)
        return self._exports.export(
            self._cache, self._model, 0, request, context[:tokens], epoch=0, version=INITIAL_VERSION, now_s=_now_s()
        )

    async def take(self, handle: KvHandle) -> int:
        """Fetch KV and copy it into slot 1; returns the tokens that it holds then."""
        request = await fetched(_request(handle.tokens, mode=Mode.DECODE, kv=handle))
        fault = kv_refusal(request, self._model, _now_s())
        if fault is not None or request.kv is None:
            raise RuntimeError(f"handoff: {fault}")
        return import_kv(self._cache, 1, request.kv, 0, handle.tokens)

    async def release(self, handle: KvHandle) -> None:
        """Take a handle back."""
        self._exports.release(handle)

    async def checksum(self, slot: int, tokens: int) -> int:
        """Of the KV of a slot's first tokens."""
        value = 0
        for side in (self._cache.keys, self._cache.values):
            value = zlib.crc32(side[:, slot, :, :tokens].contiguous().numpy().data, value)
        return value


class Sender(Peer):
    """Puts an array."""

    def __init__(self) -> None:
        self._array = np.empty(0, dtype=np.uint8)

    async def fill(self, size_bytes: int) -> None:
        self._array = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)

    async def put(self) -> list[Any]:
        """The reference, in a list: Ray would fetch a bare one for the receiver before calling it."""
        return [ray.put(self._array)]


class Receiver(Peer):
    """Gets an array."""

    def __init__(self) -> None:
        self._mine = np.empty(0, dtype=np.uint8)

    async def fill(self, size_bytes: int) -> None:
        self._mine = np.ones(size_bytes, dtype=np.uint8)

    async def get(self, references: list[Any], *, copy: bool) -> int:
        """Map the array, and copy it to this process' memory if asked to; returns its bytes."""
        array = await references[0]
        if copy:
            np.copyto(self._mine, array)
        return int(array.nbytes)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.handoff", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    quick = parser.parse_args(arguments).quick
    repeats = 9 if quick else 31
    with checkpoint(SHAPE) as (folder, _), ray_session(ClusterConfig(object_store_mib=OBJECT_STORE_MIB)):
        actors = {
            "owner": _actor(KvPeer, str(folder), OWNER),
            "importer": _actor(KvPeer, str(folder), IMPORTER),
            "sender": _actor(Sender),
            "receiver": _actor(Receiver),
        }
        ray.get(actors["owner"].fill.remote(1))
        _touch_store(list(actors.values()))
        measured = {size: _measure(actors, size, repeats, in_turn=True) for size in SIZES_BYTES}
        measured[SMALL_BYTES] = _measure(actors, SMALL_BYTES, repeats * SMALL_REPEATS, in_turn=False)
    return report("handoff", _checks(measured), {"quick": quick, "repeats": repeats, "kv_bytes_per_token": TOKEN_BYTES})


def _checks(measured: Mapping[int, Mapping[str, float]]) -> list[Check]:
    large = {size: measured[size] for size in SIZES_BYTES}
    checks = [
        Check(
            name="handoff_vs_ray_array",
            value=max(times["handoff"] / times["array_copied"] for times in large.values()),
            target="<= 1.5",
        ),
        Check(name="handoff_small_ms", value=measured[SMALL_BYTES]["handoff"] * 1e3, target="<= 10"),
        Check(name="array_copied_small_ms", value=measured[SMALL_BYTES]["array_copied"] * 1e3),
    ]
    for size, times in large.items():
        name = f"{size // MIB}mib"
        checks += [
            Check(name=f"handoff_{name}_ms", value=times["handoff"] * 1e3),
            Check(name=f"array_mapped_{name}_ms", value=times["array"] * 1e3),
            Check(name=f"array_copied_{name}_ms", value=times["array_copied"] * 1e3),
            Check(name=f"handoff_vs_ray_array_{name}", value=times["handoff"] / times["array_copied"]),
            Check(name=f"handoff_vs_mapped_array_{name}", value=times["handoff"] / times["array"]),
            Check(name=f"handoff_vs_memcpy_{name}", value=times["handoff"] / times["memcpy"]),
        ]
    return checks


def _measure(actors: Mapping[str, Any], size_bytes: int, repeats: int, *, in_turn: bool) -> dict[str, float]:
    """Median seconds of each way."""
    tokens = size_bytes // TOKEN_BYTES
    ray.get([actors["sender"].fill.remote(size_bytes), actors["receiver"].fill.remote(size_bytes)])
    source, target = np.ones(size_bytes, dtype=np.uint8), np.zeros(size_bytes, dtype=np.uint8)
    ways: dict[str, Callable[[], Any]] = {
        "handoff": lambda: _hand_off(actors, tokens),
        "array": lambda: _array(actors, size_bytes, copy=False),
        "array_copied": lambda: _array(actors, size_bytes, copy=True),
        "memcpy": lambda: np.copyto(target, source),
    }
    taken_s: dict[str, list[float]] = {way: [] for way in ways}
    each = range(-WARM_UP, repeats)
    in_rows = [(repeat, way) for way in ways for repeat in each]
    order = [(repeat, way) for repeat in each for way in ways] if in_turn else in_rows
    for repeat, way in order:
        began_s = time.perf_counter()
        unfinished = ways[way]()
        if repeat >= 0:
            taken_s[way].append(time.perf_counter() - began_s)
        if unfinished is not None:
            ray.get(unfinished)
    sent, got = ray.get([actors["owner"].checksum.remote(0, tokens), actors["importer"].checksum.remote(1, tokens)])
    if sent != got:
        raise RuntimeError(f"handoff: checksum over {tokens} tokens: sent {sent}, got {got}; other KV has arrived")
    return {way: statistics.median(times) for way, times in taken_s.items()}


def _touch_store(actors: Sequence[Any]) -> None:
    """Let every process touch all of the object store: first contact with a page costs as much as copying it does."""
    size_bytes = max(SIZES_BYTES)
    filling = [ray.put(np.ones(size_bytes, dtype=np.uint8)) for _ in range(OBJECT_STORE_MIB * MIB // size_bytes - 1)]
    want = len(filling) * size_bytes // PAGE_BYTES
    if ray.get([actor.touch.remote(filling) for actor in actors]) != [want] * len(actors):
        raise RuntimeError("handoff: what was put into the object store did not arrive")


def _hand_off(actors: Mapping[str, Any], tokens: int) -> Any:
    """Returns the release, for which nobody waits in a run."""
    handle = ray.get(actors["owner"].export.remote(tokens))
    if ray.get(actors["importer"].take.remote(handle)) != tokens or handle.size_bytes != tokens * TOKEN_BYTES:
        raise RuntimeError(f"handoff: {handle.size_bytes} bytes for {tokens} tokens did not arrive")
    return actors["owner"].release.remote(replace(handle, payload=None))


def _array(actors: Mapping[str, Any], size_bytes: int, *, copy: bool) -> None:
    references = ray.get(actors["sender"].put.remote())
    if ray.get(actors["receiver"].get.remote(references, copy=copy)) != size_bytes:
        raise RuntimeError(f"array: {size_bytes} bytes did not arrive")


def _actor(kind: type, *arguments: Any) -> Any:
    return ray.remote(num_cpus=0, max_restarts=0)(kind).remote(*arguments)


def _request(tokens: int, *, mode: Mode, kv: KvHandle | None = None) -> TurnRequest:
    return TurnRequest(
        id=RequestId("r"),
        trajectory=TrajectoryId("t"),
        turn=0,
        context=TokenIds(np.arange(tokens + 1) % 90 + 2),
        sampling=Sampling(seed=0),
        max_new_tokens=1,
        min_version=INITIAL_VERSION,
        mode=mode,
        kv=kv,
    )


def _now_s() -> float:
    return time.monotonic()


if __name__ == "__main__":
    sys.exit(main())
