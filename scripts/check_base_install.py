"""Check, with the Python of an environment that holds pearl's base install alone, that this is enough for what it promises.

Configuration, decision core and command line are imported, no training library is there or needed, all recipes check, those to
plan with are explained, and `pearl --help` answers. Its time is printed and judged nowhere: a busy machine is no mistake.

    python -m venv /tmp/base && /tmp/base/bin/pip install . && /tmp/base/bin/python scripts/check_base_install.py
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

PACKAGES = ("pearl.config", "pearl.core", "pearl.records", "pearl.ports", "pearl.pipeline", "pearl.cli")
"""Must be importable whole, every module."""
ABSENT = ("ray", "safetensors", "tensorboard", "tokenizers", "torch", "transformers")
REPEATS = 5


def main() -> int:
    """Exit status 1 with one line per broken promise."""
    problems = [f"{name} is installed, so this is not a base install" for name in ABSENT if _is_installed(name)]
    for name in PACKAGES:
        _import_all(name)
    problems += [f"importing {', '.join(PACKAGES)} loads {name}" for name in ABSENT if name in sys.modules]
    recipes = sorted(map(str, Path("recipes").rglob("*.toml")))
    for recipe in recipes:
        problems += _problems_of(["config", "check", recipe])
        if "plan" in Path(recipe).parts:
            problems += _problems_of(["plan", "explain", recipe], says="shapes considered")
        # Training needs the extra, and says so.
        problems += _problems_of(["train", recipe], status=2, says="train extra")
    seconds = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        problems += _problems_of(["--help"], says="train")
        seconds.append(time.perf_counter() - began_s)
    for problem in problems:
        print(f"base install: {problem}")
    print(f"pearl --help: {statistics.median(seconds):.2f} s (median of {REPEATS}; aim: under 0.5 s on an idle core)")
    print(f"base install: {'broken' if problems else 'fine'}, {len(PACKAGES)} packages, {len(recipes)} recipes")
    return 1 if problems else 0


def _is_installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _import_all(name: str) -> None:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), prefix=f"{name}."):
        importlib.import_module(found.name)


def _problems_of(arguments: list[str], *, status: int = 0, says: str = "") -> list[str]:
    """Run `pearl` and compare exit status and output."""
    command = Path(sys.executable).with_name("pearl")
    done = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    output = f"{done.stdout}{done.stderr}"
    if done.returncode != status or says not in output:
        want = f"exit status {status}" + (f" and {says!r}" if says else "")
        return [f"pearl {' '.join(arguments)}: got exit status {done.returncode}, want {want}: {output.strip()[-300:]}"]
    return []


if __name__ == "__main__":
    sys.exit(main())
