"""Make the tables of iteration times that pearl ships (`src/pearl/silicon/tables`), from NVIDIA's measured kernel times.

The source is `aiconfigurator-core`: the time of every kernel of a model on a GPU under vLLM, measured by NVIDIA, and its rule
for what an iteration is made of. It is large, so it has a Python of its own:

    python -m venv /tmp/silicon && /tmp/silicon/bin/pip install '.[silicon]'
    /tmp/silicon/bin/python scripts/make_iteration_tables.py            # write tables, print how exact they are
    /tmp/silicon/bin/python scripts/make_iteration_tables.py --check    # compare what is shipped; status 1 where it differs

An iteration of p prefill tokens and d decoding sequences at context c, as `pearl.core.profile.IterationTimes` means it, is the
sum of what the source takes for

- everything but attention, of p + d tokens (its mixed step; it depends on their sum alone);
- attention of d sequences that are c long, their new token included;
- attention of p tokens that are the last ones of sequences that are c long. More than c tokens are whole sequences and the end of
  another, which takes the share of a whole sequence that its pairs of tokens have.

The source's own mixed step takes the mean over all chunks of a prompt for the last part; the rest is its rule unchanged. Noise in
the measurements (fewer seconds for more work) is mended: each value is the mean of the largest up to it and the smallest from it
on.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pearl.core.priors import platform_prior
from pearl.core.profile import IterationTimes, PlatformProfile

FOLDER = Path(__file__).resolve().parent.parent / "src" / "pearl" / "silicon" / "tables"
BACKEND, BACKEND_VERSION = "vllm", "0.24.0"
TPS = (1, 2, 4, 8)
PREFILL = (0, 1, 2, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
DECODING = (0, 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
CONTEXT = (64, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""With four times as many points errors between them fall by a fifth: what is left are steps of the source, where kernels change.
Contexts below 64 cost what 64 tokens do."""
DIGITS = 4
MEMORY_SHARE = 0.9
"""Of a GPU that vLLM takes by default."""
MILLISECONDS = 1e-3
POINTS = 2000
"""At which the error of interpolation is measured, per table."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model that tables are made of."""

    name: str
    path: str
    """As the source calls it."""
    experts: bool
    hash: str = ""
    """`pearl.records.training.model_hash` of its bfloat16 checkpoint."""


MODELS = (
    Model(name="Qwen3-8B", path="Qwen/Qwen3-8B", hash="0ffbd871c5ba1e71", experts=False),
    Model(name="Qwen3-30B-A3B", path="Qwen/Qwen3-30B-A3B", hash="c51bef06dc76297f", experts=True),
)
GPUS = {"h100": "h100_sxm", "h200": "h200_sxm"}
"""Name -> as the source calls it."""


class Source:
    """One model on one kind of GPU with one tensor parallelism; times in seconds."""

    def __init__(self, model: Model, system: str, tp: int, version: str = BACKEND_VERSION) -> None:
        """Load the kernels of a GPU, named as the source calls it, under a version of vLLM."""
        # Experts are cut like everything else: what vLLM does unless it is told to spread them.
        self._version = version
        self._split: dict[str, int] = {
            "tp_size": tp,
            **({"moe_tp_size": tp, "moe_ep_size": 1} if model.experts else {}),
        }
        self._where = (model.path, system, BACKEND)
        engine = _module("sdk.engine").EngineHandle
        self.engine: Any = engine.compile(*self._where, backend_version=version, **self._split)
        self.shared_s = cache(self._shared_s)

    def _shared_s(self, tokens: int) -> float:
        """All but attention."""
        return self._mixed(tokens, 0, max(tokens, 1))[1]

    def decode_attention_s(self, decoding: int, context_tokens: int) -> float:
        """Of sequences that are so long with their new token."""
        return self._mixed(0, decoding, context_tokens - 1)[3] if decoding else 0.0

    def prefill_attention_s(self, tokens: int, context_tokens: int) -> float:
        """Of the last tokens of sequences that are so long."""
        if not tokens:
            return 0.0
        whole, rest = divmod(tokens, context_tokens)
        if not whole:
            return self._context_attention_s(1, context_tokens, context_tokens - tokens)
        taken_s = self._context_attention_s(whole, context_tokens, 0)
        if not rest:
            return taken_s
        further_s = self._context_attention_s(whole + 1, context_tokens, 0) - taken_s
        share = rest / context_tokens
        return taken_s + (2 - share) * share * further_s

    def seconds(self, prefill_tokens: int, decoding: int, context_tokens: int) -> float:
        """Of one iteration, by the rule of the module, with all noise."""
        return (
            self.shared_s(prefill_tokens + decoding)
            + self.decode_attention_s(decoding, context_tokens)
            + self.prefill_attention_s(prefill_tokens, context_tokens)
        )

    def kv(self) -> tuple[int, int]:
        """Tokens that fit on all GPUs of a worker, and what each takes on all of them: repeated heads count each time."""
        estimate = _module("sdk.memory").estimate_kv_cache(
            *self._where,
            self._version,
            max_num_tokens=PREFILL[-1],
            max_batch_size=DECODING[-1],
            memory_fraction_kind="of_total",
            memory_fraction_value=MEMORY_SHARE,
            **self._split,
        )
        return int(estimate["total_kv_size_tokens"]), int(estimate["kv_size_per_token_bytes"]) * self._split["tp_size"]

    def _mixed(self, tokens: int, decoding: int, context_tokens: int) -> tuple[float, ...]:
        parts = self.engine.mixed_step_breakdown(tokens, decoding, context_tokens, 2, 0)
        return tuple(part * MILLISECONDS for part in parts)

    def _context_attention_s(self, sequences: int, context_tokens: int, cached_tokens: int) -> float:
        parts, _ = self.engine.run_static_per_op(
            batch_size=sequences, isl=context_tokens, osl=1, prefix=cached_tokens, mode="static_ctx"
        )
        return float(next(part[1] for part in parts if part[0] == "context_attention")) * MILLISECONDS


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"aiconfigurator_core.{name}")
    except ImportError as error:
        sys.exit(f"make_iteration_tables: {error}; want the extra: pip install '.[silicon]'")


# -- a table --------------------------------------------------------------------------------------------------------


def mend(values: Floats, axis: int) -> Floats:
    """Rising along an axis, and changed by no more than half of what any two values are out of order by."""
    largest = np.maximum.accumulate(values, axis)
    smallest = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return np.asarray((largest + smallest) / 2, dtype=np.float64)


def rounded(seconds: float) -> float:
    """So many digits as files have; keeps order."""
    return float(f"{seconds:.{DIGITS}g}")


def grid(rows: Sequence[int], value: Callable[[int, int], float]) -> Floats:
    """Values over rows and contexts, mended along both; nothing to compute comes first and takes no time."""
    values = np.array([[value(row, context) for context in CONTEXT] for row in rows])
    return mend(mend(values, 0), 1)


def times_of(source: Source) -> IterationTimes:
    """The table."""
    # The cell of nothing is what an iteration costs before its first token: that of a single one, without attention.
    shared = mend(np.array([source.shared_s(max(count, 1)) for count in range(PREFILL[-1] + DECODING[-1] + 1)]), 0)
    prefill = grid(PREFILL, source.prefill_attention_s)
    decode = grid(DECODING, source.decode_attention_s)
    cells_s = tuple(
        tuple(
            tuple(rounded(shared[p + d] + prefill[i, c] + decode[j, c]) for c in range(len(CONTEXT)))
            for j, d in enumerate(DECODING)
        )
        for i, p in enumerate(PREFILL)
    )
    return IterationTimes(prefill_tokens=PREFILL, decoding=DECODING, context_tokens=CONTEXT, cells_s=cells_s)


def profile_of(model: Model, gpu: str, tp: int, source: Source) -> PlatformProfile:
    """The file: times and KV from the source; hand-offs and changes of state, which it does not know, are those of the priors."""
    prior = platform_prior(f"{model.name.lower()}-{gpu}").by_tp[1]
    capacity_tokens, bytes_per_token = source.kv()
    return PlatformProfile(
        model=model.name,
        model_hash=model.hash,
        device=f"NVIDIA {gpu.upper()} SXM (tabulated)",
        dtype="bfloat16",
        tp=tp,
        iterations=times_of(source),
        kv_capacity_tokens=capacity_tokens,
        kv_bytes_per_token=bytes_per_token,
        hand_off=prior.hand_off,
        weight_load_s=prior.weight_load_s,
        sleep_s=prior.sleep_s,
        wake_s=round(prior.wake_s, 6),
        engine_start_s=prior.engine_start_s,
    )


# -- how exact it is ------------------------------------------------------------------------------------------------


def random_points(count: int, capacity_tokens: int, seed: int) -> Iterator[tuple[int, int, int]]:
    """Iterations: even in the logarithms, a third without prefill, a sixth without decoding, all within the KV capacity."""
    random = np.random.default_rng(seed)
    while count:
        prefill = 0 if random.random() < 1 / 3 else round(PREFILL[-1] ** random.random())
        decoding = 0 if random.random() < 1 / 6 else round(DECODING[-1] ** random.random())
        context = round(CONTEXT[0] * (CONTEXT[-1] / CONTEXT[0]) ** random.random())
        if prefill + decoding and decoding * context + prefill <= capacity_tokens:
            count -= 1
            yield prefill, decoding, context


def errors_of(source: Source, profile: PlatformProfile) -> Floats:
    """Of the table against the source as it is, relative, at random points."""
    points = list(random_points(POINTS, profile.kv_capacity_tokens, seed=profile.tp))
    return np.array([profile.iterations.seconds(*point) / source.seconds(*point) - 1 for point in points])


def mended_share(source: Source, times: IterationTimes) -> float:
    """Largest change that mending made to a point of the grid, relative."""
    return max(
        abs(cell / source.seconds(p, d, c) - 1)
        for p, plane in zip(times.prefill_tokens, times.cells_s, strict=True)
        for d, row in zip(times.decoding, plane, strict=True)
        for c, cell in zip(times.context_tokens, row, strict=True)
        if p + d
    )


def own_steps_share(source: Source) -> float:
    """Largest difference from what the source says of iterations that only decode, only prefill, or take whole prompts.

    Its kernels for decoding alone are others than for mixed steps, so they need not be equal.
    """
    engine, found = source.engine, [0.0]
    for p in (128, 2048, 8192):
        for d in (1, 16, 128):
            pairs = (
                ((0, d, p), engine.decode_step_latency(d, p - 1, 2)),
                ((p, 0, p), engine.predict_prefill_latency(1, p, 0)),
                ((p, d, p), engine.mixed_step_latency(p, d, p, 2, 0)),
            )
            found += [abs(source.seconds(*point) / (own * MILLISECONDS) - 1) for point, own in pairs]
    return max(found)


HEAD = (
    "| table | mean error | within 2 % | 95 % | largest | mended | own steps |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def row_of(name: str, source: Source, profile: PlatformProfile) -> str:
    """A table's line of the report, in percent."""
    errors = np.abs(errors_of(source, profile))
    shares = (
        errors.mean(),
        (errors <= 0.02).mean(),
        np.quantile(errors, 0.95),
        errors.max(),
        mended_share(source, profile.iterations),
        own_steps_share(source),
    )
    return f"| `{name}` | " + " | ".join(f"{share:.1%}".replace("%", " %") for share in shares) + " |"


# -- the command ----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where `--check` finds a difference."""
    parser = argparse.ArgumentParser(description="Make the tables of iteration times that pearl ships.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the tables (default: the package's)")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of tables of other models that the source fills from elsewhere
    rows, different = [HEAD], []
    for model in MODELS:
        for gpu in GPUS:
            for tp in TPS:
                source, path = Source(model, GPUS[gpu], tp), options.out / f"{model.name.lower()}-{gpu}-tp{tp}.json"
                profile = profile_of(model, gpu, tp, source)
                rows.append(row_of(path.name, source, profile))
                if not options.check:
                    path.write_text(profile.to_json(), encoding="utf-8")
                elif not path.is_file() or path.read_text(encoding="utf-8") != profile.to_json():
                    different.append(path.name)
    report, readme = "\n".join(rows), options.out / "README.md"
    print(report)
    if options.check and report not in readme.read_text(encoding="utf-8"):
        different.append(f"{readme.name} (its table of errors)")
    for name in different:
        print(f"{name}: differs from what the source says")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
