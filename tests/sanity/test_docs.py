"""Documentation that cannot rot unseen: links resolve, commands exist, code blocks are those of the code, fields are listed."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from examples.ticket_desk import TicketDesk
from pearl.cli.main import app
from pearl.config.engine import EngineConfig
from pearl.core.policy import POLICIES
from pearl.core.profile import PlatformProfile, parse_profile
from pearl.env.base import TextEnvironment
from pearl.env.validate import check_reply
from pearl.records.journal import STREAMS, JournalEntry
from pearl.records.trajectory import EnvironmentReply, GroupStatus, TrajectoryStatus
from pearl.report.lines import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return BLOCK.sub("", text_of(path))


def anchor(heading: str) -> str:
    """As GitHub makes it from a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return kept.replace(" ", "-")


def anchors(path: Path) -> set[str]:
    return {anchor(heading) for heading in re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)}


def blocks(path: Path, language: str) -> list[str]:
    return [code for found, code in BLOCK.findall(text_of(path)) if found == language]


def links(path: Path) -> Iterator[tuple[Path, str]]:
    """Target file and anchor of every link within the repository."""
    for target in LINK.findall(prose(path)):
        if target.startswith(("http://", "https://")):
            continue
        file, _, heading = target.partition("#")
        yield (path.parent / file).resolve() if file else path, heading


def test_links_are_looked_at() -> None:
    """The pages do link to each other, so the next test is not about nothing."""
    assert sum(1 for page in PAGES for _ in links(page)) > 30


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_resolve(page: Path) -> None:
    for target, heading in links(page):
        assert target.exists(), f"{relative(page)}: no {target}"
        if heading:
            assert heading in anchors(target), f"{relative(page)}: no heading #{heading} in {relative(target)}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", text_of(ROOT / "Makefile"), re.MULTILINE))
    named = [
        word
        for words in re.findall(r"(?:`|^\$ )make ((?:[a-z]+ ?)+)", text_of(page), re.MULTILINE)
        for word in words.split()
    ]

    assert set(named) <= targets


def test_the_readme_names_the_two_commands() -> None:
    assert "$ make demo" in text_of(ROOT / "README.md")
    assert "$ make test" in text_of(ROOT / "README.md")


def commands() -> set[str]:
    """`train`, `config show`, ..."""
    found: set[str] = set()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        children = getattr(command, "commands", None)
        found |= {f"{name} {child}" for child in children} if children else {name}
    return found


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_pearl_commands_exist(page: Path) -> None:
    known = commands()
    for line in re.findall(r"(?:`|\$ )pearl ([a-z][^`\n]*)", text_of(page)):
        words = line.split()
        assert words[0] in known or " ".join(words[:2]) in known, f"{relative(page)}: pearl {line}"


def test_the_readme_lists_every_command() -> None:
    readme = text_of(ROOT / "README.md")

    assert [command for command in commands() if f"`pearl {command}" not in readme] == []


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_files_named_in_prose_exist(page: Path) -> None:
    """`src/...`, `examples/...` and their like in backticks; `...` and `<x>` stand for something."""
    named = re.findall(r"`((?:src|examples|scripts|recipes|tests|docs|benchmarks)/[\w./-]*)`", prose(page))

    missing = [name for name in named if "..." not in name and not (ROOT / name).exists()]
    assert missing == []


def test_code_of_the_environment_page_is_the_examples() -> None:
    """Each block but the last, which is a test and runs, is a part of the example or its recipe."""
    page = ROOT / "docs" / "writing-an-environment.md"
    *quoted, trial = blocks(page, "python")
    source = text_of(ROOT / "examples" / "ticket_desk.py")

    assert len(quoted) >= 5
    for code in quoted:
        assert code in source, f"not in examples/ticket_desk.py:\n{code}"
    exec(compile(trial, "trial", "exec"), {"TicketDesk": TicketDesk})


@pytest.mark.parametrize("number", [0, 1])
def test_code_of_the_decision_page_runs(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    found = blocks(ROOT / "docs" / "decision-core.md", "python")

    assert len(found) == 2
    exec(compile(found[number], "decision-core", "exec"), {})


def test_the_decision_page_has_every_policy() -> None:
    page = text_of(ROOT / "docs" / "decision-core.md")
    table = page.split("| policy | shapes |")[1].split("\n\n")[0]

    assert tuple(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == POLICIES


def labels(text: str) -> list[str]:
    """First words of titles and of rows of facts and outcome: what does not change with a number."""
    return [line.split(",")[0].split(":")[0].split("  ")[0] for line in text.splitlines() if line and line[0] != " "]


def test_output_of_the_plan_page_is_the_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its numbers, which follow the predictor."""
    monkeypatch.chdir(ROOT)
    shown = blocks(ROOT / "docs" / "plan-explain.md", "console")

    assert len(shown) == 2
    for block in shown:
        command, _, output = block.partition("\n")
        result = CliRunner().invoke(app, command.removeprefix("$ pearl ").split())
        found = labels(result.stdout)
        assert set(labels(output)) - {"plan"} == set(found) - {"plan"}, f"run `{command}` again and paste what it says"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_python_blocks_parse(page: Path) -> None:
    for code in blocks(page, "python"):
        ast.parse(textwrap.dedent(code))


def test_the_readmes_environment_has_the_methods_of_the_protocol() -> None:
    (code,) = blocks(ROOT / "README.md", "python")
    (sketch,) = ast.parse(code).body

    assert isinstance(sketch, ast.ClassDef)
    methods = {node.name: node for node in sketch.body if isinstance(node, ast.FunctionDef)}
    assert methods.keys() == {"reset", "step", "close"}
    for name, method in methods.items():
        of_protocol = inspect.signature(getattr(TextEnvironment, name))
        assert [argument.arg for argument in method.args.args] == list(of_protocol.parameters)


class FakeGem:
    """`gem.make(name)` with GEM's tuples."""

    def make(self, name: str) -> FakeGem:
        return self

    def reset(self, seed: int) -> tuple[str, dict[str, object]]:
        return f"task {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, object]]:
        return "over", 1, action == "right", action == "late", {}


@pytest.mark.parametrize(
    ("action", "done", "truncated", "success"),
    [("right", True, False, True), ("late", True, True, None), ("other", False, False, None)],
)
def test_the_gem_adapter_works(action: str, done: bool, truncated: bool, success: bool | None) -> None:
    (code,) = blocks(ROOT / "docs" / "coming-from-roll.md", "python")
    names: dict[str, Any] = {"gem": FakeGem(), "EnvironmentReply": EnvironmentReply}
    exec(compile(code, "adapter", "exec"), names)

    environment = names["FromGem"]("some-id")
    assert environment.reset(7) == "task 7"
    reply = check_reply(environment.step(action), "here")
    assert (reply.reward, reply.done, reply.truncated, reply.success) == (1.0, done, truncated, success)


def test_recipe_snippets_are_the_examples() -> None:
    recipe = tomllib.loads(text_of(ROOT / "examples" / "ticket_desk.toml"))

    for page in (ROOT / "README.md", ROOT / "docs" / "writing-an-environment.md"):
        (snippet,) = blocks(page, "toml")
        assert tomllib.loads(snippet)["environment"] == recipe["environment"]


def test_the_profile_page_shows_a_whole_profile_and_keys_that_exist() -> None:
    page = ROOT / "docs" / "profiling.md"
    (file,), (snippet,) = blocks(page, "json"), blocks(page, "toml")
    parse_profile(file)
    fields = {field.name for field in dataclasses.fields(PlatformProfile)}
    table = text_of(page).split("| field | meaning |")[1].split("\n\n")[0]

    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", table, re.MULTILINE))))
    assert listed == fields
    assert tomllib.loads(snippet)["engine"].keys() <= EngineConfig.model_fields.keys()


def journal_section(stream: str) -> str:
    page = text_of(ROOT / "docs" / "journal.md")
    return page.split(f"### {stream}\n")[1].split("\n#")[0]


@pytest.mark.parametrize("stream", STREAMS)
def test_the_journal_page_has_every_field(stream: str) -> None:
    section, kind = journal_section(stream), ENTRIES[stream]
    shared = {field.name for field in dataclasses.fields(JournalEntry)}
    listed = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (.*?) \|", section, re.MULTILINE))))

    assert f"Version {STREAMS[stream]}, `{kind.__name__}`" in section
    assert listed == {field.name for field in dataclasses.fields(kind)} - shared


def test_the_journal_page_has_every_end() -> None:
    page = text_of(ROOT / "docs" / "journal.md")

    assert [status.value for status in TrajectoryStatus if f"`{status.value}`" not in page] == []
    assert [status.value for status in GroupStatus if f"`{status.value}`" not in page] == []


def test_every_decision_is_in_the_index() -> None:
    index = text_of(ROOT / "docs" / "index.md")
    decisions = sorted((ROOT / "docs" / "adr").glob("*.md"))

    assert [path.name[:4] for path in decisions] == [f"{number:04d}" for number in range(1, len(decisions) + 1)]
    for path in decisions:
        assert f"(adr/{path.name})" in index
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in text_of(path), f"{path.name}: no {heading}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_no_figure_is_left_open(page: Path) -> None:
    assert re.findall(r"\b(?:MEASURED|TODO|TBD|FIXME|XXX)\b", text_of(page)) == []
