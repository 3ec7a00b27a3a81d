"""The tiny checkpoint: loads offline, same seed same bytes, template, atomic."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_tiny_qwen3.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_tiny_qwen3", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_tiny_qwen3"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "deeper" / "tiny"
    script.make_tiny_qwen3(out, script.TinyQwen3())
    return out


def tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_model_loads_with_the_size_asked_for(made: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made, local_files_only=True)
    config = model.config
    assert config.model_type == "qwen3"
    assert (config.hidden_size, config.num_hidden_layers, config.head_dim) == (64, 2, 16)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.max_position_embeddings == 512
    assert config.tie_word_embeddings
    assert str(model.dtype) == "torch.float32"
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    # 98 x 64 embedding, two layers of 2 x 64 x 64 + 2 x 64 x 32 attention, 3 x 64 x 128 MLP, 160 of norms, last norm 64.
    assert sum(p.numel() for p in model.parameters()) == 98 * 64 + 2 * (8192 + 4096 + 24576 + 160) + 64


def test_folder_holds_what_a_checkpoint_needs(made: Path) -> None:
    assert {file.name for file in made.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert [entry.name for entry in made.parent.iterdir()] == ["tiny"], "no scratch folder is left"


def test_every_printable_character_is_a_token(made: Path) -> None:
    tokenizer = tokenizer_of(made)
    text = "".join(chr(code) for code in range(32, 127)) + "\n"
    ids = tokenizer.encode(text)
    assert len(set(ids)) == 96
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<eos>") == [tokenizer.eos_token_id] == [1]
    assert tokenizer.encode("<pad>") == [tokenizer.pad_token_id] == [0]
    assert tokenizer.vocab_size == 98
    assert tokenizer.decode(tokenizer.encode("é\t")) == "??"


def test_chat_template_renders_cue_and_end(made: Path) -> None:
    tokenizer = tokenizer_of(made)
    messages = [
        {"role": "user", "content": " 1-9?\n"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "higher"},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == " 1-9?\n>5<eos>higher>"
    with_cue = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert with_cue == " 1-9?\n>5<eos>higher>"


def test_same_seed_same_bytes(script: ModuleType, tmp_path: Path, made: Path) -> None:
    script.make_tiny_qwen3(tmp_path / "again", script.TinyQwen3())
    script.make_tiny_qwen3(tmp_path / "other", script.TinyQwen3(seed=1))
    for file in made.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (made / weights).read_bytes()


def test_global_random_state_is_left_alone(script: ModuleType, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(3)
    want = torch.rand(4).tolist()
    torch.manual_seed(3)
    script.make_tiny_qwen3(tmp_path / "m", script.TinyQwen3(layers=1))
    assert torch.rand(4).tolist() == want


def test_an_existing_folder_is_replaced_only_by_force(script: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "m"
    out.mkdir()
    (out / "precious").write_text("x")
    assert script.main(["--out", str(out), "--layers", "1"]) == 2
    assert [file.name for file in out.iterdir()] == ["precious"]
    assert script.main(["--out", str(out), "--layers", "1", "--force"]) == 0
    assert (out / "model.safetensors").exists()
    assert not (out / "precious").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_a_failure_leaves_nothing_behind(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(script, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk is full"):
        script.make_tiny_qwen3(tmp_path / "m", script.TinyQwen3(layers=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--hidden", "0"], "--hidden: got 0, want >= 1"),
        (["--kv-heads", "3"], "--kv-heads: got 3, want a divisor of --heads 4"),
        (["--head-dim", "15"], "--head-dim: got 15, want an even number"),
        (["--init-std", "0"], "--init-std: got 0.0"),
    ],
)
def test_bad_sizes(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    assert script.main(["--out", str(tmp_path / "m"), *arguments]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_command_line_makes_an_untied_model_of_another_size(tmp_path: Path) -> None:
    out = tmp_path / "m"
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--hidden", "32", "--layers", "1", "--untied"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    # Two 98 x 32 embeddings, 2 x 32 x 64 + 2 x 32 x 32 attention, 3 x 32 x 64 MLP, norms 32 + 32 + 16 + 16 + 32.
    assert f"{2 * 98 * 32 + 6144 + 6144 + 128:,} parameters" in done.stdout
