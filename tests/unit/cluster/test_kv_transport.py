"""Requests and chunks on their way between processes: KV that comes, that is gone, that does not come; and clocks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ObjectLostError

from pearl.cluster import kv_transport
from pearl.cluster.kv_transport import ObjectStoreTransport, fetched, shifted
from pearl.engine.embedded.kv import KvPayload
from pearl.records.ids import RequestId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.turn import Chunk, Versions
from tests.handoffs import handle, payload, request


def fetch(data: Callable[[], Awaitable[object]] | object) -> Any:
    async def work() -> Any:
        got = await fetched(request(handle(payload(data() if callable(data) else data))))
        assert got.kv is not None
        assert isinstance(got.kv.payload, KvPayload)
        return got.kv.payload.data

    return asyncio.run(work())


async def _blocks() -> object:
    """What the transport puts into the store."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kv_transport.ray, "put", lambda stored: stored)
        return ObjectStoreTransport(inline_bytes=0).put(np.arange(12.0).reshape(1, 2, 1, 3, 2))


async def _lost() -> object:
    raise ObjectLostError("0" * 56, None, "")


async def _never() -> object:
    return await asyncio.Event().wait()


def test_what_comes_is_handed_on() -> None:
    first, second = fetch(_blocks)
    assert first.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert second.tolist() == [[6, 7], [8, 9], [10, 11]]


async def _unreadable() -> object:
    raise OSError(5, "Input/output error")


def _inline(**changes: Any) -> object:
    return replace(ObjectStoreTransport().put(np.ones((1, 2, 1, 3, 2), dtype=np.float32)), **changes)


DAMAGED = {
    "lost": _lost,
    "never": _never,
    "unreadable": _unreadable,
    "none": None,
    "text": "no reference",
    "negative shape": _inline(shape=(-1, 2, 1, 3, 2)),
    "no shape": _inline(shape=()),
    "no buffer": _inline(buffers=None),
    "no run": _inline(buffers=[None]),
    "run too long": _inline(buffers=[bytes(28)]),
    "too long": _inline(buffers=bytes(52)),
    "too short": _inline(buffers=bytes(44)),
    "another type": _inline(dtype="nonsense"),
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED)
def test_what_does_not_come_leaves_nothing(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    monkeypatch.setattr(kv_transport, "FETCH_TIMEOUT_S", 0.05)
    assert fetch(data) is None


def test_other_requests_are_left_alone() -> None:
    for other in (request(None), request(handle(b"of another engine"))):
        assert asyncio.run(fetched(other)) is other


def test_expiry_travels_as_what_is_left() -> None:
    """Sent at 30 by a clock that says 1000 where it arrives 2 s later: 20 s were left, 18 are."""
    sent = shifted(request(handle(None)), -30.0)
    assert sent.kv is not None
    arrived = shifted(sent, 1000.0 - 2.0)
    assert arrived.kv is not None
    assert arrived.kv.expires_s - 1000.0 == 18.0
    bare = Chunk(request=RequestId("r"), start=0, token_ids=TokenIds(), logprobs=Floats(), versions=Versions())
    assert shifted(bare, 5.0) is bare
