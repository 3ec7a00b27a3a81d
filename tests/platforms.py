"""Made-up platforms whose numbers can be worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping

from pearl.core.makespan import Target
from pearl.core.platform import Platform
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.shape import parse_shape


def linear_times(base_s: float, sequence_s: float, token_s: float, contexts: tuple[int, ...] = (1,)) -> IterationTimes:
    """So much per iteration, per decoding sequence (a quarter more of it at a context of 8K) and per prompt token.

    With a single context, however long it is.
    """
    prefill, decoding = (0, 8192), (0, 512)
    cells = tuple(
        tuple(
            tuple(
                base_s + sequence_s * d * (1 + (c / 32768 if len(contexts) > 1 else 0)) + token_s * p for c in contexts
            )
            for d in decoding
        )
        for p in prefill
    )
    return IterationTimes(prefill_tokens=prefill, decoding=decoding, context_tokens=contexts, cells_s=cells)


def engine_profile(
    tp: int,
    times: IterationTimes,
    *,
    capacity: int = 10**8,
    kv_bytes: int = 1,
    hand_off: HandOff | None = None,
) -> PlatformProfile:
    return PlatformProfile(
        model="m",
        model_hash="h",
        device="d",
        dtype="bf16",
        tp=tp,
        iterations=times,
        kv_capacity_tokens=capacity,
        kv_bytes_per_token=kv_bytes,
        hand_off=hand_off,
        weight_load_s=1.0,
        sleep_s=1.0,
        wake_s=1.0,
        engine_start_s=None,
    )


def platform_of(times: Mapping[int, IterationTimes], chunk: int, hand_off: HandOff | None = None) -> Platform:
    """One profile per tensor parallelism, with room for all."""
    by_tp = {tp: engine_profile(tp, table, hand_off=hand_off) for tp, table in times.items()}
    return Platform(by_tp=by_tp, prefill_chunk_tokens=chunk)


def target(text: str, append_tokens: int = 0) -> Target:
    return Target(shape=parse_shape(text), append_tokens=append_tokens)
