"""Attention of one iteration over the slot KV cache.

The tokens of an iteration are packed into one axis, so projections run without padding; only attention needs a grid of
sequences. Sequences are grouped by the length of their chunk, to a factor of two, so a grid is at most half padding; the
group of single tokens (decode) needs none.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Ints = npt.NDArray[np.int64]

MAX_HOLES = 2.0
"""A group reads the cache in place when its slots span at most this many times their number; else they are gathered.

Attending in vain to a slot that is not in the group costs about as much as copying its keys and values."""

BLOCKWISE_TOKENS = 16
"""On a CPU, chunks from this length on attend block by block."""

QUERY_TOKENS = 64
"""Tokens of a block: it need not look at what comes behind its last one, which saves up to half of a prefill's attention."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences with a chunk of new tokens each; R sequences, N = sum of `counts`.

    Ordered by group, then by slot: `Batch.of` sorts.
    """

    slots: Ints
    """Shape `[R]`, each once."""
    starts: Ints
    """Shape `[R]`: position of the first new token, which is the number of tokens cached before it."""
    counts: Ints
    """Shape `[R]`, >= 1."""
    token_slots: Ints
    """Shape `[N]`: slot of each new token."""
    token_positions: Ints
    """Shape `[N]`."""

    @classmethod
    def of(cls, slots: Ints, starts: Ints, counts: Ints) -> Self:
        """Sort sequences into groups and lay out their tokens."""
        if counts.max(initial=1) == 1 and (np.diff(slots) > 0).all():
            return cls(slots=slots, starts=starts, counts=counts, token_slots=slots, token_positions=starts)
        order = np.lexsort((slots, _group_keys(counts)))
        slots, starts, counts = slots[order], starts[order], counts[order]
        first = np.repeat(np.cumsum(counts) - counts, counts)
        return cls(
            slots=slots,
            starts=starts,
            counts=counts,
            token_slots=np.repeat(slots, counts),
            token_positions=np.repeat(starts, counts) + np.arange(len(first)) - first,
        )

    def behind(self, count: int) -> Batch:
        """Without the first sequences, which must have one new token each."""
        return replace(
            self,
            slots=self.slots[count:],
            starts=self.starts[count:],
            counts=self.counts[count:],
            token_slots=self.token_slots[count:],
            token_positions=self.token_positions[count:],
        )

    @property
    def lasts(self) -> Ints:
        """Shape `[R]`: index of each sequence's last new token among the N."""
        return np.cumsum(self.counts) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Sequences that attend together: a grid of `rows` slots by `length` queries."""

    tokens: slice
    """Of the N packed tokens."""
    rows: int
    length: int
    window: slice
    """Slots read in place, when `gathered` is None."""
    gathered: Tensor | None
    """Shape `[rows]`: slots to copy."""
    cells: Tensor | None
    """Shape `[n]`: grid cell of each packed token; None when the grid has no padding."""
    share: int
    """Query heads per KV head."""
    mask: Tensor
    """0 where a query may look, -inf where not: shape `[rows, 1, length, 1, reach]`, `[rows, 1, length share, reach]` when
    `blockwise`."""
    reach: int
    """Positions read, from 0."""
    reaches: tuple[int, ...]
    """Positions that the queries of each block of `QUERY_TOKENS` may look at; none when attention is not `blockwise`."""

    @property
    def blockwise(self) -> bool:
        """Whether attention never holds all scores at once: those of a prefill do not fit a CPU's caches."""
        return bool(self.reaches)

    def seen(self, blocks: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What `attend` reads of a cache `[layers, 2, slots, kv_heads, positions, d]`: keys and values by layer, as views."""
        if self.gathered is None:
            part = blocks[:, :, self.window, :, : self.reach].flatten(2, 3)
        else:
            part = blocks[:, :, :, :, : self.reach]
        keys, values = part.unbind(1)
        return list(zip(keys.unbind(), values.unbind(), strict=True))

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend `[n, heads, d]` queries to what is `seen` of a layer; gives `[n, heads d]`."""
        _, heads, width = queries.shape
        kv_heads = heads // self.share
        if self.gathered is not None:
            keys, values = (side.index_select(0, self.gathered).flatten(0, 1) for side in (keys, values))
        if self.cells is not None:
            grid = queries.new_zeros(self.rows * self.length, heads, width)
            queries = grid.index_copy_(0, self.cells, queries)
        if self.length > 1:
            queries = queries.view(self.rows, self.length, kv_heads, self.share, width).transpose(1, 2)
        # Query heads that share a KV head are further queries of it.
        queries = queries.reshape(self.rows * kv_heads, self.length * self.share, width)
        out = self._blockwise(queries, keys, values) if self.blockwise else self._whole(queries, keys, values)
        if self.length > 1:
            out = out.view(self.rows, kv_heads, self.length, self.share, width).transpose(1, 2)
        out = out.reshape(self.rows * self.length, heads * width)
        return out if self.cells is None else out.index_select(0, self.cells)

    def _blockwise(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        queries, keys, values = (side.view(self.rows, -1, *side.shape[1:]) for side in (queries, keys, values))
        outs = []
        for number, reach in enumerate(self.reaches):
            part = slice(number * QUERY_TOKENS * self.share, (number + 1) * QUERY_TOKENS * self.share)
            mask = self.mask[:, :, part, :reach]
            near = keys[:, :, :reach], values[:, :, :reach]
            outs.append(scaled_dot_product_attention(queries[:, :, part], *near, attn_mask=mask, scale=1.0))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _whole(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        scores = torch.bmm(queries, keys.transpose(1, 2))
        scores.view(self.rows, -1, self.length, self.share, self.reach).add_(self.mask)
        odds = torch.softmax(scores, -1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(odds, values)


def groups_of(batch: Batch, like: Tensor, share: int) -> tuple[Group, ...]:
    """The groups of a batch, in order of its tokens, with tensors on the device and in the precision of `like`.

    `share` is the number of query heads per KV head.
    """
    if len(batch.counts) == len(batch.token_slots):
        return (_group(batch.slots, batch.starts, batch.counts, slice(0, len(batch.counts)), like, share),)
    keys = _group_keys(batch.counts)
    edges = [0, *(np.flatnonzero(np.diff(keys)) + 1).tolist(), len(keys)]
    offsets = np.concatenate(([0], np.cumsum(batch.counts)))
    tokens = (slice(int(offsets[a]), int(offsets[b])) for a, b in itertools.pairwise(edges))
    return tuple(
        _group(batch.slots[a:b], batch.starts[a:b], batch.counts[a:b], part, like, share)
        for (a, b), part in zip(itertools.pairwise(edges), tokens, strict=True)
    )


def _group_keys(counts: Ints) -> Ints:
    """0 for one token, then 1 for 2, 2 for 3..4, 3 for 5..8, ..."""
    return np.ceil(np.log2(counts)).astype(np.int64)


def _group(slots: Ints, starts: Ints, counts: Ints, tokens: slice, like: Tensor, share: int) -> Group:
    low, span = int(slots[0]), int(slots[-1] - slots[0]) + 1
    length, reach = int(counts.max()), int((starts + counts).max())
    in_place = span <= len(slots) * (MAX_HOLES if length == 1 else 1)
    rows = span if in_place else len(slots)
    row_of = slots - low if in_place else np.arange(len(slots))
    lasts = np.zeros((rows, length), dtype=np.int64)
    lasts[row_of] = starts[:, None] + np.arange(length)
    cells = None
    if rows * length > int(counts.sum()):
        inside = np.arange(length) < counts[:, None]
        cells = torch.from_numpy((row_of[:, None] * length + np.arange(length))[inside]).to(like.device)
    mask = _mask(lasts, reach, like)
    blockwise = like.device.type == "cpu" and length >= BLOCKWISE_TOKENS
    return Group(
        tokens=tokens,
        rows=rows,
        length=length,
        window=slice(low, low + span),
        gathered=None if in_place else torch.from_numpy(slots).to(like.device),
        cells=cells,
        share=share,
        mask=mask.expand(-1, -1, -1, share, -1).flatten(2, 3) if blockwise else mask,
        reach=reach,
        reaches=_reaches(starts, counts, length) if blockwise else (),
    )


def _mask(lasts: Ints, reach: int, like: Tensor) -> Tensor:
    """`Group.mask` of queries `[rows, length]` that may look at positions up to `lasts`."""
    rows, length = lasts.shape
    later = torch.arange(reach, device=like.device) > torch.from_numpy(lasts).to(like.device)[:, :, None]
    return like.new_zeros(rows, length, reach).masked_fill_(later, -torch.inf).view(rows, 1, length, 1, reach)


def _reaches(starts: Ints, counts: Ints, length: int) -> tuple[int, ...]:
    """`Group.reaches`: a row with a shorter chunk may reach further than the longest one does, so each block asks all."""
    ends = np.arange(QUERY_TOKENS, length + QUERY_TOKENS, QUERY_TOKENS)
    return tuple((starts[:, None] + np.minimum(counts[:, None], ends)).max(0).tolist())
