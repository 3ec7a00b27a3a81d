"""Folders that are on disk whole or not at all, also after a kill or a power cut.

A folder is filled beside its place as `.NAME.partial`, synchronised and renamed; what it replaces waits as
`.NAME.replaced` until then. A writer that was killed between the two renames leaves the old folder there: `settle` brings
it back.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_PARTIAL, _REPLACED = ".partial", ".replaced"


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill; it takes the place of `folder` at the end of the block.

    An error in the block, or an OSError in the exchange, leaves what was there before.
    """
    settle(folder)
    partial, replaced = _beside(folder, _PARTIAL), _beside(folder, _REPLACED)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.rglob("*"), partial):
            _synchronise(path)
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(partial, folder)
        _synchronise(folder.parent)
    finally:
        settle(folder)


def settle(folder: Path) -> None:
    """Undo what an attempt to write `folder` left behind: what it had moved aside comes back."""
    partial, replaced = _beside(folder, _PARTIAL), _beside(folder, _REPLACED)
    if replaced.exists() and not folder.exists():
        os.rename(replaced, folder)
    for left_over in (partial, replaced):
        shutil.rmtree(left_over, ignore_errors=True)


def settle_all(root: Path) -> None:
    """`settle` every folder below `root` that an attempt was made to write."""
    for left_over in sorted(root.glob(".*")):
        if left_over.suffix in (_PARTIAL, _REPLACED):
            settle(root / left_over.stem.removeprefix("."))


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _synchronise(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
