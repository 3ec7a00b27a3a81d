"""Extras as the command line knows them are those of the project file."""

import tomllib
from pathlib import Path

from pearl.cli.packages import EXTRAS, pip_command

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"


def test_extras_are_those_of_the_project_file() -> None:
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    for extra, packages in EXTRAS.items():
        assert {f"{name}>={minimum}" for name, minimum in packages.items()} == set(
            project["optional-dependencies"][extra]
        )
    assert pip_command("train") == f"pip install '{project['name']}[train]'"
