"""What a checkpoint's `config.json` says: sizes of the network and the tensors that it must hold.

Invariant *no guess*: a setting that the forward pass does not implement is refused, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pearl.errors import ModelError

CONFIG_FILE = "config.json"
ROTARY_BASE = 10_000.0
"""Default of Qwen3 where the configuration names none."""
NORM_EPSILON = 1e-6
"""Default of Qwen3 where the configuration names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Qwen3 dense family."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rotary_base: float
    norm_epsilon: float
    tied: bool
    """Whether the head is the embedding."""

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the checkpoint; a tied head counts once, as the embedding."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            shapes |= {
                f"model.layers.{layer}.{name}.weight": shape
                for name, shape in (
                    ("input_layernorm", (hidden,)),
                    ("self_attn.q_proj", (queries, hidden)),
                    ("self_attn.k_proj", (keys, hidden)),
                    ("self_attn.v_proj", (keys, hidden)),
                    ("self_attn.o_proj", (hidden, queries)),
                    ("self_attn.q_norm", (self.head_dim,)),
                    ("self_attn.k_norm", (self.head_dim,)),
                    ("post_attention_layernorm", (hidden,)),
                    ("mlp.gate_proj", (self.intermediate, hidden)),
                    ("mlp.up_proj", (self.intermediate, hidden)),
                    ("mlp.down_proj", (hidden, self.intermediate)),
                )
            }
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        return shapes


def read_architecture(folder: Path) -> Architecture:
    """Read `config.json` of a Hugging Face folder.

    Raises:
        ModelError: no such folder or file, not JSON, another architecture, or a setting that is not implemented.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such folder; want a Hugging Face checkpoint (config.json, model.safetensors)")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file; want a Hugging Face checkpoint") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: got {type(config).__name__}, want an object")
    return _Reader(path, config).architecture()


class _Reader:
    """Typed access to one configuration."""

    def __init__(self, path: Path, config: dict[str, object]) -> None:
        self._path = path
        self._config = config

    def architecture(self) -> Architecture:
        kind = self._config.get("model_type")
        if kind != "qwen3":
            raise ModelError(f"{self._path}: model_type: got {kind!r}, want 'qwen3' (the dense Qwen3 family)")
        for key, want in (("attention_bias", False), ("hidden_act", "silu"), ("use_sliding_window", False)):
            if self._config.get(key, want) != want:
                raise self._unsupported(key, want)
        hidden, heads = self._whole("hidden_size"), self._whole("num_attention_heads")
        architecture = Architecture(
            vocabulary=self._whole("vocab_size"),
            hidden=hidden,
            intermediate=self._whole("intermediate_size"),
            layers=self._whole("num_hidden_layers"),
            heads=heads,
            kv_heads=self._whole("num_key_value_heads"),
            head_dim=self._whole("head_dim", max(1, hidden // heads)),
            max_positions=self._whole("max_position_embeddings"),
            rotary_base=self._rotary_base(),
            norm_epsilon=self._positive("rms_norm_eps", NORM_EPSILON),
            tied=bool(self._config.get("tie_word_embeddings", False)),
        )
        if heads % architecture.kv_heads:
            raise self._unsupported("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if architecture.head_dim % 2:
            raise self._unsupported("head_dim", "an even number")
        return architecture

    def _rotary_base(self) -> float:
        """Both layouts of transformers: `rope_parameters` (5), or `rope_theta` with `rope_scaling` (4)."""
        parameters = self._config.get("rope_parameters") or {}
        if not isinstance(parameters, dict) or parameters.get("rope_type", "default") != "default":
            raise self._unsupported("rope_parameters", "rope_type 'default'")
        if self._config.get("rope_scaling") is not None:
            raise self._unsupported("rope_scaling", None)
        if "rope_theta" in parameters:
            return _positive(self._path, "rope_parameters.rope_theta", parameters["rope_theta"])
        return self._positive("rope_theta", ROTARY_BASE)

    def _whole(self, key: str, default: int | None = None) -> int:
        value = self._config.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{self._path}: {key}: got {value!r}, want a whole number >= 1")
        return value

    def _positive(self, key: str, default: float) -> float:
        return _positive(self._path, key, self._config.get(key, default))

    def _unsupported(self, key: str, want: object) -> ModelError:
        got = self._config.get(key)
        return ModelError(f"{self._path}: {key}: got {got!r}, want {want!r} (nothing else is supported)")


def _positive(path: Path, key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ModelError(f"{path}: {key}: got {value!r}, want a number > 0")
    return float(value)
