"""A request that brings KV, for tests of what carries it: three tokens of a context of four."""

from __future__ import annotations

from typing import Any

from pearl.engine.embedded.kv import KvPayload
from pearl.records.ids import HandleId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import TokenIds
from pearl.records.turn import KvHandle, Mode, Sampling, TurnRequest


def handle(payload: object, *, expires_s: float = 50.0) -> KvHandle:
    return KvHandle(
        id=HandleId("h"),
        owner=WorkerId(1),
        epoch=0,
        tokens=3,
        size_bytes=24,
        version=WeightVersion(0),
        expires_s=expires_s,
        payload=payload,
    )


def payload(data: object) -> KvPayload:
    return KvPayload(model_hash="m", epoch=0, layout="l", context_hash="c", data=data)


def request(kv: KvHandle | None, *, name: str = "r", **fields: Any) -> TurnRequest:
    values: dict[str, Any] = {
        "id": RequestId(name),
        "trajectory": TrajectoryId(name),
        "turn": 0,
        "context": TokenIds([2, 3, 4, 5]),
        "sampling": Sampling(seed=0),
        "max_new_tokens": 1,
        "min_version": WeightVersion(0),
        "mode": Mode.DECODE,
        "kv": kv,
    }
    return TurnRequest(**{**values, **fields})
