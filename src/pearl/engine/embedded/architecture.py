"""What a checkpoint's `config.json` says: sizes of the network and the tensors that it must hold.

Invariant *no guess*: a setting that the forward pass does not implement is refused, never ignored.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pearl.engine.embedded.rotary import Rotary, read_rotary
from pearl.errors import ModelError

CONFIG_FILE = "config.json"
FAMILIES = ("qwen3", "qwen3_moe", "llama")
NORM_EPSILON = 1e-6
"""Where a configuration names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of an MLP."""

    count: int
    per_token: int
    intermediate: int
    normalised: bool
    """Whether the weights of a token's experts sum to one."""
    layers: tuple[bool, ...]
    """Which layers have one; the others have an MLP."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A decoder of the Qwen3, Qwen3-MoE or Llama family."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    rotary: Rotary
    norm_epsilon: float
    tied: bool
    """Whether the head is the embedding."""
    head_norms: bool
    """Whether queries and keys are normalised per head."""
    experts: Experts | None = None

    def has_experts(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    @property
    def kv_elements(self) -> int:
        """Numbers per token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name -> shape of every tensor of the checkpoint; a tied head counts once, as the embedding."""
        hidden, queries, keys = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, hidden)}
        for layer in range(self.layers):
            parts: dict[str, tuple[int, ...]] = {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (queries, hidden),
                "self_attn.k_proj": (keys, hidden),
                "self_attn.v_proj": (keys, hidden),
                "self_attn.o_proj": (hidden, queries),
                "post_attention_layernorm": (hidden,),
                **self._mlp_tensors(layer),
            }
            if self.head_norms:
                parts |= {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)}
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
        shapes["model.norm.weight"] = (hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, hidden)
        return shapes

    def _mlp_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        experts = self.experts if self.has_experts(layer) else None
        names = ["mlp"] if experts is None else [f"mlp.experts.{expert}" for expert in range(experts.count)]
        inner = self.intermediate if experts is None else experts.intermediate
        shapes: dict[str, tuple[int, ...]] = {}
        for name in names:
            shapes |= {
                f"{name}.gate_proj": (inner, self.hidden),
                f"{name}.up_proj": (inner, self.hidden),
                f"{name}.down_proj": (self.hidden, inner),
            }
        return shapes if experts is None else {**shapes, "mlp.gate": (experts.count, self.hidden)}


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
        family = self._config.get("model_type")
        if family not in FAMILIES:
            raise ModelError(f"{self._path}: model_type: got {family!r}, want one of {', '.join(FAMILIES)}")
        for key, want in (
            ("attention_bias", False),
            ("mlp_bias", False),
            ("hidden_act", "silu"),
            ("use_sliding_window", False),
            ("partial_rotary_factor", 1.0),
        ):
            if self._config.get(key, want) != want:
                raise self._unsupported(key, want)
        hidden, heads = self._whole("hidden_size"), self._whole("num_attention_heads")
        layers = self._whole("num_hidden_layers")
        architecture = Architecture(
            vocabulary=self._whole("vocab_size"),
            hidden=hidden,
            intermediate=self._whole("intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=self._whole("num_key_value_heads", heads),
            head_dim=self._whole("head_dim", max(1, hidden // heads)),
            max_positions=self._whole("max_position_embeddings"),
            rotary=self._rotary(),
            norm_epsilon=self._positive("rms_norm_eps", NORM_EPSILON),
            tied=bool(self._config.get("tie_word_embeddings", False)),
            head_norms=family != "llama",
            experts=self._experts(layers) if family == "qwen3_moe" else None,
        )
        if heads % architecture.kv_heads:
            raise self._unsupported("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if architecture.head_dim % 2:
            raise self._unsupported("head_dim", "an even number")
        return architecture

    def _rotary(self) -> Rotary:
        try:
            return read_rotary(self._config)
        except ValueError as error:
            raise ModelError(f"{self._path}: {error}") from None

    def _experts(self, layers: int) -> Experts:
        # transformers 5 writes the second name.
        count = self._whole("num_experts" if "num_experts" in self._config else "num_local_experts")
        per_token = self._whole("num_experts_per_tok")
        if per_token > count:
            raise self._unsupported("num_experts_per_tok", f"at most num_experts {count}")
        step, dense = self._whole("decoder_sparse_step", 1), self._config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise self._unsupported("mlp_only_layers", "a list of layers")
        return Experts(
            count=count,
            per_token=per_token,
            intermediate=self._whole("moe_intermediate_size"),
            normalised=bool(self._config.get("norm_topk_prob", False)),
            layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
        )

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
