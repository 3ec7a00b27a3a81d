"""Where a token's keys and values belong, and that a slot is left as it was found."""

from __future__ import annotations

import numpy as np
import pytest

from pearl.engine.embedded.architecture import Architecture, read_architecture
from pearl.engine.embedded.attention import Batch
from pearl.engine.embedded.kv_cache import KvCache
from tests.models import make_folder

SLOTS, POSITIONS = 3, 5


@pytest.fixture(scope="module")
def architecture(tmp_path_factory: pytest.TempPathFactory) -> Architecture:
    return read_architecture(make_folder(tmp_path_factory.mktemp("m") / "m"))


@pytest.fixture
def cache(architecture: Architecture) -> KvCache:
    return KvCache(architecture, SLOTS, POSITIONS)


def test_rows_are_keys_then_values_by_head(cache: KvCache) -> None:
    batch = Batch.of(np.array([2, 1]), np.array([3, 0]), np.array([1, 2]))
    heads = cache.keys.shape[2]

    rows = cache.rows(batch)
    cache.layers[1].index_fill_(0, rows, 1.0)

    assert len(rows) == 3 * 2 * heads
    for side in (cache.keys, cache.values):
        written = side[:, :, :, :, 0].nonzero().tolist()
        assert written == [
            [1, slot, head, position]
            for slot, positions in ((1, (0, 1)), (2, (3,)))
            for head in range(heads)
            for position in positions
        ]


def test_clear_zeroes_what_was_written_of_one_slot(cache: KvCache) -> None:
    cache.blocks.fill_(1.0)
    cache.wrote(np.array([0, 1]), np.array([2, 4]))
    cache.wrote(1, 3)

    cache.clear(1)

    assert not cache.blocks[:, :, 1, :, :4].any()
    assert cache.blocks[:, :, 1, :, 4:].all(), "further than anybody wrote: needless work"
    assert cache.blocks[:, :, [0, 2]].all()
    cache.blocks.fill_(1.0)
    cache.clear(1)
    assert cache.blocks.all(), "nothing was written since"
