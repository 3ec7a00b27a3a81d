"""KV through the object store: what arrives is what was put, mapped and not copied; what is gone is said to be."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import ray

from pearl.cluster.kv_transport import INLINE_BYTES, ObjectStoreTransport, fetched
from pearl.engine.embedded.kv import Block, KvPayload
from tests import handoffs

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray")]


def arrived(data: Any) -> list[Block] | None:
    kv = asyncio.run(fetched(handoffs.request(handoffs.handle(handoffs.payload(data), expires_s=1e9)))).kv
    assert kv is not None
    assert isinstance(kv.payload, KvPayload)
    blocks: list[Block] | None = kv.payload.data
    return blocks


@pytest.fixture(params=[0, INLINE_BYTES], ids=["stored", "inline"])
def transport(request: pytest.FixtureRequest) -> ObjectStoreTransport:
    return ObjectStoreTransport(inline_bytes=request.param)


@pytest.mark.parametrize("tokens", [32, 33])
def test_few_bytes_need_no_store(tokens: int) -> None:
    data = ObjectStoreTransport().put([np.zeros((tokens, 256), dtype=np.float32)] * 2)

    assert isinstance(data, ray.ObjectRef) == (tokens * 2 * 1024 > 64 * 1024)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_blocks_of_a_cache_arrive_as_they_were_at_the_time(dtype: type, transport: ObjectStoreTransport) -> None:
    """Layers, heads, positions, head size; each layer's and head's first three positions are a block."""
    cache = np.arange(2 * 2 * 5 * 4).reshape(2, 2, 5, 4).astype(dtype)
    want = cache.copy()
    blocks = [cache[layer, head, :3] for layer in range(2) for head in range(2)]

    data = transport.put(blocks)
    cache[:] = 0
    got = arrived(data)

    assert got is not None
    assert [block.dtype for block in got] == [np.dtype(dtype)] * 4
    np.testing.assert_array_equal(np.stack(got), want[:, :, :3].reshape(4, 3, 4))
    assert not any(block.flags.owndata or block.flags.writeable for block in got)


def test_blocks_that_are_not_contiguous_arrive_too(transport: ObjectStoreTransport) -> None:
    block = np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2]

    got = arrived(transport.put([block]))

    assert got is not None
    assert got[0].tolist() == [[0, 2], [4, 6], [8, 10]]


def test_something_else_in_the_store_is_no_kv() -> None:
    assert arrived(ray.put([1, 2, 3])) is None


@pytest.mark.parametrize("data", [None, "nothing"])
def test_a_handle_without_a_reference_has_no_data(data: object) -> None:
    assert arrived(data) is None
