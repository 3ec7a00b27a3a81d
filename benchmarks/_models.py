"""Checkpoints for benchmarks: Qwen3 of random weights, made anew in a scratch folder."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.make_tiny_qwen3 import TinyQwen3, make_tiny_qwen3


@contextlib.contextmanager
def checkpoint(spec: TinyQwen3) -> Iterator[tuple[Path, int]]:
    """The folder, which goes with the block, and its parameters."""
    with tempfile.TemporaryDirectory(prefix="pearl-model-") as root:
        folder = Path(root) / "qwen3"
        yield folder, make_tiny_qwen3(folder, spec)
