"""What the configuration tree allows, in words."""

from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field

from pearl.config.base import Section
from pearl.config.schema import field_at, known_keys, required_keys, section_at, wanted


class Inner(Section):
    """A section below."""

    must: int = Field(gt=0, description="Counted.")
    may: float = Field(0.5, lt=1)


class Root(Section):
    """A small tree."""

    inner: Inner
    soft: Inner = Inner(must=1)
    name: str = Field("a", pattern="^a+$")
    place: Path = Path()
    mode: Literal["x", "y"] = "x"
    goal: int | None = Field(None, ge=1, le=3)
    flags: dict[str, bool] = Field(default_factory=dict, description="Switches.")
    plain: bool = True
    counts: tuple[int, ...] = Field((), min_length=1, description="Several.")
    pairs: tuple[tuple[int, Path], ...] | None = None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("inner", "must"), "an integer > 0 (Counted)"),
        (("inner", "may"), "a number < 1"),
        (("name",), "text matching ^a+$"),
        (("place",), "a path (text)"),
        (("mode",), 'one of "x", "y"'),
        (("goal",), "an integer 1..3"),
        (("plain",), "true or false"),
        (("flags",), "a table of values, each true or false (Switches)"),
        (("soft",), "a table with must, may"),
        (("counts",), "a list, each an integer (Several)"),
        (("pairs",), "a list, each [an integer, a path (text)]"),
    ],
)
def test_what_a_field_takes(key: tuple[str, ...], text: str) -> None:
    field = field_at(Root, key)
    assert field is not None
    assert wanted(field) == text


def test_what_an_entry_of_a_free_table_takes() -> None:
    field = field_at(Root, ("flags", "anything"))
    assert field is Root.model_fields["flags"]
    assert wanted(field, entry=True) == "true or false (Switches)"


@pytest.mark.parametrize(
    "key", [(), ("nope",), ("inner", "nope"), ("name", "x"), ("flags", "x", "y"), ("inner", "must", "x")]
)
def test_no_field(key: tuple[str, ...]) -> None:
    assert field_at(Root, key) is None


def test_sections() -> None:
    assert section_at(Root, ()) is Root
    assert section_at(Root, ("inner",)) is Inner
    assert section_at(Root, ("name",)) is None
    assert section_at(Root, ("nope", "inner")) is None


def test_keys() -> None:
    values = [("inner", "must"), ("inner", "may"), ("soft", "must"), ("soft", "may")]
    values += [(name,) for name in ("name", "place", "mode", "goal", "flags", "plain", "counts", "pairs")]
    assert list(known_keys(Root)) == values
    assert list(required_keys(Root)) == [("inner", "must")]
