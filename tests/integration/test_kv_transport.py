"""KV through the object store: what arrives is what was put, mapped and not copied; what is gone is said to be."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import ray

from pearl.cluster.kv_transport import INLINE_BYTES, ObjectStoreTransport, fetched
from pearl.engine.embedded.kv import Blocks, KvPayload
from tests import handoffs

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray")]


def arrived(data: Any) -> Blocks | None:
    kv = asyncio.run(fetched(handoffs.request(handoffs.handle(handoffs.payload(data), expires_s=1e9)))).kv
    assert kv is not None
    assert isinstance(kv.payload, KvPayload)
    blocks: Blocks | None = kv.payload.data
    return blocks


@pytest.fixture(params=[0, INLINE_BYTES], ids=["stored", "inline"])
def transport(request: pytest.FixtureRequest) -> ObjectStoreTransport:
    return ObjectStoreTransport(inline_bytes=request.param)


@pytest.mark.parametrize("tokens", [32, 33])
def test_few_bytes_need_no_store(tokens: int) -> None:
    data = ObjectStoreTransport().put(np.zeros((1, 2, 1, tokens, 256), dtype=np.float32))

    assert isinstance(data, ray.ObjectRef) == (tokens * 2 * 1024 > 64 * 1024)


@pytest.mark.parametrize("dtype", [np.float32, np.int16])
def test_blocks_of_a_cache_arrive_as_they_were_at_the_time(dtype: type, transport: ObjectStoreTransport) -> None:
    """Layers, sides, heads, positions, head size; the first three positions of each run travel."""
    cache = np.arange(3 * 2 * 2 * 5 * 4).reshape(3, 2, 2, 5, 4).astype(dtype)
    want = cache[:, :, :, :3].copy()

    data = transport.put(cache[:, :, :, :3])
    cache[:] = 0
    got = arrived(data)

    assert got is not None
    assert {block.dtype for block in got} == {np.dtype(dtype)}
    np.testing.assert_array_equal(np.stack([*got]).reshape(want.shape), want)
    assert not any(block.flags.owndata or block.flags.writeable for block in got)


def test_something_else_in_the_store_is_no_kv() -> None:
    assert arrived(ray.put([1, 2, 3])) is None


@pytest.mark.parametrize("data", [None, "nothing"])
def test_a_handle_without_a_reference_has_no_data(data: object) -> None:
    assert arrived(data) is None
