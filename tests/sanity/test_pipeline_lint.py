"""Rules for code that must behave alike on a real and a virtual clock, and for code that only decides.

`pipeline` and `elastic` keep the order of everything by themselves (no sets of tasks, no `asyncio.wait`), take time from
the loop, and touch no disk and no thread. `core`, `records` and `config` import nothing that has a clock, a device or a
process behind it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "pearl"

PURE = ("core", "records")
ORDERED = ("pipeline", "elastic")

HEAVY = {"torch", "ray", "vllm", "transformers"}
IMPURE = HEAVY | {"asyncio", "time", "random", "os", "logging", "threading", "multiprocessing", "subprocess", "secrets"}

FORBIDDEN_ATTRIBUTES = {
    ("asyncio", "wait"),
    ("asyncio", "wait_for"),
    ("asyncio", "as_completed"),
    ("asyncio", "TaskGroup"),
    ("asyncio", "to_thread"),
    ("asyncio", "timeout"),
    ("asyncio", "timeout_at"),
    ("asyncio", "run_coroutine_threadsafe"),
}
FORBIDDEN_METHODS = {
    "run_in_executor",
    "call_soon_threadsafe",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "mkdir",
    "unlink",
    "rmdir",
    "iterdir",
    "glob",
    "exists",
    "is_file",
    "is_dir",
}
FORBIDDEN_MODULES = HEAVY | {
    "threading",
    "multiprocessing",
    "concurrent",
    "subprocess",
    "socket",
    "time",
    "random",
    "secrets",
    "os",
    "shutil",
    "tempfile",
    "io",
}


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """First part of every module that a file imports, with the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, (node.module or "").split(".")[0]


def calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Forbidden calls, with the line."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=method)) if method in FORBIDDEN_METHODS:
                yield node.lineno, f".{method}()"
            case ast.Call(func=ast.Name(id="open" | "set" as function)):
                yield node.lineno, f"{function}()"


def disorder(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What breaks the rules of `pipeline` and `elastic`, with the line."""
    for line, module in imported(tree):
        if module in FORBIDDEN_MODULES:
            yield line, f"import of {module}"
    yield from calls(tree)
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module="asyncio", names=names):
                for name in names:
                    if ("asyncio", name.name) in FORBIDDEN_ATTRIBUTES:
                        yield node.lineno, f"asyncio.{name.name}"
            case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if (owner, attribute) in FORBIDDEN_ATTRIBUTES:
                yield node.lineno, f"{owner}.{attribute}"
            case ast.Set() | ast.SetComp():
                yield node.lineno, "a set"
            case ast.keyword(arg="default_factory", value=ast.Name(id="set")):
                yield node.value.lineno, "a set"


def impurity(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What breaks the rule of `core` and `records`, with the line."""
    return ((line, f"import of {module}") for line, module in imported(tree) if module in IMPURE)


def weight(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """What breaks the rule of `config`, which reads files but is imported by every command."""
    allowed = {"os"}
    return ((line, f"import of {module}") for line, module in imported(tree) if module in IMPURE - allowed)


def files(*packages: str) -> list[Path]:
    return sorted(path for package in packages for path in (SOURCE / package).rglob("*.py"))


def name(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@pytest.mark.parametrize("path", files(*ORDERED), ids=name)
def test_the_hot_path_keeps_its_order_and_touches_no_clock_disk_or_thread(path: Path) -> None:
    assert list(disorder(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", files(*PURE), ids=name)
def test_deciding_code_imports_no_clock_process_or_device(path: Path) -> None:
    assert list(impurity(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("path", files("config"), ids=name)
def test_configuration_imports_no_clock_process_or_device(path: Path) -> None:
    assert list(weight(ast.parse(path.read_text()))) == []


@pytest.mark.parametrize("package", ["pipeline", "core", "records", "config"])
def test_there_is_something_to_check(package: str) -> None:
    assert len(files(package)) > 1


@pytest.mark.parametrize(
    "code",
    [
        "asyncio.wait(tasks)",
        "asyncio.as_completed(tasks)",
        "asyncio.TaskGroup()",
        "from asyncio import TaskGroup",
        "asyncio.to_thread(f)",
        "asyncio.timeout(3)",
        "loop.run_in_executor(None, f)",
        "import threading",
        "import time",
        "from time import monotonic",
        "import random",
        "open('x')",
        "path.read_text()",
        "path.mkdir()",
        "tasks = {a, b}",
        "tasks = {t for t in all_of_them}",
        "tasks = set()",
        "tasks: set[int] = field(default_factory=set)",
    ],
)
def test_the_rules_of_the_hot_path_find_what_they_forbid(code: str) -> None:
    assert len(list(disorder(ast.parse(code)))) == 1


@pytest.mark.parametrize("code", ["asyncio.gather(a)", "x = {}", "y = {1: 2}", "loop.time()", "import logging"])
def test_the_rules_of_the_hot_path_allow_the_rest(code: str) -> None:
    assert list(disorder(ast.parse(code))) == []


@pytest.mark.parametrize("code", ["import os", "import asyncio", "from torch import nn", "import logging.handlers"])
def test_the_rule_of_deciding_code_finds_what_it_forbids(code: str) -> None:
    assert len(list(impurity(ast.parse(code)))) == 1
