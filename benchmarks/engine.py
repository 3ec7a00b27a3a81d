"""How fast the embedded engine is beside transformers' `generate`, on a CPU with one thread, in float32.

    python -m benchmarks.engine            some minutes on one core
    python -m benchmarks.engine --quick    under a minute

Both sides sample from the same checkpoint at temperature 1, in turn, and the median counts. *generate*: 64 prompts of equal
length, 64 new tokens, so transformers needs no padding and no sequence waits for another; batch 64, its default cache, the
faster of its attentions. *multiturn*: 64 conversations of 3 to 5 turns with prompts, answers and observations of unequal
length. There the engine lets every conversation go on by itself and keeps its prefix. transformers takes one left-padded
`generate` per turn over all conversations and computes the whole context again each time, because `generate` keeps no cache
between calls: that is what a user of `generate` gets. Tokens per second count generated tokens, prefill is in the time; the
`_cpu` ratios are by CPU seconds, and say something on a busy machine, too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from benchmarks._generation import (
    Conversation,
    EngineSide,
    GenerateSide,
    Side,
    Taken,
    Turn,
    fastest_generate,
    logprob_error_and_entropy,
    timed,
)
from benchmarks._models import checkpoint
from benchmarks._report import Check, report
from scripts.make_tiny_qwen3 import TinyQwen3, vocabulary

SMALL = TinyQwen3(hidden=128, layers=4, heads=4, kv_heads=2, head_dim=32, intermediate=256, init_std=0.15)
"""0.6 million parameters; weights large enough for opinions, small enough for more than one nat of doubt."""
LARGE = TinyQwen3(hidden=384, layers=6, heads=6, kv_heads=2, head_dim=64, intermediate=1152, init_std=0.08)
"""10 million parameters."""
SEQUENCES = 64
NEW_TOKENS = 64
LENGTHS = (32, 64, 128, 256)
MAX_CONTEXT_TOKENS = 448
BATCHES = (1, 8, 32, 64)


class Pair(NamedTuple):
    """Median seconds of the two sides for the same work."""

    engine: Taken
    generate: Taken
    tokens: int

    @property
    def ratio(self) -> float:
        return self.generate.wall_s / self.engine.wall_s

    @property
    def cpu_ratio(self) -> float:
        return self.generate.cpu_s / self.engine.cpu_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engine", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer lengths and repeats")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(1)
    with checkpoint(SMALL) as (folder, small_parameters):
        checks, attention = _small(folder, repeats=2 if quick else 5, lengths=LENGTHS[::2] if quick else LENGTHS)
    with checkpoint(LARGE) as (folder, large_parameters):
        checks += _large(folder, attention, repeats=1 if quick else 5, lengths=LENGTHS[:1] if quick else LENGTHS[1::2])
    return report(
        "engine",
        checks,
        {
            "quick": quick,
            "model_small": f"Qwen3 random, hidden {SMALL.hidden}, {SMALL.layers} layers, {small_parameters} parameters",
            "model_large": f"Qwen3 random, hidden {LARGE.hidden}, {LARGE.layers} layers, {large_parameters} parameters",
            "vocabulary": len(vocabulary()),
            "threads": torch.get_num_threads(),
            "dtype": "float32",
            "generate_attention": attention,
        },
    )


def _small(folder: Path, *, repeats: int, lengths: Sequence[int]) -> tuple[list[Check], str]:
    engine, reference, attention = _sides(folder)
    error, entropy = logprob_error_and_entropy(engine, reference, _equal(64, sequences=8))
    pairs = {length: _measure(engine, reference, _equal(length), repeats) for length in lengths}
    turns = _measure(engine, reference, _ragged(), repeats)
    checks = [
        Check(name="logprob_error_max", value=error, target="<= 1e-3"),
        Check(name="entropy_nats", value=entropy, target=">= 1"),
        *_generate_checks("", pairs, target=">= 1.8"),
        Check(name="vs_transformers_multiturn", value=turns.ratio, target=">= 3"),
        Check(name="vs_transformers_multiturn_cpu", value=turns.cpu_ratio),
        Check(name="multiturn_tokens_per_s", value=turns.tokens / turns.engine.wall_s),
        Check(name="multiturn_generate_tokens_per_s", value=turns.tokens / turns.generate.wall_s),
    ]
    for batch in BATCHES:
        taken_s = statistics.median(timed(engine, _equal(64, sequences=batch)).wall_s for _ in range(repeats))
        checks.append(Check(name=f"batch_{batch}_tokens_per_s", value=batch * NEW_TOKENS / taken_s))
    return checks, attention


def _large(folder: Path, attention: str, *, repeats: int, lengths: Sequence[int]) -> list[Check]:
    engine, reference = _engine(folder), GenerateSide(folder, attention)
    reference.play(_equal(64, new_tokens=1))
    pairs = {length: _measure(engine, reference, _equal(length), repeats) for length in lengths}
    return _generate_checks("large_", pairs, target=None)


def _sides(folder: Path) -> tuple[EngineSide, GenerateSide, str]:
    reference, attention = fastest_generate(folder, _equal(64, new_tokens=16))
    return _engine(folder), reference, attention


def _engine(folder: Path) -> EngineSide:
    engine = EngineSide(folder, sequences=SEQUENCES, max_context_tokens=MAX_CONTEXT_TOKENS)
    engine.play(_equal(64, new_tokens=2))
    return engine


def _generate_checks(prefix: str, pairs: dict[int, Pair], *, target: str | None) -> list[Check]:
    total = Pair(
        engine=_sum([pair.engine for pair in pairs.values()]),
        generate=_sum([pair.generate for pair in pairs.values()]),
        tokens=sum(pair.tokens for pair in pairs.values()),
    )
    return [
        Check(name=f"{prefix}vs_transformers_generate", value=total.ratio, target=target),
        Check(name=f"{prefix}vs_transformers_generate_cpu", value=total.cpu_ratio),
        *(Check(name=f"{prefix}vs_transformers_generate_{length}", value=pair.ratio) for length, pair in pairs.items()),
        Check(name=f"{prefix}tokens_per_s", value=total.tokens / total.engine.wall_s),
        Check(name=f"{prefix}generate_tokens_per_s", value=total.tokens / total.generate.wall_s),
    ]


def _sum(parts: Sequence[Taken]) -> Taken:
    return Taken(sum(part.wall_s for part in parts), sum(part.cpu_s for part in parts))


def _median(parts: Sequence[Taken]) -> Taken:
    return Taken(statistics.median(part.wall_s for part in parts), statistics.median(part.cpu_s for part in parts))


def _measure(engine: Side, reference: Side, conversations: Sequence[Conversation], repeats: int) -> Pair:
    """Let the sides play in turn; which of them begins alternates."""
    taken: dict[Side, list[Taken]] = {engine: [], reference: []}
    for repeat in range(repeats):
        for side in (engine, reference) if repeat % 2 == 0 else (reference, engine):
            taken[side].append(timed(side, conversations))
    return Pair(
        engine=_median(taken[engine]),
        generate=_median(taken[reference]),
        tokens=sum(conversation.new_tokens for conversation in conversations),
    )


def _equal(length: int, *, sequences: int = SEQUENCES, new_tokens: int = NEW_TOKENS) -> list[Conversation]:
    """One turn each, of prompts of one length."""
    prompts = np.random.default_rng(length).integers(2, len(vocabulary()), (sequences, length))
    turns = (Turn(new_tokens=new_tokens),)
    return [Conversation(prompt=tuple(prompt), turns=turns) for prompt in prompts.tolist()]


def _ragged() -> list[Conversation]:
    """Prompts of 16 to 64 tokens, 3 to 5 turns of 8 to 40 new tokens, observations of 4 to 24 tokens."""
    random = np.random.default_rng(0)

    def text(low: int, high: int) -> tuple[int, ...]:
        return tuple(random.integers(2, len(vocabulary()), random.integers(low, high + 1)).tolist())

    return [
        Conversation(
            prompt=text(16, 64),
            turns=tuple(
                Turn(new_tokens=int(random.integers(8, 41)), observation=text(4, 24))
                for _ in range(random.integers(3, 6))
            ),
        )
        for _ in range(SEQUENCES)
    ]


if __name__ == "__main__":
    sys.exit(main())
