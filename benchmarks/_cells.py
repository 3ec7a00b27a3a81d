"""Many independent measurements ("cells"), side by side in processes, each kept as soon as it is there.

Results lie in a file of JSON lines, keyed by a hash of the cell and of all code and data that it depends on: a benchmark that
was stopped goes on where it was, and nothing is taken from code that has changed since.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SETTING = ROOT / "recipes" / "sim" / "qwen3_8b_spot.toml"
"""The PEARL paper's setting, which simulating benchmarks change."""
RESULTS = ROOT / "build" / "benchmarks"
PROCESSES = 2

Cell = Mapping[str, Any]
"""JSON: names and values."""
Result = dict[str, Any]
"""JSON as well."""


def code_hash(*more: Path, without: Sequence[str] = ()) -> str:
    """Of the package's source and shipped tables, and of further files; `without` modules and folders of the package.

    Raises:
        FileNotFoundError: something that is left out, or a further file, is not there.
    """
    digest = hashlib.sha256()
    source = ROOT / "src" / "pearl"
    left_out = [source / name for name in without]
    for path in left_out:
        if not path.exists():
            raise FileNotFoundError(f"code_hash: without: got {path.relative_to(source)}, which is not in {source}")
    found = sorted(path for path in source.rglob("*") if path.suffix in (".py", ".json"))
    used = [path for path in found if not any(path.is_relative_to(each) for each in left_out)]
    for path in [*used, *more]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def key_of(cell: Cell, code: str) -> str:
    """Of a result in the file."""
    return hashlib.sha256(f"{code} {json.dumps(cell, sort_keys=True)}".encode()).hexdigest()[:20]


def measure(
    name: str, cells: Sequence[Cell], run: Callable[[Cell], Result], *, code: str, fresh: bool = False
) -> list[Result]:
    """The result of each cell, in order; `run` is called in processes of its own for those that are not in the file yet."""
    path = RESULTS / f"{name}.jsonl"
    known = {} if fresh else _read(path)
    keys = [key_of(cell, code) for cell in cells]
    missing = {key: cell for key, cell in zip(keys, cells, strict=True) if key not in known}
    if missing:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w" if fresh else "a", encoding="utf-8") as file:
            if known:
                file.write("\n")  # a line that was cut off ends here
            for done, (key, result) in enumerate(_results(run, missing), 1):
                known[key] = result
                file.write(json.dumps({"key": key, "result": result}) + "\n")
                file.flush()
                _say(name, done, len(missing))
    return [known[key] for key in keys]


def _results(run: Callable[[Cell], Result], cells: Mapping[str, Cell]) -> Iterable[tuple[str, Result]]:
    # Spawned, so that a cell's result does not depend on what ran before in the parent.
    with multiprocessing.get_context("spawn").Pool(min(PROCESSES, len(cells))) as pool:
        yield from pool.imap_unordered(_Call(run), list(cells.items()))


class _Call:
    """A cell's function, with its key."""

    def __init__(self, run: Callable[[Cell], Result]) -> None:
        self.run = run

    def __call__(self, item: tuple[str, Cell]) -> tuple[str, Result]:
        key, cell = item
        began = time.perf_counter()
        result = self.run(cell)
        return key, {**result, "wall_s": time.perf_counter() - began}


def _read(path: Path) -> dict[str, Result]:
    known: dict[str, Result] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):  # empty, or the last one of a run that was killed
                entry = json.loads(line)
                known[entry["key"]] = entry["result"]
    return known


def _say(name: str, done: int, of: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{name}: {done} of {of} cells", end="" if done < of else "\n", file=sys.stderr, flush=True)
