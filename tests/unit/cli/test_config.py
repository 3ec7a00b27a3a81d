"""`pearl config`: every value with its origin, every mistake named."""

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pearl.cli.main import app
from pearl.config.load import load_recipe


def pearl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


class TestConfigShow:
    def test_every_value_with_its_origin(self) -> None:
        result = pearl_command("config", "show", "x.toml", "rollout.max_staleness=2", "environment.params.high=16")
        assert result.exit_code == 0
        lines = result.stdout.splitlines()
        shown = {line.partition("  #")[0].rstrip(): line.partition("  # ")[2] for line in lines}
        assert shown['path = "m"'] == "x.toml:2"
        assert shown["low = 1"] == "x.toml:6"
        assert shown["high = 16"] == "override"
        assert shown["max_staleness = 2"] == "override"
        assert shown["group_size = 8"] == "default"
        assert shown["# stop_at_success is not set"] == "default"
        comments = {line.index("  # ") for line in lines if "  # " in line}
        assert len(comments) == 1, "origins stand in one column"

    @pytest.mark.parametrize(
        "overrides",
        [
            [],
            ["environment.params={}"],
            ['environment.params.note=a # b \\ "c"'],
            ["fleet.tp=[1, 2]", "fleet.tp_pairs=[[1, 2], [2, 2]]", 'platform.profiles=["a, b.json", "c.json"]'],
        ],
    )
    def test_what_is_shown_is_the_recipe_itself(self, overrides: list[str]) -> None:
        Path("shown.toml").write_text(pearl_command("config", "show", "x.toml", *overrides).stdout)
        assert load_recipe(Path("shown.toml")).recipe == load_recipe(Path("x.toml"), overrides).recipe

    def test_a_list_stands_on_one_line(self) -> None:
        arguments = ("fleet.tp=[1, 2]", "fleet.tp_pairs=[[1, 2], [2, 2]]", 'platform.profiles=["a.json"]')
        lines = pearl_command("config", "show", "x.toml", *arguments).stdout.splitlines()
        shown = {line.partition("  #")[0].rstrip() for line in lines}
        assert {"tp = [1, 2]", "tp_pairs = [[1, 2], [2, 2]]", 'profiles = ["a.json"]'} <= shown

    def test_an_empty_table_is_shown(self) -> None:
        Path("y.toml").write_text('model.path = "m"\nenvironment.kind = "k"\n')
        result = pearl_command("config", "show", "y.toml")
        assert tomllib.loads(result.stdout)["environment"]["params"] == {}

    def test_json(self) -> None:
        document = json.loads(pearl_command("config", "show", "x.toml", "--json", "run.seed=3").stdout)
        assert document["run.seed"] == {"value": 3, "origin": "override"}
        assert document["environment.params.low"] == {"value": 1, "origin": "x.toml:6"}
        assert document["run.stop_at_success"] == {"value": None, "origin": "default"}


class TestConfigCheck:
    def test_a_fine_recipe(self) -> None:
        result = pearl_command("config", "check", "x.toml", "run.seed=3")
        assert result.exit_code == 0
        # path, kind, params.low and the seed are set.
        assert result.stdout.startswith("x.toml: fine; 4 values set, ")

    def test_mistakes_end_with_status_2_and_no_traceback(self) -> None:
        result = pearl_command("config", "check", "x.toml", "rollout.max_stalenes=3", "engine.shape=9X")
        assert result.exit_code == 2
        assert result.stdout == ""
        first, second = result.stderr.splitlines()
        assert first.startswith("command line: rollout.max_stalenes: unknown key; did you mean rollout.max_staleness?")
        assert second.startswith("command line: engine.shape: got '9X', want e.g. `2C`")

    def test_nothing_to_check(self) -> None:
        result = pearl_command("config", "check", "run.seed=3")
        assert result.exit_code == 2
        assert result.stderr.startswith("command line: no recipe; want at least one, e.g. ")
