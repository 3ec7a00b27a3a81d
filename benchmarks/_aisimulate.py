"""Asks NVIDIA's AISimulate: cells and iteration times as JSON, read from stdin and written to stdout.

Its packages are large and have versions of their own of what pearl uses too, so it may live in another Python: this file
imports nothing but it and the standard library. `benchmarks.peer_aisimulate` runs it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from typing import Any

PREFILL = (0, 1, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
DECODING = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
CONTEXT = (64, 256, 512, 1024, 2048, 4096, 8192, 16384)
MILLISECONDS = 1e-3


def times_of(engine: Any) -> list[list[list[float]]]:
    """Seconds over the axes: what its replay takes for an iteration that decodes, that computes prompts, and that does both."""
    return [[[_seconds(engine, p, d, c) for c in CONTEXT] for d in DECODING] for p in PREFILL]


def _seconds(engine: Any, prefill: int, decoding: int, context: int) -> float:
    if prefill and decoding:
        return float(engine.mixed_step_latency(prefill, decoding, context, 2, 0)) * MILLISECONDS
    if decoding:
        return float(engine.decode_step_latency(decoding, context - 1, 2)) * MILLISECONDS
    if not prefill:
        return float(engine.decode_step_latency(1, CONTEXT[0], 2)) * MILLISECONDS
    whole, rest = divmod(prefill, context)
    if not whole:
        return float(engine.predict_prefill_latency(1, context, context - prefill)) * MILLISECONDS
    taken = float(engine.predict_prefill_latency(whole, context, 0))
    if rest:
        taken += (float(engine.predict_prefill_latency(whole + 1, context, 0)) - taken) * rest / context
    return taken * MILLISECONDS


def _profile(asked: dict[str, Any]) -> dict[str, Any]:
    from aisimulate_core.sdk.engine import EngineHandle

    engine = EngineHandle.compile(
        asked["model"], asked["system"], asked["backend"], backend_version=asked["version"], tp_size=1
    )
    return {
        "prefill_tokens": PREFILL,
        "decoding": DECODING,
        "context_tokens": CONTEXT,
        "cells_s": times_of(engine),
    }


def _cell(config: dict[str, Any]) -> dict[str, Any]:
    from aisimulate.config.cli import CorePredictionConfig
    from aisimulate.predict import run_prediction
    from aisimulate.runner import EngineReplayRunnerFactory

    try:
        found = run_prediction(
            CorePredictionConfig.model_validate(config), stack="engine", runner_factory=EngineReplayRunnerFactory()
        ).summary
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    return {
        "makespan_s": found["duration_ms"] * MILLISECONDS,
        "turn_mean_s": found["mean_e2e_latency_ms"] * MILLISECONDS,
        "reuse": found["prefix_cache_reused_ratio"],
        "turns": found["completed_requests"],
    }


def main() -> None:
    """Answer what stands on stdin: `{"profiles": [...], "cells": [...]}`."""
    logging.disable(logging.WARNING)
    asked = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answer = {
            "profiles": [_profile(one) for one in asked["profiles"]],
            "cells": [_cell(one) for one in asked["cells"]],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
