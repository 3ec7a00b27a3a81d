"""Rules for the text of the source: docstrings, sizes, and a test for every module that does something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pearl"
MODULES = sorted(PACKAGE.rglob("*.py"))
OWN_CODE = sorted([*MODULES, *(ROOT / "scripts").glob("*.py"), *(ROOT / "examples").rglob("*.py")])

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ALLOWED_FILES: dict[str, int] = {}
"""Path from the root -> lines it may have; say why beside each."""
ALLOWED_FUNCTIONS: dict[str, int] = {}
"""`path:name` -> lines it may have; say why beside each."""

COVERED_BY: dict[str, str] = {}
"""Module -> the test file outside of its mirrored place that covers it and names it."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", OWN_CODE, ids=relative)
def test_a_module_says_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(parsed(path))

    assert docstring, f"{relative(path)}: no module docstring"
    assert docstring.split("\n")[0].rstrip().endswith((".", ":")), f"{relative(path)}: the first line is no sentence"


@pytest.mark.parametrize("path", OWN_CODE, ids=relative)
def test_a_file_is_small(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())

    assert lines <= ALLOWED_FILES.get(relative(path), MAX_FILE_LINES), f"{relative(path)}: {lines} lines"


@pytest.mark.parametrize("path", OWN_CODE, ids=relative)
def test_a_function_is_small(path: Path) -> None:
    sizes = {f"{relative(path)}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in functions(path)}
    too_long = {name: size for name, size in sizes.items() if size > ALLOWED_FUNCTIONS.get(name, MAX_FUNCTION_LINES)}

    assert not too_long


def test_allowances_are_needed() -> None:
    """An allowance that nothing needs any more is taken back."""
    for name, allowed in ALLOWED_FILES.items():
        assert MAX_FILE_LINES < len((ROOT / name).read_text(encoding="utf-8").splitlines()) <= allowed
    for name, allowed in ALLOWED_FUNCTIONS.items():
        path, _, function = name.rpartition(":")
        sizes = [(node.end_lineno or 0) - node.lineno + 1 for node in functions(ROOT / path) if node.name == function]
        assert any(MAX_FUNCTION_LINES < size <= allowed for size in sizes), name


def does_something(path: Path) -> bool:
    """Whether a module holds logic: any function or method that is more than a docstring and `...`."""
    for node in functions(path):
        body = [
            statement
            for statement in node.body
            if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        ]
        if body:
            return True
    return False


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def mirrored_tests(path: Path) -> list[Path]:
    """`tests/unit/a/test_b.py` for `a/b.py`, or what begins like it: `test_b_faults.py`."""
    folder = ROOT / "tests" / "unit" / path.relative_to(PACKAGE).parent
    pattern = re.compile(rf"test_{re.escape(path.stem)}(_\w+)?\.py")
    return [found for found in folder.glob("test_*.py") if pattern.fullmatch(found.name)]


@pytest.mark.parametrize("path", [path for path in MODULES if does_something(path)], ids=module_name)
def test_a_module_with_logic_has_its_test(path: Path) -> None:
    name = module_name(path)
    elsewhere = COVERED_BY.get(name)

    if elsewhere is None:
        assert mirrored_tests(path), (
            f"{name}: no tests/unit/.../test_{path.stem}.py, and COVERED_BY does not name another"
        )
    else:
        assert not mirrored_tests(path), f"{name}: has its own test now, so COVERED_BY need not name {elsewhere}"
        assert name in (ROOT / elsewhere).read_text(encoding="utf-8"), f"{elsewhere} does not name {name}"


def test_unit_tests_mirror_the_source() -> None:
    """No test of a package that is not there."""
    packages = {path.parent.relative_to(PACKAGE) for path in MODULES}
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}

    assert folders - packages <= {Path("scripts"), Path("examples")}
