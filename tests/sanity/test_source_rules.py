"""Rules for the text of the source: docstrings, sizes, and a test for every module that does something."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "pearl"
MODULES = sorted(PACKAGE.rglob("*.py"))
OWN_CODE = sorted([*MODULES, *(ROOT / "scripts").glob("*.py"), *(ROOT / "examples").rglob("*.py")])

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
ALLOWED_LINES: Mapping[str, int] = {}
"""`path` or `path:function` -> lines that it may have all the same; say why beside each."""

COVERED_BY: Mapping[str, str] = {
    "pearl.core.decision": "tests/unit/core/test_decide.py",
    "pearl.core.events": "tests/unit/core/test_state.py",
    "pearl.core.lines": "tests/unit/core/test_choose.py",
    "pearl.core.scene": "tests/unit/core/test_decide.py",
    # Processes: what they are for shows only with real ones, in whole runs that kill them.
    "pearl.cluster": "tests/integration/test_run.py",
    "pearl.engine.embedded.architecture": "tests/unit/engine/embedded/test_model.py",
    "pearl.engine.embedded.compiled": "tests/unit/engine/embedded/test_model.py",
    "pearl.engine.embedded.operations": "tests/unit/engine/embedded/test_model.py",
    "pearl.engine.embedded.weights": "tests/unit/engine/embedded/test_load.py",
    "pearl.sim.imports": "tests/unit/sim/test_engine.py",
    "pearl.sim.limits": "tests/unit/sim/test_settings.py",
    "pearl.sim.requests": "tests/unit/sim/test_engine.py",
    "pearl.sim.roster": "tests/unit/sim/test_batching.py",
    # A suite is tested by what has to pass it.
    "pearl.testing.contracts": "tests/contract/test_fakes.py",
    "pearl.testing.world": "tests/property/test_pipeline.py",
}
"""Module, or package with all in it -> the test file that covers it from outside of its mirrored place."""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def sizes() -> tuple[dict[str, int], dict[str, int]]:
    """Lines of every file, and of every function."""
    files: dict[str, int] = {}
    inside: dict[str, int] = {}
    for path in OWN_CODE:
        files[relative(path)] = len(path.read_text(encoding="utf-8").splitlines())
        for node in functions(path):
            name = f"{relative(path)}:{node.name}"
            inside[name] = max(inside.get(name, 0), (node.end_lineno or 0) - node.lineno + 1)
    return files, inside


def test_every_module_says_what_it_is() -> None:
    docstrings = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in OWN_CODE}
    first_lines = {relative(path): text.split("\n")[0].rstrip() for path, text in docstrings.items()}

    assert len(first_lines) > 50
    assert [name for name, line in first_lines.items() if not line.endswith((".", ":"))] == []


def test_files_and_functions_are_small() -> None:
    files, inside = sizes()
    too_long = {
        name: size
        for found, limit in ((files, MAX_FILE_LINES), (inside, MAX_FUNCTION_LINES))
        for name, size in found.items()
        if size > ALLOWED_LINES.get(name, limit)
    }

    assert too_long == {}


def test_allowances_are_needed() -> None:
    files, inside = sizes()
    needed = {name for name, size in files.items() if size > MAX_FILE_LINES}
    needed |= {name for name, size in inside.items() if size > MAX_FUNCTION_LINES}

    assert ALLOWED_LINES.keys() <= needed


def does_something(path: Path) -> bool:
    """Whether a module holds logic: any function that is more than a docstring and `...`."""
    return any(
        not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for node in functions(path)
        for statement in node.body
    )


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def has_mirrored_test(path: Path) -> bool:
    """`tests/unit/a/test_b.py` for `a/b.py`, or what begins like it: `test_b_faults.py`."""
    folder = ROOT / "tests" / "unit" / path.relative_to(PACKAGE).parent
    pattern = re.compile(rf"test_{re.escape(path.stem)}(_\w+)?\.py")
    return any(pattern.fullmatch(found.name) for found in folder.glob("test_*.py"))


def is_covered_elsewhere(module: str) -> bool:
    parts = module.split(".")
    return any(".".join(parts[:depth]) in COVERED_BY for depth in range(1, len(parts) + 1))


def test_every_module_with_logic_has_a_test() -> None:
    missing = [
        module_name(path)
        for path in MODULES
        if does_something(path) and not has_mirrored_test(path) and not is_covered_elsewhere(module_name(path))
    ]

    assert missing == [], "want tests/unit/<package>/test_<module>.py, or the file that covers it in COVERED_BY"


def test_what_covers_a_module_uses_its_package() -> None:
    known = {module_name(path) for path in MODULES}
    for module, test in COVERED_BY.items():
        package = module if module.count(".") == 1 else module.rpartition(".")[0]
        assert module in known, f"no module {module}"
        assert package in (ROOT / test).read_text(encoding="utf-8"), f"{test}: does not use {package}"


def test_unit_tests_mirror_the_source() -> None:
    """No folder of tests for a package that is not there."""
    packages = {path.parent.relative_to(PACKAGE) for path in MODULES}
    unit = ROOT / "tests" / "unit"
    folders = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")}

    assert folders - packages <= {Path("scripts"), Path("examples"), Path("benchmarks")}
