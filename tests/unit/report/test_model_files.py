"""Checksums of what a model means besides its weights."""

from __future__ import annotations

from pathlib import Path

from pearl.report.model_files import changed_files, model_files

# printf '{}' | sha256sum
EMPTY_OBJECT = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


def test_files_that_are_there_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("weights")
    (tmp_path / "README.md").write_text("words")
    (tmp_path / "vocab.json").mkdir()
    assert model_files(tmp_path) == {"config.json": EMPTY_OBJECT}
    assert model_files(tmp_path / "nowhere") == {}


def test_what_came_went_and_changed_is_named(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "merges.txt"):
        (tmp_path / name).write_text("{}")
    before = model_files(tmp_path)
    assert changed_files(before, tmp_path) == ()
    (tmp_path / "model.safetensors").write_text("other weights")
    assert changed_files(before, tmp_path) == ()
    (tmp_path / "config.json").write_text("{ }")
    (tmp_path / "merges.txt").unlink()
    (tmp_path / "chat_template.jinja").write_text("")
    assert changed_files(before, tmp_path) == ("config.json", "chat_template.jinja", "merges.txt")
