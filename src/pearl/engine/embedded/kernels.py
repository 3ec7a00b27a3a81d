"""Loops over float32 numbers, compiled when this module is first imported on a machine and kept on disk from then on.

h heads, k KV heads, g = h / k, d head size, P positions of a slot. Sums may be reordered, NaN and infinities behave as
everywhere. No index is checked: callers pass what the engine's own tables say.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import numba
import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., None])
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

_FAST = {"reassoc", "contract", "arcp", "nsz"}
"""What vectorising a sum needs, without the promise that there are no NaN."""


def _compiled(signature: str) -> Callable[[F], F]:
    def compile_(function: F) -> F:
        options: dict[str, Any] = {"fastmath": _FAST, "nogil": True}
        try:
            return numba.njit(signature, cache=True, **options)(function)  # type: ignore[no-any-return]
        except Exception as error:
            # Nowhere to keep what is compiled, a full disk, damaged files: whatever it is, it need not be kept.
            _log.warning("compiled loops are not kept: %s: %s", type(error).__name__, error)
            return numba.njit(signature, **options)(function)  # type: ignore[no-any-return]

    return compile_


@_compiled("void(f4[:,::1], f4, f4[:,::1])")
def norm(rows: Floats, epsilon: np.float32, out: Floats) -> None:
    """Root-mean-square norm of rows `[n, width]`."""
    count, width = rows.shape
    for n in range(count):
        total = np.float32(0)
        for i in range(width):
            total += rows[n, i] * rows[n, i]
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
        for i in range(width):
            out[n, i] = rows[n, i] * scale


@_compiled("void(f4[:,:,::1], f4[:,::1], f4[:,:,::1], i8[::1], i8[::1], f4[:,:,:,:,::1], i8, f4, f4[::1])")
def turn(
    heads: Floats,
    gains: Floats,
    rotation: Floats,
    slots: Ints,
    positions: Ints,
    blocks: Floats,
    query_heads: int,
    epsilon: np.float32,
    head: Floats,
) -> None:
    """Norm (where there are gains) and rotate queries and keys in place, and copy keys and values to the cache.

    Args:
        heads: `[N, h + 2 k, d]`.
        gains: `[h + k, d]`, or `[0, d]`.
        rotation: `[positions, d / 2, 2]`, cosine and sine for each pair of neighbours.
        slots: `[N]`.
        positions: `[N]`.
        blocks: `[2, slots, k, P, d]`.
        query_heads: h.
        epsilon: of the norm.
        head: `[d]`, room to compute in.
    """
    count, _, width = heads.shape
    kv_heads = blocks.shape[2]
    turned = query_heads + kv_heads
    for n in range(count):
        slot, position = slots[n], positions[n]
        for h in range(turned):
            if len(gains):
                total = np.float32(0)
                for i in range(width):
                    total += heads[n, h, i] * heads[n, h, i]
                scale = np.float32(1) / np.sqrt(total / np.float32(width) + epsilon)
                for i in range(width):
                    head[i] = heads[n, h, i] * scale * gains[h, i]
            else:
                for i in range(width):
                    head[i] = heads[n, h, i]
            for i in range(width // 2):
                cosine, sine = rotation[position, i, 0], rotation[position, i, 1]
                heads[n, h, 2 * i] = head[2 * i] * cosine - head[2 * i + 1] * sine
                heads[n, h, 2 * i + 1] = head[2 * i] * sine + head[2 * i + 1] * cosine
        for h in range(kv_heads):
            for i in range(width):
                blocks[0, slot, h, position, i] = heads[n, query_heads + h, i]
                blocks[1, slot, h, position, i] = heads[n, turned + h, i]


@_compiled("void(f4[::1])")
def softmax(row: Floats) -> None:
    """In place."""
    top = row[0]
    for i in range(len(row)):
        top = max(top, row[i])
    total = np.float32(0)
    for i in range(len(row)):
        row[i] = np.exp(row[i] - top)
        total += row[i]
    for i in range(len(row)):
        row[i] /= total


@_compiled("void(f4[:,:,::1], i8[::1], i8[::1], i8, f4[:,:,:,:,::1], i8, f4[:,::1], f4[:,::1])")
def attend(
    heads: Floats,
    slots: Ints,
    positions: Ints,
    count: int,
    blocks: Floats,
    query_heads: int,
    out: Floats,
    scores: Floats,
) -> None:
    """Let the queries of the first `count` tokens attend to their slots, up to their positions.

    Args:
        heads: `[N, h + 2 k, d]`, queries first.
        slots: `[N]`.
        positions: `[N]`.
        count: tokens.
        blocks: `[2, slots, k, P, d]`.
        query_heads: h.
        out: `[N, h d]`.
        scores: `[g, P]`, room to compute in.
    """
    width, kv_heads = heads.shape[2], blocks.shape[2]
    share = query_heads // kv_heads
    for n in range(count):
        reach = positions[n] + 1
        for k in range(kv_heads):
            keys, values = blocks[0, slots[n], k], blocks[1, slots[n], k]
            for t in range(reach):
                for s in range(share):
                    score = np.float32(0)
                    for i in range(width):
                        score += heads[n, k * share + s, i] * keys[t, i]
                    scores[s, t] = score
            for s in range(share):
                softmax(scores[s, :reach])
                for i in range(width):
                    out[n, (k * share + s) * width + i] = np.float32(0)
            for t in range(reach):
                for s in range(share):
                    for i in range(width):
                        out[n, (k * share + s) * width + i] += scores[s, t] * values[t, i]
