import pytest
from hypothesis import given
from hypothesis import strategies as st

from pearl.core.shape import Pool, Shape, parse_shape
from pearl.core.state import Role
from pearl.errors import ShapeError

P, D, C = Role.PREFILL, Role.DECODE, Role.COLOCATED


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        ("1C", [(C, 1)]),
        ("2C", [(C, 1)] * 2),
        ("2C@tp1", [(C, 1)] * 2),
        ("1C@tp8", [(C, 8)]),
        ("2P6D@tp2", [(P, 2)] * 2 + [(D, 2)] * 6),
        ("4P@tp1+2D@tp4+1C@tp2", [(P, 1)] * 4 + [(D, 4)] * 2 + [(C, 2)]),
        ("1C+1C@tp2", [(C, 1), (C, 2)]),
        ("1D2P", [(D, 1), (P, 1), (P, 1)]),
        ("1P1D@tp2+3C", [(P, 2), (D, 2), (C, 1), (C, 1), (C, 1)]),
        ("12C", [(C, 1)] * 12),
    ],
)
def test_a_shape_lists_its_workers(text: str, roles: list[tuple[Role, int]]) -> None:
    shape = parse_shape(text)
    assert list(shape.roles()) == roles
    assert shape.workers == len(roles)
    assert shape.gpus == sum(tp for _, tp in roles)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("2C@tp1", "2C"),
        ("1P@tp2+3D@tp2", "1P3D@tp2"),
        ("1P3D", "1P3D"),
        ("4P+2D@tp4", "4P@tp1+2D@tp4"),
        ("1C+1C@tp2", "1C@tp1+1C@tp2"),
    ],
)
def test_a_shape_is_written_shortly(text: str, written: str) -> None:
    assert str(parse_shape(text)) == written


NOT_OF_THE_GRAMMAR = ["", "C", "2", "2X", "2c", " 2C", "2C ", "2C@", "2C@tp", "2C@tpx", "2C@tp-1", "-1C", "1.5C"]
SUMS_NOT_OF_IT = ["1C++1C", "1C+", "1C@tp2@tp4", "1C,1C", "1C\n"]


@pytest.mark.parametrize("text", [*NOT_OF_THE_GRAMMAR, *SUMS_NOT_OF_IT])
def test_what_is_not_of_the_grammar_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ShapeError, match=r"want e\.g\. `2C`") as caught:
        parse_shape(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("0C", "at least 1 worker"),
        ("1P0D", "at least 1 worker"),
        ("2C@tp0", "tp >= 1"),
        ("1C1C", "names a pool twice"),
        ("1C@tp2+2C@tp2", "names a pool twice"),
        ("1P2D+1P", "names a pool twice"),
        ("2P", "no decode"),
        ("2D@tp2", "no prefill"),
        ("1C+2P", "no decode"),
    ],
)
def test_a_shape_that_no_fleet_can_have_is_refused(text: str, why: str) -> None:
    with pytest.raises(ShapeError, match=why):
        parse_shape(text)


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    keys = draw(
        st.lists(st.tuples(st.sampled_from([P, D, C]), st.integers(1, 16)), min_size=1, max_size=6, unique=True)
    )
    roles = {role for role, _ in keys}
    if (P in roles) != (D in roles):
        keys.append((D if P in roles else P, draw(st.integers(1, 16))))
    return Shape(tuple(Pool(role=role, workers=draw(st.integers(1, 99)), tp=tp) for role, tp in keys))


@given(shapes())
def test_what_is_written_can_be_read(shape: Shape) -> None:
    assert parse_shape(str(shape)) == shape


@pytest.mark.parametrize("text", ["1234567890C", "1C@tp1234567890", "9" * 5000 + "C", "٣C"])
def test_numbers_of_ten_digits_or_another_script_are_no_shape(text: str) -> None:
    """Python reads no number of more than 4,300 digits."""
    with pytest.raises(ShapeError, match=r"want e\.g\. `2C`"):
        parse_shape(text)


def test_numbers_of_nine_digits_are() -> None:
    assert str(parse_shape("999999999C@tp999999999")) == "999999999C@tp999999999"
