"""Rules for the repository as a whole: what may be in tracked files, pinned versions, changelog, light imports."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import pearl
from pearl.cli.packages import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

MACHINE_PATH = re.compile(r"(?<![\w.])/(?:work|root|Users|home)/\w[\w/.-]*")
"""A path that exists on one machine only."""
REGISTRY = re.compile(r"pypi\.|pythonhosted\.|download\.pytorch|registry\.npm|index-url|find-links", re.IGNORECASE)
"""Where packages come from is the affair of who installs them."""

HEAVY = ("ray", "safetensors", "tensorboard", "tokenizers", "torch", "transformers")
LIGHT = (
    "pearl.cli.main",
    "pearl.cli.profile",
    "pearl.cli.train",
    "pearl.config.load",
    "pearl.core.admission",
    "pearl.core.profile",
    "pearl.core.shape",
    "pearl.pipeline.run",
    "pearl.testing.world",
)


def files() -> list[Path]:
    """Tracked files, and those that would be."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


def texts() -> list[tuple[Path, str]]:
    """Files as text, this one left out, since it must spell what it looks for."""
    found: list[tuple[Path, str]] = []
    for path in files():
        try:
            found.append((path, path.read_text(encoding="utf-8")))
        except UnicodeDecodeError:
            continue
    return [(path, text) for path, text in found if path != Path(__file__).resolve()]


def test_the_listing_is_that_of_the_repository() -> None:
    listed = set(files())

    assert ROOT / "pyproject.toml" in listed
    assert ROOT / "src" / "pearl" / "core" / "admission.py" in listed


@pytest.mark.parametrize("pattern", [MACHINE_PATH, REGISTRY], ids=["machine path", "registry"])
def test_files_hold_nothing_of_one_machine(pattern: re.Pattern[str]) -> None:
    hits = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path, text in texts()
        for number, line in enumerate(text.splitlines(), start=1)
        for match in pattern.finditer(line)
    ]

    assert hits == []


def test_the_patterns_find_what_they_are_for() -> None:
    assert MACHINE_PATH.search("see /work/x/y")
    assert MACHINE_PATH.search("'/home/someone/x'")
    assert not MACHINE_PATH.search("docs/work/x")
    assert not MACHINE_PATH.search("/workers")
    assert REGISTRY.search("--index-url x")
    assert REGISTRY.search("https://files.pythonhosted.org")


def test_no_file_is_large() -> None:
    """Data of this size belongs to a script that makes it."""
    assert [str(path) for path in files() if path.stat().st_size > 1_000_000] == []


def test_the_changelog_has_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first = re.search(r"^## \[(.+?)\]", changelog, re.MULTILINE)

    assert first is not None
    assert first[1] in (pearl.__version__, "Unreleased")
    assert f"## [{pearl.__version__}]" in changelog


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    requirements = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in requirements), "want name==version, no local part"
    return dict(line.split("==") for line in requirements)


def closure(requirements: list[str]) -> set[str]:
    """Everything that installing these brings on this platform, by the metadata of what is installed."""
    found: set[tuple[str, frozenset[str]]] = set()
    todo = [Requirement(text) for text in requirements]
    while todo:
        requirement = todo.pop()
        name, extras = canonicalize_name(requirement.name), frozenset(requirement.extras)
        if (name, extras) in found:
            continue
        found.add((name, extras))
        for text in importlib.metadata.requires(name) or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
                todo.append(inner)
    return {name for name, _ in found}


def test_every_dependency_is_pinned() -> None:
    extras = PROJECT["optional-dependencies"]
    wanted = closure([*PROJECT["dependencies"], *extras["train"], *extras["dev"]])

    assert sorted(wanted - pins().keys()) == []


def test_pins_satisfy_the_requirements() -> None:
    extras = PROJECT["optional-dependencies"]
    pinned = pins()
    for text in [*PROJECT["dependencies"], *extras["train"], *extras["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_the_command_line_knows_the_extras() -> None:
    named = {Requirement(text).name for text in PROJECT["optional-dependencies"]["train"]}

    assert set(EXTRAS["train"]) == named


def test_light_modules_load_nothing_heavy() -> None:
    """In a process of its own, because here everything may be loaded already."""
    code = (
        "import importlib, sys\n"
        f"for name in {LIGHT!r}: importlib.import_module(name)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[]"


def test_the_licence_is_the_standard_text() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")

    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"
