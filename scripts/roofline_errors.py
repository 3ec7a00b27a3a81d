"""How far `pearl.silicon.roofline` is from the source of the shipped tables, also for models and GPUs that it was not fitted to.

    /tmp/silicon/bin/python -m scripts.roofline_errors    # a Python with the extra `silicon`: see make_iteration_tables

Prints the table of `docs/iteration-times.md`. Nothing is judged: it is a roofline.
"""

from __future__ import annotations

import logging
import sys
from itertools import product

import numpy as np

from pearl.silicon.roofline import Roofline, kv_capacity_tokens
from pearl.silicon.specs import GPUS, MODELS
from scripts.make_iteration_tables import BACKEND_VERSION, TPS, Model, Source, random_points

POINTS = 500
"""Per line."""
SHIPPED = tuple((name, gpu, tp) for name, gpu, tp in product(("qwen3-8b", "qwen3-30b-a3b"), ("h100", "h200"), TPS))
HELD_OUT = (
    ("qwen3-0.6b", "h100", 1),
    ("qwen3-1.7b", "h200", 1),
    ("qwen3-32b", "h100", 4),
    ("llama-3.1-8b", "h200", 2),
    ("llama-3.1-70b", "h200", 4),
    ("qwen3-8b", "b200", 1),
    ("qwen3-30b-a3b", "b200", 2),
    ("qwen3-8b", "l40s", 1),
    ("qwen3-8b", "a100", 1),
    ("qwen3-30b-a3b", "a100", 2),
)
PATHS = {"llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B", "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B"}
SYSTEMS = {"l40s": "l40s"}
"""As the source calls them; the others are its SXM boards."""
VERSIONS = {"a100": "0.14.0"}
"""Of vLLM, where the source has no newer one."""


def errors_of(name: str, gpu: str, tp: int) -> np.ndarray:
    """Relative, at random points that fit the GPU."""
    shape, spec = MODELS[name], GPUS[gpu]
    model = Model(name=shape.name, path=PATHS.get(name, f"Qwen/{shape.name}"), experts=shape.experts is not None)
    source = Source(model, SYSTEMS.get(gpu, f"{gpu}_sxm"), tp, VERSIONS.get(gpu, BACKEND_VERSION))
    line = Roofline(shape, spec, tp)
    points = random_points(POINTS, kv_capacity_tokens(shape, spec, tp), seed=tp)
    return np.array([line.seconds(*point) / source.seconds(*point) - 1 for point in points])


def main() -> int:
    """Always status 0."""
    logging.disable(logging.WARNING)
    print("| model, GPU | mean error | bias | 95 % |\n| --- | ---: | ---: | ---: |")
    groups = [
        ("the sixteen tables", SHIPPED),
        *((f"{name}, {gpu}, tp {tp}", ((name, gpu, tp),)) for name, gpu, tp in HELD_OUT),
    ]
    for title, cases in groups:
        errors = np.concatenate([errors_of(*case) for case in cases])
        shares = np.abs(errors).mean(), errors.mean(), np.quantile(np.abs(errors), 0.95)
        print(f"| {title} | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
