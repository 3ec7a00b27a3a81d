"""Lines of values in TOML, and layers over layers."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.config.origins import DEFAULT, OVERRIDE, Layer, Setting, dotted, flatten, lines_of, merge, nest, toml_text


def layer(table: dict[str, object]) -> Layer:
    return {key: Setting(value=value, origin=OVERRIDE) for key, value in flatten(table)}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("a = 1", {("a",): 1}),
        ("\n\na = 1\nb.c = 2\n", {("a",): 3, ("b", "c"): 4}),
        ("[x]\na = 1\n\n[x.y]\nb = 2", {("x",): 1, ("x", "a"): 2, ("x", "y"): 4, ("x", "y", "b"): 5}),
        ("[x] # b = 1\na = [\n  1,\n  # c = 2\n]\nd = 3", {("x",): 1, ("x", "a"): 2, ("x", "d"): 6}),
        ("a = '''\nb = 2\n[c]\n'''\nd = 4", {("a",): 1, ("d",): 5}),
        ('a = """b = 2 \\\n  "" """\nd = 4', {("a",): 1, ("d",): 3}),
        ("a = {b = 1, c = {d = 2}}", {("a", "b"): 1, ("a", "c", "d"): 1}),
        ('"a.b" = 1\n"c d".e = 2', {("a.b",): 1, ("c d", "e"): 2}),
        ("[[x]]\na = 1\n[[x]]\na = 2", {("x",): 1, ("x", "a"): 2}),
    ],
)
def test_lines(text: str, lines: dict[tuple[str, ...], int]) -> None:
    tomllib.loads(text)
    assert lines_of(text) == lines


@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ({"a": 1}, {"a": 2}, {"a": 2}),
        ({"a": {"b": 1}}, {"a": {"c": 2}}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 1, "c": 1}}, {"a": 2}, {"a": 2}),
        ({"a": 1}, {"a": {"b": 2}}, {"a": {"b": 2}}),
        ({"a": {"b": 1}}, {"a": {}}, {"a": {"b": 1}}),
        ({"a": {}}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"a": 1}, {"a": {}}, {"a": {}}),
        ({"a": [1, 2]}, {"a": [3]}, {"a": [3]}),
        ({"a": {"b": {"c": 1}}}, {"a": {"b": {"c": {"d": 2}}}}, {"a": {"b": {"c": {"d": 2}}}}),
    ],
)
def test_merging(old: dict[str, object], new: dict[str, object], result: dict[str, object]) -> None:
    merged = layer(old)
    merge(merged, layer(new))
    assert nest(merged) == result


tables = st.recursive(
    st.dictionaries(st.sampled_from("abc"), st.integers(), max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner | st.integers(), max_size=3),
    max_leaves=12,
)


@given(tables, tables)
def test_merging_is_the_recursive_update(old: dict[str, object], new: dict[str, object]) -> None:
    def update(below: object, above: object) -> object:
        if not (isinstance(below, dict) and isinstance(above, dict)):
            return above
        return {**below, **{name: update(below.get(name), value) for name, value in above.items()}}

    merged = layer(old)
    merge(merged, layer(new))
    assert nest(merged) == update(old, new)


def test_origins_as_text() -> None:
    assert (str(DEFAULT), str(OVERRIDE)) == ("default", "override")


def test_odd_names_are_quoted() -> None:
    assert dotted(("environment", "params", 'a "b".c')) == 'environment.params."a \\"b\\".c"'


@pytest.mark.parametrize("text", ["", "a", 'say "hi"', "back\\slash", "tab\t", "ü", "\x00\x7f"])
def test_short_text_is_valid_toml(text: str) -> None:
    assert tomllib.loads(f"a = {toml_text(text)}") == {"a": text}
