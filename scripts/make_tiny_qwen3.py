"""Write a Hugging Face folder with a tiny, randomly initialised Qwen3 and a character tokenizer.

For tests, demos and smoke runs without a network: the default is about 80 thousand parameters. The same arguments give
bit-identical weights.

    python scripts/make_tiny_qwen3.py --out models/tiny-qwen3 --hidden 64 --layers 2 --seed 0
"""

from __future__ import annotations

import argparse
import shutil
import string
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ModelError, UserError

PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "?"
"""What a character outside the vocabulary becomes."""
CHARACTERS = "\n" + " " + string.digits + string.ascii_letters + string.punctuation

# Contexts are kept short: one cue character ends a user message, one token ends an answer, nothing opens either.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- message['content'] -}}"
    "{%- if message['role'] == 'assistant' -%}{{- '<eos>' -}}{%- else -%}{{- '>' -}}{%- endif -%}"
    "{%- endfor -%}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyQwen3:
    """What to make."""

    hidden: int = 64
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    max_positions: int = 512
    init_std: float = 0.08
    """Standard deviation of the weights; larger ones give a model of strong, arbitrary opinions."""
    tied: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        sizes = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "max_positions")
        for name in sizes:
            if getattr(self, name) < 1:
                raise ModelError(f"--{name.replace('_', '-')}: got {getattr(self, name)}, want >= 1")
        if not 0 < self.init_std < 10:
            raise ModelError(f"--init-std: got {self.init_std}, want more than 0 and less than 10")
        if self.heads % self.kv_heads:
            raise ModelError(f"--kv-heads: got {self.kv_heads}, want a divisor of --heads {self.heads}")
        if self.head_dim % 2:
            raise ModelError(f"--head-dim: got {self.head_dim}, want an even number (rotary pairs)")


def make_tiny_qwen3(out: Path, spec: TinyQwen3, *, force: bool = False) -> int:
    """Write the folder atomically and return the number of parameters.

    Raises:
        ModelError: `out` exists and `force` is not set.
    """
    if out.exists() and not force:
        raise ModelError(f"{out}: exists already; choose another folder, or pass --force to replace it")
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        scratch.chmod(0o755)
        parameters = _write_model(scratch, spec)
        _write_tokenizer(scratch, spec)
        for file in scratch.iterdir():
            file.chmod(0o644)
        if out.exists():
            old = scratch.with_name(scratch.name + ".old")
            out.rename(old)
            scratch.rename(out)
            shutil.rmtree(old)
        else:
            scratch.rename(out)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return parameters


def vocabulary() -> dict[str, int]:
    """Token -> id: `<pad>` 0, `<eos>` 1, then newline, space, digits, letters, punctuation."""
    return {token: index for index, token in enumerate((PAD, EOS, *CHARACTERS))}


def _write_model(folder: Path, spec: TinyQwen3) -> int:
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # one file of 300 KB
    ids = vocabulary()
    config = Qwen3Config(
        vocab_size=len(ids),
        hidden_size=spec.hidden,
        intermediate_size=spec.intermediate,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_positions,
        initializer_range=spec.init_std,
        tie_word_embeddings=spec.tied,
        bos_token_id=None,
        eos_token_id=ids[EOS],
        pad_token_id=ids[PAD],
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(eos_token_id=ids[EOS], pad_token_id=ids[PAD], do_sample=True)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_tokenizer(folder: Path, spec: TinyQwen3) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    # Byte pairs without a merge: every character is a token.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary(), merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(PAD, special=True), AddedToken(EOS, special=True)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        model_max_length=spec.max_positions,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(folder, save_jinja_files=False)


def main(arguments: list[str] | None = None) -> int:
    """Command line; exit status 2 when the folder cannot be made."""
    default = TinyQwen3()
    parser = argparse.ArgumentParser(description="Write a tiny random Qwen3 with a character tokenizer.")
    parser.add_argument("--out", type=Path, required=True, help="folder to make")
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--heads", type=int, default=default.heads)
    parser.add_argument("--kv-heads", type=int, default=default.kv_heads)
    parser.add_argument("--head-dim", type=int, default=default.head_dim)
    parser.add_argument("--intermediate", type=int, help="default: twice --hidden")
    parser.add_argument("--max-positions", type=int, default=default.max_positions)
    parser.add_argument("--init-std", type=float, default=default.init_std)
    parser.add_argument("--untied", action="store_true", help="give the head weights of its own")
    parser.add_argument("--seed", type=int, default=default.seed)
    parser.add_argument("--force", action="store_true", help="replace an existing folder")
    given = parser.parse_args(arguments)
    try:
        spec = TinyQwen3(
            hidden=given.hidden,
            layers=given.layers,
            heads=given.heads,
            kv_heads=given.kv_heads,
            head_dim=given.head_dim,
            intermediate=2 * given.hidden if given.intermediate is None else given.intermediate,
            max_positions=given.max_positions,
            init_std=given.init_std,
            tied=not given.untied,
            seed=given.seed,
        )
        parameters = make_tiny_qwen3(given.out, spec, force=given.force)
    except UserError as error:
        print(f"make_tiny_qwen3: {error}", file=sys.stderr)
        return 2
    print(f"{given.out}: {parameters:,} parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
