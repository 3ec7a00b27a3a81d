"""The forward pass against transformers: whole, chunked, ragged; and checkpoints that must be refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pearl.engine.embedded.attention import Batch
from pearl.engine.embedded.kv_cache import KvCache
from pearl.engine.embedded.model import Model
from pearl.engine.embedded.weights import Place
from pearl.errors import ConfigError, ModelError
from pearl.records.training import model_hash

SLOTS, POSITIONS = 6, 64
TOLERANCE = 1e-4


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def operations(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute; on torch as where there is no compiler."""
    if request.param == "torch":
        monkeypatch.setattr("pearl.engine.embedded.operations.COMPILER", "no_such_package")
    return str(request.param)


class Runner:
    """Feeds chunks of given sequences to a model and gathers the logits of every position."""

    def __init__(self, model: Model, sequences: dict[int, list[int]], positions: int = POSITIONS) -> None:
        self.model, self.sequences = model, sequences
        self.cache = KvCache(model.architecture, SLOTS, positions, model.place)
        self.done = dict.fromkeys(sequences, 0)
        self.logits: dict[int, list[torch.Tensor]] = {slot: [] for slot in sequences}

    def run(self, counts: dict[int, int]) -> None:
        slots = np.array(list(counts), dtype=np.int64)
        batch = Batch.of(
            slots, np.array([self.done[s] for s in counts]), np.array(list(counts.values()), dtype=np.int64)
        )
        ids = np.array(
            [
                self.sequences[slot][position]
                for slot, position in zip(batch.token_slots, batch.token_positions, strict=True)
            ]
        )
        logits = self.model.forward(self.cache, batch, ids, np.arange(len(ids)))
        for slot, row in zip(batch.token_slots.tolist(), logits, strict=True):
            self.logits[slot].append(row)
        for slot, count in counts.items():
            self.done[slot] += count

    def check(self, reference: Any) -> None:
        for slot, ids in self.sequences.items():
            with torch.no_grad():
                want = reference(torch.tensor([ids])).logits[0]
            got = torch.stack(self.logits[slot])
            assert want.abs().max() > 1, "a model without opinions tests nothing"
            torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


def test_whole(folder: Path, reference: Any, kit: Any) -> None:
    runner = Runner(Model.read(folder), {2: kit.tokens(1, 50)})
    runner.run({2: 50})
    runner.check(reference)


@pytest.mark.parametrize("chunk", [1, 3, 7, 49])
def test_chunked(folder: Path, reference: Any, kit: Any, chunk: int) -> None:
    runner = Runner(Model.read(folder), {0: kit.tokens(2, 50)})
    while (left := 50 - runner.done[0]) > 0:
        runner.run({0: min(chunk, left)})
    runner.check(reference)


def test_ragged_mixture_of_prefill_and_decode(folder: Path, reference: Any, kit: Any) -> None:
    """Slots with holes between them, chunks of every length, some slots idle in some iterations."""
    lengths = {0: 40, 1: 31, 3: 22, 5: 55}
    runner = Runner(Model.read(folder), {slot: kit.tokens(10 + slot, length) for slot, length in lengths.items()})
    rng = np.random.default_rng(0)
    while any(runner.done[slot] < length for slot, length in lengths.items()):
        counts = {}
        for slot, length in lengths.items():
            count = min(int(rng.choice([0, 1, 1, 1, 2, 5, 9])), length - runner.done[slot])
            if count:
                counts[slot] = count
        if counts:
            runner.run(counts)
    runner.check(reference)


@pytest.mark.parametrize("seed", range(6))
def test_long_ragged_chunks(folder: Path, reference: Any, kit: Any, seed: int) -> None:
    """Chunks of several attention blocks beside each other, the longest not the one that reaches furthest."""
    rng = np.random.default_rng(seed)
    lengths = {slot: int(rng.integers(200, 400)) for slot in range(4)}
    sequences = {slot: kit.tokens(20 + slot, length) for slot, length in lengths.items()}
    runner = Runner(Model.read(folder), sequences, positions=400)
    runner.run({0: 129})
    while any(runner.done[slot] < length for slot, length in lengths.items()):
        wanted = {slot: int(rng.choice([0, 1, 40, 65, 90, 128, 130])) for slot in lengths}
        counts = {slot: min(count, lengths[slot] - runner.done[slot]) for slot, count in wanted.items()}
        if any(counts.values()):
            runner.run({slot: count for slot, count in counts.items() if count})
    runner.check(reference)


def test_decode_reads_scattered_slots(folder: Path, reference: Any, kit: Any) -> None:
    """Two of six slots, far apart, so that their keys and values are gathered."""
    runner = Runner(Model.read(folder), {0: kit.tokens(3, 20), 5: kit.tokens(4, 12)})
    runner.run({0: 10, 5: 2})
    for _ in range(10):
        runner.run({0: 1, 5: 1})
    runner.check(reference)


def test_stale_cache_of_an_earlier_sequence_does_not_show(folder: Path, reference: Any, kit: Any) -> None:
    model = Model.read(folder)
    first = Runner(model, {1: kit.tokens(5, 60)})
    first.run({1: 60})
    second = Runner(model, {1: kit.tokens(6, 20)})
    second.cache = first.cache
    second.run({1: 12})
    for _ in range(8):
        second.run({1: 1})
    second.check(reference)


@pytest.mark.parametrize(
    "sizes",
    [
        {"tied": False, "heads": 6, "kv_heads": 1, "head_dim": 8, "hidden": 40, "layers": 3, "intermediate": 72},
        {"heads": 2, "kv_heads": 2, "head_dim": 32, "layers": 1},
    ],
)
def test_other_shapes_and_rotary_base(tmp_path: Path, kit: Any, sizes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = kit.make_folder(tmp_path / "m", seed=4, **sizes)
    edit(folder, lambda config: config["rope_parameters"].update(rope_theta=500.0))
    runner = Runner(Model.read(folder), {slot: kit.tokens(slot, 30) for slot in range(3)})
    runner.run({0: 30, 1: 12, 2: 5})
    runner.run({1: 18, 2: 25})
    runner.check(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval())


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}}),
        ("qwen3", {"rope_parameters": YARN}),
        ("qwen3", {"rope_parameters": {**YARN, "attention_factor": 1.3, "beta_fast": 8.0, "truncate": False}}),
        ("qwen3_moe", MOE),
        ("qwen3_moe", {**MOE, "norm_topk_prob": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {**MOE, "decoder_sparse_step": 2}),
        ("qwen3_moe", {**MOE, "mlp_only_layers": [0, 2]}),
    ],
)
def test_families(tmp_path: Path, kit: Any, family: str, settings: dict[str, Any]) -> None:
    """Whole, chunked, batched and ragged, against transformers."""
    from transformers import AutoModelForCausalLM

    folder = kit.make_family(tmp_path / "m", family, **settings)
    lengths = {0: 45, 1: 60, 2: 33, 4: 18}
    runner = Runner(Model.read(folder), {slot: kit.tokens(slot, length) for slot, length in lengths.items()})
    runner.run({0: 45, 1: 20})
    runner.run({1: 39, 2: 7})
    runner.run({1: 1, 2: 1, 4: 3})
    runner.run({2: 25, 4: 15})
    runner.check(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval())


def test_bfloat16_stays_near_float32(folder: Path, kit: Any) -> None:
    """Eight bits of mantissa: logits of this model, which reach about 10, agree to a few tenths, and tokens mostly."""
    runs = []
    for dtype in ("float32", "bfloat16"):
        model = Model.read(folder, Place.of("cpu", dtype))
        runner = Runner(model, {0: kit.tokens(1, 40)})
        runner.run({0: 30})
        runner.run({0: 10})
        runs.append(torch.stack(runner.logits[0]).float())
    assert runs[1].dtype is torch.float32
    assert 0 < (runs[0] - runs[1]).abs().max() < 0.05 * runs[0].abs().max()
    assert (runs[0].argmax(-1) == runs[1].argmax(-1)).float().mean() > 0.8


def test_a_device_that_is_not_there() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ConfigError, match=r"engine\.device: got cuda, want cpu or auto"):
        Place.of("cuda", "float32")


def test_configuration_of_transformers_4(folder: Path, tmp_path: Path, reference: Any, kit: Any) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))

    def older(config: dict[str, Any]) -> None:
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        config["rope_scaling"] = None

    edit(copy, older)
    runner = Runner(Model.read(copy), {0: kit.tokens(1, 20)})
    runner.run({0: 20})
    runner.check(reference)


def test_weights_in_several_files_and_a_tied_head_stored_twice(
    folder: Path, tmp_path: Path, reference: Any, kit: Any
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, copy / file)
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    model = Model.read(copy)
    assert model.hash == Model.read(folder).hash
    runner = Runner(model, {0: kit.tokens(1, 20)})
    runner.run({0: 20})
    runner.check(reference)


def test_hash_is_that_of_the_stored_tensors(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    assert Model.read(folder).hash == model_hash((name, "F32", tuple(t.shape)) for name, t in stored.items())


def test_engine_does_not_import_transformers() -> None:
    code = "import sys, pearl.engine.embedded.threaded; sys.exit('transformers' in sys.modules or 'ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda c: c.update(model_type="gpt2"), "model_type: got 'gpt2', want one of qwen3, qwen3_moe, llama"),
        (lambda c: c.update(model_type="llama"), "self_attn.k_norm.weight: got a tensor"),
        (lambda c: c.update(model_type="qwen3_moe"), "num_local_experts: got None"),
        (lambda c: c.update(mlp_bias=True), "mlp_bias: got True"),
        (lambda c: c.pop("model_type"), "model_type: got None"),
        (lambda c: c.update(attention_bias=True), "attention_bias: got True"),
        (lambda c: c.update(hidden_act="gelu"), "hidden_act: got 'gelu'"),
        (lambda c: c.update(use_sliding_window=True), "use_sliding_window: got True"),
        (lambda c: c.update(rope_parameters={"rope_type": "dynamic"}), "rope_parameters: got rope_type 'dynamic'"),
        (lambda c: c.update(rope_parameters={"rope_type": "yarn"}), "rope_parameters.factor: got None"),
        (lambda c: c.update(rope_parameters=[1]), "rope_parameters: got"),
        (lambda c: c["rope_parameters"].update(mscale=1), "rope_parameters: got mscale"),
        (lambda c: c.update(rope_parameters={"rope_theta": -1}), "rope_parameters.rope_theta: got -1"),
        (lambda c: c.update(rope_scaling={"type": "linear"}), "rope_scaling.factor: got None"),
        (lambda c: c.update(rope_scaling={"type": "linear", "factor": 0}), "rope_scaling.factor: got 0"),
        (lambda c: c.update(num_hidden_layers=0), "num_hidden_layers: got 0"),
        (lambda c: c.update(hidden_size="64"), "hidden_size: got '64'"),
        (lambda c: c.update(num_key_value_heads=3), "num_key_value_heads: got 3"),
        (lambda c: c.update(head_dim=15), "head_dim: got 15"),
        (lambda c: c.update(rms_norm_eps=0), "rms_norm_eps: got 0"),
        (lambda c: c.update(num_hidden_layers=3), "model.layers.2.* missing"),
        (lambda c: c.update(num_hidden_layers=1), "model.layers.1.* does not call for"),
        (lambda c: c.update(intermediate_size=64), r"got shape \(128, 64\), want \(64, 64\)"),
        (lambda c: c.update(tie_word_embeddings=False), "lm_head.weight: missing"),
    ],
)
def test_configurations_that_are_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], says: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    edit(copy, change)
    with pytest.raises(ModelError, match=says):
        Model.read(copy)


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _set_nan(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"][3] = torch.nan
    save_file(tensors, path)


def _integers(path: Path) -> None:
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda p: p.unlink(), "no such file"),
        (_truncate, "not a readable safetensors file"),
        (lambda p: p.write_bytes(b""), "not a readable safetensors file"),
        (_set_nan, "model.norm.weight: holds numbers that are not finite"),
        (_integers, "model.norm.weight: got type I32, want one of F32, BF16, F16"),
    ],
)
def test_weight_files_that_are_refused(
    folder: Path, tmp_path: Path, damage: Callable[[Path], object], says: str
) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    damage(copy / "model.safetensors")
    with pytest.raises(ModelError, match=says):
        Model.read(copy)


@pytest.mark.parametrize(
    ("text", "says"), [(None, "config.json: no such file"), ("{", "cannot be read as JSON"), ("[]", "want an object")]
)
def test_config_files_that_are_refused(folder: Path, tmp_path: Path, text: str | None, says: str) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    (copy / "config.json").unlink()
    if text is not None:
        (copy / "config.json").write_text(text)
    with pytest.raises(ModelError, match=says):
        Model.read(copy)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        Model.read(tmp_path / "nowhere")


def test_an_index_that_is_not_one(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "m"))
    (copy / "model.safetensors").unlink()
    (copy / "model.safetensors.index.json").write_text('{"weights": 1}')
    with pytest.raises(ModelError, match="not an index"):
        Model.read(copy)


@pytest.mark.parametrize("threads", [1, 2])
def test_one_thread_and_float32_are_compiled_the_rest_runs_on_torch(
    folder: Path, kit: Any, operations: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model.read(folder)
    narrow = Model.read(folder, Place(device=torch.device("cpu"), dtype=torch.bfloat16))
    used = []
    turn = "pearl.engine.embedded.kernels.turn"
    monkeypatch.setattr(turn, lambda *_: used.append(True))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)

    Runner(model, {0: kit.tokens(2, 5)}).run({0: 5})
    assert bool(used) == (operations == "compiled" and threads == 1)
    used.clear()
    Runner(narrow, {0: kit.tokens(2, 5)}).run({0: 5})
    assert not used


def test_a_compiler_that_cannot_be_used_is_said_and_done_without(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, operations: str
) -> None:
    monkeypatch.setitem(sys.modules, "pearl.engine.embedded.compiled", None)

    assert Model.read(folder)._compiled is None
    assert ("numba is installed but cannot be used" in caplog.text) == (operations == "compiled")
