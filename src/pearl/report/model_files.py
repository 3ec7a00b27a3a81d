"""What a model folder means besides its weights: how tokens are made of text, and what the network computes with them.

A checkpoint brings the weights of a resumed run, but not these; another tokenizer or epsilon of the same shapes would go
unnoticed and give wrong results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
)
"""Of a Hugging Face model folder; each folder has some of them."""


def model_files(folder: Path) -> dict[str, str]:
    """File name -> SHA-256 of the files that are there.

    Raises:
        OSError: one cannot be read.
    """
    return {name: _digest(folder / name) for name in FILES if (folder / name).is_file()}


def changed_files(before: Mapping[str, str], folder: Path) -> tuple[str, ...]:
    """Names of the files that have come, gone or changed since `before`, in the order of `FILES`.

    Raises:
        OSError: one cannot be read.
    """
    now = model_files(folder)
    return tuple(name for name in FILES if before.get(name) != now.get(name))


def _digest(path: Path) -> str:
    return f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
