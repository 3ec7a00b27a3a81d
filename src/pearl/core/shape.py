"""Fleet shapes: how many workers of which role and tensor parallelism.

Grammar: `2C`, `2P6D@tp2` (one tp for all pools), in full `4P@tp1+2D@tp4+1C@tp2`. Prefill and decode need each other;
colocated workers may stand beside them (a hybrid).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from pearl.core.state import Role
from pearl.errors import ShapeError

_LETTERS = {"P": Role.PREFILL, "D": Role.DECODE, "C": Role.COLOCATED}
_PART = re.compile(r"(?P<pools>(?:[0-9]{1,9}[PDC])+)(?:@tp(?P<tp>[0-9]{1,9}))?")
_POOL = re.compile(r"([0-9]+)([PDC])")
_GRAMMAR = "want e.g. `2C`, `1P3D@tp2` or `4P@tp1+2D@tp4`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Workers alike in role and tensor parallelism."""

    role: Role
    workers: int
    """>= 1."""
    tp: int = 1
    """GPUs per worker, >= 1."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A target arrangement of rollout workers."""

    pools: tuple[Pool, ...]

    @property
    def workers(self) -> int:
        """Workers over all pools."""
        return sum(pool.workers for pool in self.pools)

    @property
    def gpus(self) -> int:
        """GPUs over all pools."""
        return sum(pool.workers * pool.tp for pool in self.pools)

    def roles(self) -> tuple[tuple[Role, int], ...]:
        """`(role, tp)` of each worker, pool after pool."""
        return tuple((pool.role, pool.tp) for pool in self.pools for _ in range(pool.workers))

    def __str__(self) -> str:
        letters = {role: letter for letter, role in _LETTERS.items()}
        texts = [f"{pool.workers}{letters[pool.role]}" for pool in self.pools]
        tps = [pool.tp for pool in self.pools]
        if len(set(tps)) == 1:
            return "".join(texts) + (f"@tp{tps[0]}" if tps[0] > 1 else "")
        return "+".join(f"{text}@tp{tp}" for text, tp in zip(texts, tps, strict=True))


def parse_shape(text: str) -> Shape:
    """Read a shape.

    Raises:
        ShapeError: not of the grammar, or no fleet can have this shape.
    """
    pools: list[Pool] = []
    for part in text.split("+"):
        match = _PART.fullmatch(part)
        if match is None:
            raise ShapeError(f"shape: got {text!r}, {_GRAMMAR}")
        tp = int(match["tp"] or 1)
        pools += [
            Pool(role=_LETTERS[letter], workers=int(count), tp=tp) for count, letter in _POOL.findall(match["pools"])
        ]
    _check(text, pools)
    return Shape(tuple(pools))


def _check(text: str, pools: list[Pool]) -> None:
    for pool in pools:
        if pool.workers < 1 or pool.tp < 1:
            raise ShapeError(f"shape: got {text!r}, want at least 1 worker in each pool and tp >= 1; {_GRAMMAR}")
    seen = [(pool.role, pool.tp) for pool in pools]
    if len(set(seen)) != len(seen):
        raise ShapeError(f"shape: got {text!r}, which names a pool twice; {_GRAMMAR}")
    has = {pool.role for pool in pools}
    if (Role.PREFILL in has) != (Role.DECODE in has):
        missing = "decode (D)" if Role.PREFILL in has else "prefill (P)"
        raise ShapeError(f"shape: got {text!r}, which has no {missing} worker; prefill and decode need each other")
