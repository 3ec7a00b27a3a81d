"""What the tests of the command line share."""

from pathlib import Path

import pytest

RECIPE = '[model]\npath = "m"\n\n[environment]\nkind = "guess_number"\nparams = { low = 1 }\n'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with one recipe, `x.toml`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.toml").write_text(RECIPE)
    return tmp_path
