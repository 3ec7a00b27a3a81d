"""Recipes: layers, overrides, origins, and every mistake named."""

import math
import os
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.config.check import Problem
from pearl.config.load import dump_toml, load_recipe, parse_override
from pearl.config.recipe import Recipe
from pearl.errors import ConfigError

BASE = """\
[model]
path = "models/tiny"

[environment]
kind = "guess_number"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> Path:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def mistakes(path: Path, *overrides: str) -> list[str]:
    """The lines of the error that a recipe raises."""
    with pytest.raises(ConfigError) as caught:
        load_recipe(path, overrides)
    return str(caught.value).splitlines()


@pytest.mark.usefixtures("folder")
class TestLayers:
    def test_a_minimal_recipe_has_defaults_elsewhere(self) -> None:
        loaded = load_recipe(write("x.toml", BASE))
        assert loaded.recipe.model.path == Path("models/tiny")
        assert loaded.recipe.rollout.group_size == 8
        assert str(loaded.origins["model.path"]) == "x.toml:2"
        assert str(loaded.origins["environment.kind"]) == "x.toml:5"
        assert str(loaded.origins["rollout.group_size"]) == "default"

    def test_every_value_of_the_tree_has_an_origin(self) -> None:
        loaded = load_recipe(write("x.toml", BASE), ["environment.params.low=1"])
        tree = loaded.recipe.model_dump()
        values = {f"{section}.{name}" for section, fields in tree.items() for name in fields}
        assert set(loaded.origins) == values - {"environment.params"} | {"environment.params.low"}

    def test_the_last_of_file_further_files_and_overrides_wins(self) -> None:
        first = write("a.toml", BASE + "[rollout]\ngroup_size = 2\nmax_turns = 2\nmax_staleness = 2\n")
        second = write("b.toml", "rollout.max_turns = 3\nrollout.max_staleness = 3\n")
        loaded = load_recipe(first, ["rollout.max_staleness=4"], [second])
        rollout = loaded.recipe.rollout
        assert (rollout.group_size, rollout.max_turns, rollout.max_staleness) == (2, 3, 4)
        got = [str(loaded.origins[f"rollout.{name}"]) for name in ("group_size", "max_turns", "max_staleness")]
        assert got == ["a.toml:7", "b.toml:1", "override"]

    def test_extends_is_relative_to_the_file_and_later_ones_win(self) -> None:
        write("recipes/shared/base.toml", BASE + "[run]\nname = 'base'\nseed = 1\nsteps = 1\n")
        write("recipes/shared/more.toml", "run.seed = 2\nrun.steps = 2\n")
        top = write("recipes/x.toml", 'extends = ["shared/base.toml", "shared/more.toml"]\nrun.steps = 3\n')
        loaded = load_recipe(top)
        assert (loaded.recipe.run.name, loaded.recipe.run.seed, loaded.recipe.run.steps) == ("base", 2, 3)
        assert str(loaded.origins["run.name"]) == "recipes/shared/base.toml:7"
        assert str(loaded.origins["run.steps"]) == "recipes/x.toml:2"

    def test_a_base_may_be_reached_twice(self) -> None:
        write("base.toml", BASE)
        write("left.toml", 'extends = ["base.toml"]\nrun.seed = 1')
        write("right.toml", 'extends = ["base.toml"]\nrun.steps = 2')
        recipe = load_recipe(write("x.toml", 'extends = ["left.toml", "right.toml"]')).recipe
        assert (recipe.run.seed, recipe.run.steps) == (1, 2)

    def test_a_circle_is_named(self) -> None:
        write("a.toml", 'extends = ["b.toml"]')
        path = write("b.toml", 'extends = ["a.toml"]')
        assert mistakes(path) == ["a.toml: extends: a circle of files: b.toml -> a.toml -> b.toml"]

    @pytest.mark.parametrize("value", ['"base.toml"', "[1]", '[""]', "{a = 1}"])
    def test_extends_must_be_a_list_of_files(self, value: str) -> None:
        [line] = mistakes(write("x.toml", f"extends = {value}\n{BASE}"))
        assert line.startswith("x.toml: extends: got ")

    def test_lines_survive_text_and_lists_that_look_like_keys(self) -> None:
        text = '[run]\nname = "a"\n[environment]\nkind = """\n[model]\npath = 1"""\n\n# seed = 1\n[model]\npath = "m"\n'
        loaded = load_recipe(write("x.toml", text))
        assert str(loaded.origins["environment.kind"]) == "x.toml:4"
        assert str(loaded.origins["model.path"]) == "x.toml:10"

    def test_an_inline_table_counts_as_its_values(self) -> None:
        loaded = load_recipe(write("x.toml", BASE + "params = { low = 1, high = 16 }"), ["environment.params.high=9"])
        assert loaded.recipe.environment.params == {"low": 1, "high": 9}
        assert str(loaded.origins["environment.params.low"]) == "x.toml:6"
        assert str(loaded.origins["environment.params.high"]) == "override"


@pytest.mark.usefixtures("folder")
class TestOverrides:
    @pytest.mark.parametrize(
        ("text", "value"),
        [
            ("3", 3),
            ("-3", -3),
            ("2.5", 2.5),
            ("1e3", 1000.0),
            ("true", True),
            ("word", "word"),
            ('"3"', "3"),
            ("two words", "two words"),
            ("a=b", "a=b"),
            ("", ""),
            ("True", "True"),
            ("3#4", "3#4"),
            ("3 # 4", "3 # 4"),
            ("1, 2", "1, 2"),
            ("1\nb = 2", "1\nb = 2"),
            ("1]\nlist2 = [1", "1]\nlist2 = [1"),
        ],
    )
    def test_a_value_is_toml_or_else_text(self, text: str, value: object) -> None:
        loaded = load_recipe(write("x.toml", BASE), [f"environment.params.a={text}"])
        got = loaded.recipe.environment.params["a"]
        assert got == value
        assert type(got) is type(value)

    def test_a_number_that_python_does_not_read_is_text(self) -> None:
        loaded = load_recipe(write("x.toml", BASE), ["environment.params.a=" + "9" * 5000])
        assert loaded.recipe.environment.params["a"] == "9" * 5000

    def test_a_table_is_merged(self) -> None:
        loaded = load_recipe(write("x.toml", BASE + "[rollout]\ngroup_size = 2"), ["rollout={max_turns = 3}"])
        assert (loaded.recipe.rollout.group_size, loaded.recipe.rollout.max_turns) == (2, 3)

    @pytest.mark.parametrize("text", ["rollout.max_turns", "=3", "a..b=3", ".a=3", "a b=3", '"a"=3'])
    def test_what_is_no_override_is_refused(self, text: str) -> None:
        [line] = mistakes(write("x.toml", BASE), text)
        assert line == (f"command line: got {text!r}, want key=value with a dotted key, e.g. rollout.max_staleness=2")

    def test_bytes_that_are_no_text_are_refused(self) -> None:
        assert mistakes(write("x.toml", BASE), "run.name=\udcff") == [
            "command line: run.name: got bytes that are not UTF-8, want text"
        ]

    def test_a_mistake_names_the_command_line(self) -> None:
        [line] = mistakes(write("x.toml", BASE), "rollout.max_staleness=many")
        assert line == (
            'command line: rollout.max_staleness: got "many", want an integer 0..16 '
            "(Versions between the oldest token of a sample and the weights that it trains)"
        )

    def test_a_plain_value_can_give_way_to_a_table_and_is_then_wrong(self) -> None:
        [line] = mistakes(write("x.toml", BASE + "[run]\nname = 'a'"), "run.name.b=3")
        assert line.startswith("command line: run.name: got a table, want text matching ")


@pytest.mark.usefixtures("folder")
class TestMistakes:
    def test_an_unknown_key_names_the_nearest_and_the_allowed(self) -> None:
        [line] = mistakes(write("recipes/x.toml", BASE + "[sampling]\ntemperatur = 2\n"))
        assert line == (
            "recipes/x.toml: sampling.temperatur: unknown key; did you mean sampling.temperature? "
            "allowed in sampling: temperature, max_new_tokens [line 7]"
        )

    def test_a_key_of_another_section_is_found_there(self) -> None:
        [line] = mistakes(write("x.toml", BASE + "[train]\nmax_stalenes = 2\n"))
        assert "train.max_stalenes: unknown key; did you mean rollout.max_staleness?" in line

    def test_an_unknown_section_is_named_once(self) -> None:
        [line] = mistakes(write("x.toml", BASE + "[rolout]\ngroup_size = 2\nmax_turns = 3\n"))
        assert line.startswith("x.toml: rolout: unknown key; did you mean rollout? allowed at the top: run, model, ")
        assert line.endswith("[line 7]")

    def test_no_near_name_no_guess(self) -> None:
        [line] = mistakes(write("x.toml", BASE + "[sampling]\nxyzzy = 2\n"))
        assert line == "x.toml: sampling.xyzzy: unknown key; allowed in sampling: temperature, max_new_tokens [line 7]"

    @pytest.mark.parametrize(
        ("key", "value", "got", "want"),
        [
            ("run.steps", '"3"', '"3"', "an integer >= 0"),
            ("run.steps", "true", "true", "an integer >= 0"),
            ("run.steps", "2.5", "2.5", "an integer >= 0"),
            ("run.steps", "2.0", "2.0", "an integer >= 0"),
            ("run.steps", "-1", "-1", "an integer >= 0"),
            ("run.steps", "[1]", "[1]", "an integer >= 0"),
            ("run.steps", "2020-01-31", "2020-01-31", "an integer >= 0"),
            ("run.steps", "08:30:00", "08:30:00", "an integer >= 0"),
            ("run.seed", "2147483648", "2147483648", "an integer 0..2147483647"),
            ("run.seed", "99999999999999999999", "99999999999999999999", "an integer 0..2147483647"),
            ("run.stop_at_success", "1.5", "1.5", "a number 0..1"),
            ("run.stop_at_success", "2020-01-31", "2020-01-31", "a number 0..1"),
            ("run.name", '"a b"', '"a b"', "text matching ^[A-Za-z0-9._-]+$"),
            ("run.name", '"a\\nb"', '"a\\u000ab"', "text matching ^[A-Za-z0-9._-]+$"),
            ("run.root", "3", "3", "a path (text)"),
            ("train.learning_rate", "nan", "nan", "a number >= 0"),
            ("train.learning_rate", "inf", "inf", "a number >= 0"),
            ("train.learning_rate", "true", "true", "a number >= 0"),
            ("train.learning_rate", '"1e-6"', '"1e-6"', "a number >= 0"),
            ("train.clip_low", "1", "1", "a number > 0 and < 1"),
            ("train.decay", '"cos"', '"cos"', 'one of "constant", "linear", "cosine"'),
            ("engine.kind", '"vllm"', '"vllm"', '"embedded"'),
            ("environment.process_isolated", "1", "1", "true or false"),
            ("environment.params.a", "[1]", "[1]", "text, a number, or true or false"),
            ("environment.params.a", "{b = 1}", "a table", "text, a number, or true or false"),
            ("environment.params.a", "inf", "inf", "text, a number, or true or false"),
            ("environment.params", "3", "3", "a table of values, each text, a number, or true or false"),
            ("engine", "3", "3", "a table with kind, shape, "),
        ],
    )
    def test_a_wrong_value_says_what_is_wanted(self, key: str, value: str, got: str, want: str) -> None:
        # A key that the base already has a table for can only be overridden.
        if key.startswith("environment"):
            [line] = mistakes(write("x.toml", BASE), f"{key}={value}")
            assert line.startswith(f"command line: {key}: got {got}, want {want}")
        else:
            [line] = mistakes(write("x.toml", f"{key} = {value}\n{BASE}"))
            assert line.startswith(f"x.toml: {key}: got {got}, want {want}")
            assert line.endswith(" [line 1]")

    def test_an_integer_is_a_fine_number(self) -> None:
        assert load_recipe(write("x.toml", BASE), ["train.learning_rate=1"]).recipe.train.learning_rate == 1.0

    def test_long_values_are_cut(self) -> None:
        [line] = mistakes(write("x.toml", BASE), f"run.steps={'x' * 500}")
        assert f'got "{"x" * 76}..., want' in line

    def test_missing_values_are_missing_in_the_last_file(self) -> None:
        path, last = write("a.toml", "run.steps = 1"), write("b.toml", "run.seed = 1")
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, (), [last])
        lines = str(caught.value).splitlines()
        assert [line.partition(", want ")[0] for line in lines] == [
            "b.toml: model.path: missing",
            "b.toml: environment.kind: missing",
        ]

    def test_all_mistakes_come_at_once_in_order_of_place(self) -> None:
        write("base.toml", BASE + "[rollout]\ngroup_size = 0\n")
        path = write(
            "x.toml",
            'extends = ["base.toml"]\n[run]\nsteps = -1\nsed = 2\n[sampling]\nmax_new_tokens = 256\n[engine]\nkind = 1\n',
        )
        lines = mistakes(path, "environment.slots=x")
        assert [line.partition(": ")[0] + " " + line.split(": ")[1] for line in lines] == [
            "base.toml rollout.group_size",
            "x.toml run.steps",
            "x.toml run.sed",
            "x.toml sampling.max_new_tokens",
            "x.toml engine.kind",
            "command line environment.slots",
        ]

    def test_a_clash_with_a_wrong_value_is_not_guessed_at(self) -> None:
        # 200 trajectories of a group do not fit 128 slots, but whether 300.5 was meant as 300 slots nobody knows.
        lines = mistakes(write("x.toml", BASE), "rollout.group_size=200", "environment.slots=300.5")
        assert len(lines) == 1
        assert "environment.slots: got 300.5" in lines[0]

    def test_further_checks_take_part(self) -> None:
        def refuse(recipe: Recipe) -> list[Problem]:
            return [Problem(keys=("run.name",), text=f"got {recipe.run.name}, want another")]

        path = write("x.toml", BASE + "[run]\nname = 'a'\nsteps = -1\n")
        with pytest.raises(ConfigError) as caught:
            load_recipe(path, checks=[refuse])
        assert str(caught.value).splitlines() == [
            "x.toml: run.name: got a, want another [line 7]",
            "x.toml: run.steps: got -1, want an integer >= 0 (Training steps) [line 8]",
        ]

    def test_a_clash_is_reported_where_something_was_set(self) -> None:
        lines = mistakes(write("x.toml", BASE + "[rollout]\ngroup_size = 200\n"))
        assert lines == [
            "x.toml: environment.slots: got 128, want >= rollout.group_size = 200 "
            "(the trajectories of a group run side by side) [line 7]"
        ]


@pytest.mark.usefixtures("folder")
class TestFiles:
    def test_a_missing_file(self) -> None:
        assert mistakes(Path("recipes/nope.toml")) == ["recipes/nope.toml: no such file; want a recipe (.toml)"]

    def test_a_missing_base_names_who_wants_it(self) -> None:
        [line] = mistakes(write("x.toml", 'extends = ["nope.toml"]'))
        assert line == "nope.toml: no such file, which x.toml extends; want a recipe (.toml)"

    def test_a_folder(self) -> None:
        Path("x.toml").mkdir()
        assert mistakes(Path("x.toml")) == ["x.toml: got a folder, no regular file; want a recipe (.toml)"]

    def test_a_pipe_is_not_waited_for(self) -> None:
        os.mkfifo("f.toml")
        assert mistakes(Path("f.toml")) == ["f.toml: got a pipe, no regular file; want a recipe (.toml)"]
        [line] = mistakes(write("x.toml", 'extends = ["f.toml"]'))
        assert line == "f.toml: got a pipe, no regular file, which x.toml extends; want a recipe (.toml)"

    def test_a_file_that_is_too_long(self) -> None:
        write("x.toml", BASE + "#" * (2**20 - len(BASE)))
        assert load_recipe(Path("x.toml")).recipe.environment.kind == "guess_number"
        write("x.toml", BASE + "#" * (2**20 - len(BASE) + 1))
        assert mistakes(Path("x.toml")) == ["x.toml: got 1.0 MiB, more than 1.0 MiB; want a recipe (.toml)"]

    def test_a_base_that_is_no_path(self) -> None:
        [line] = mistakes(write("x.toml", 'extends = ["a\\u0000b"]'))
        assert line.startswith("'a\\x00b': cannot be read: embedded null byte, which x.toml extends; want")

    def test_files_that_are_links_to_each_other(self) -> None:
        Path("x.toml").symlink_to("y.toml")
        Path("y.toml").symlink_to("x.toml")
        assert mistakes(Path("x.toml"))[0].startswith("x.toml: cannot be read: Too many levels of symbolic links; want")

    def test_thousands_of_brackets(self) -> None:
        [line] = mistakes(write("x.toml", "a = " + "[" * 100_000))
        assert line == "x.toml: not valid TOML: nested too deeply"
        assert parse_override("a=" + "[" * 100_000)[("a",)].value == "[" * 100_000

    @pytest.mark.parametrize("text", ["{key}=1", "model.path={list}", "environment.params={table}"])
    @pytest.mark.parametrize("depth", [33, 100])
    def test_values_too_deep_to_be_walked(self, text: str, depth: int) -> None:
        deep = text.format(
            key="a." * (depth - 1) + "b", list="[" * depth + "]" * depth, table="{a=" * depth + "1" + "}" * depth
        )
        [line] = mistakes(write("x.toml", deep))
        assert line == "x.toml: got values nested more than 32 deep, want the sections of a recipe"
        [line] = mistakes(write("y.toml", BASE), deep)
        assert line.startswith("command line: got a value nested more than 32 deep, want one of a recipe: ")

    def test_as_deep_as_may_be(self) -> None:
        """`environment`, `params`, and thirty more around a number: refused, but for what it is."""
        write("x.toml", BASE)
        deep = "{a=" * 30 + "1" + "}" * 30
        [line] = mistakes(Path("x.toml"), f"environment.params={deep}")
        assert line.startswith("command line: environment.params.a: got a table, want text")
        [line] = mistakes(Path("x.toml"), f"environment.params={{a={deep}}}")
        assert "more than 32 deep" in line

    def test_broken_toml_names_the_line(self) -> None:
        [line] = mistakes(write("x.toml", "[run]\nsteps = 1\nseed =\n"))
        assert line.startswith("x.toml: not valid TOML: ")
        assert "line 3" in line

    def test_a_number_of_thousands_of_digits(self) -> None:
        [line] = mistakes(write("x.toml", "run.seed = " + "9" * 5000))
        assert line.startswith("x.toml: not valid TOML: Exceeds the limit (4300 digits)")

    def test_bytes_that_are_not_utf_8(self) -> None:
        Path("x.toml").write_bytes(b"a = '\xff'")
        assert mistakes(Path("x.toml")) == ["x.toml: cannot be read: not UTF-8 at byte 5; want a recipe (.toml)"]

    def test_windows_line_ends(self) -> None:
        Path("x.toml").write_bytes(BASE.replace("\n", "\r\n").encode())
        assert str(load_recipe(Path("x.toml")).origins["environment.kind"]) == "x.toml:5"


params = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
    st.text(st.characters(codec="utf-8"), max_size=8)
    | st.integers(-(2**62), 2**62)
    | st.booleans()
    | st.floats(allow_nan=False, allow_infinity=False),
    max_size=4,
)


@given(
    path=st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1),
    params=params,
    seed=st.integers(0, 2**31 - 1),
    goal=st.none() | st.floats(0, 1),
    rate=st.floats(0, 1e300),
)
def test_a_dumped_recipe_reads_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    path: str,
    params: dict[str, str | int | float | bool],
    seed: int,
    goal: float | None,
    rate: float,
) -> None:
    recipe = Recipe.model_validate(
        {
            "model": {"path": path},
            "environment": {"kind": "guess_number", "params": params},
            "run": {"seed": seed, "stop_at_success": goal},
            "train": {"learning_rate": rate},
        }
    )
    file = tmp_path_factory.getbasetemp() / "dumped.toml"
    file.write_text(dump_toml(recipe), encoding="utf-8")
    loaded = load_recipe(file)
    assert loaded.recipe == recipe
    assert {key: type(value) for key, value in loaded.recipe.environment.params.items()} == {
        key: type(value) for key, value in params.items()
    }


def test_a_dump_holds_the_defaults_as_well() -> None:
    recipe = Recipe.model_validate({"model": {"path": "m"}, "environment": {"kind": "k"}})
    document = tomllib.loads(dump_toml(recipe))
    assert document["rollout"]["group_size"] == 8
    assert math.isclose(document["train"]["learning_rate"], 1e-6)
    assert set(document) == set(Recipe.model_fields)
