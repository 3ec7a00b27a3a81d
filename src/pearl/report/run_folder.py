"""Run folders: everything that one run leaves, in one place.

    <root>/<name>-<YYYYmmdd-HHMMSS>[-n]/
        recipe.toml      resolved: every value of the tree
        origins.json     dotted key -> where the value was set
        versions.json    schema of the folder, versions of pearl, Python and libraries, platform, the model's files
        lock             held by the process whose run this is
        journal/         one JSON-lines file per stream
        metrics/         TensorBoard event files
        checkpoints/     step-000100/, ...

*Whole or not at all*: a folder is filled beside its place and renamed into it.
*One at a time*: whoever creates or opens a folder holds its lock until `close`; another process is refused meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Self

import pearl
from pearl.config.load import dump_toml
from pearl.config.origins import Origin
from pearl.config.recipe import Recipe
from pearl.errors import RunFolderError
from pearl.file_lock import FileLock, holder
from pearl.report.model_files import changed_files, model_files

SCHEMA = "pearl.run_folder"
VERSION = 1
_PACKAGES = ("numpy", "pydantic", "ray", "safetensors", "tokenizers", "torch", "transformers")
_SUBFOLDERS = ("journal", "metrics", "checkpoints")
_FILES = ("recipe.toml", "origins.json", "versions.json")
_LOCK = "lock"
_CHECKPOINT = re.compile(r"step-(\d+)")
_MAX_SAME_SECOND = 1000


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run folder that exists, is whole, and is this process's until `close`, or the end of a `with` block."""

    path: Path
    _lock: FileLock | None = field(default=None, compare=False, repr=False)
    _made: tuple[Path, ...] = field(default=(), compare=False, repr=False)
    """Folders above it that were made for it, innermost first."""

    @classmethod
    def create(
        cls, recipe: Recipe, origins: Mapping[str, Origin], *, place: Path | None = None, world: str = "real"
    ) -> RunFolder:
        """Make the folder of a new run under `run.root`, or at `place` (with a number behind it where that is taken).

        `world`: `real` or `simulated`; told by `versions.json`, and not resumed where it is simulated.

        Raises:
            RunFolderError: it cannot be written; nothing is left behind.
        """
        root = recipe.run.root if place is None else place.parent
        made = [folder for folder in (root, *root.parents) if not folder.exists()]
        partial: Path | None = None
        lock: FileLock | None = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            name = f"{recipe.run.name}-{time.strftime('%Y%m%d-%H%M%S')}" if place is None else place.name
            partial = root / f".{name}.{secrets.token_hex(4)}.partial"
            partial.mkdir()
            _fill(partial, recipe, origins, world)
            # Before the rename, so that there is no moment at which somebody else could take it.
            lock = FileLock.take(partial / _LOCK)
            return cls(_rename(partial, root / name), lock, tuple(made))
        except BaseException as error:
            if lock is not None:
                lock.close()
            if partial is not None:
                shutil.rmtree(partial, ignore_errors=True)
            _remove_empty(made)
            if not isinstance(error, OSError):
                raise
            raise RunFolderError(
                f"{root}: a run folder cannot be made here: {error.strerror or error}; "
                "choose another place with run.root=FOLDER"
            ) from error

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was begun before.

        Raises:
            RunFolderError: not a run folder, not whole, of an unknown schema, or in use.
        """
        if not path.is_dir():
            raise RunFolderError(f"{path}: no such run folder")
        missing = [name for name in _FILES if not (path / name).is_file()]
        missing += [f"{name}/" for name in _SUBFOLDERS if not (path / name).is_dir()]
        if missing:
            raise RunFolderError(
                f"{path}: not a whole run folder: {', '.join(missing)} missing; want a folder made by `pearl train`"
            )
        versions = path / "versions.json"
        schema, version = _schema(versions)
        if (schema, version) != (SCHEMA, VERSION):
            raise RunFolderError(
                f"{versions}: got schema {schema!r} version {version!r}, want {SCHEMA!r} version {VERSION}"
            )
        try:
            lock = FileLock.take(path / _LOCK)
        except OSError as error:
            raise RunFolderError(f"{path / _LOCK}: cannot be locked: {error.strerror or error}") from error
        if lock is None:
            raise RunFolderError(
                f"{path}: the run is in use by process {holder(path / _LOCK)}; wait until it has ended, or stop it with "
                "Ctrl-C, and resume it then"
            )
        return cls(path, lock)

    def changed_model_files(self, model: Path) -> tuple[str, ...]:
        """Files of a model folder, weights left out, that are not what they were when the run began.

        Raises:
            RunFolderError: what they were, or are, cannot be read.
        """
        try:
            before = json.loads((self.path / "versions.json").read_text()).get("model")
            return changed_files(before, model) if isinstance(before, dict) else ()
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{self.path}: its model cannot be compared with {model}: {error}") from error

    def close(self) -> None:
        """Let others have it; harmless when repeated."""
        if self._lock is not None:
            self._lock.close()

    def discard(self) -> None:
        """Remove a new folder whose run never began, with the folders that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        _remove_empty(self._made)
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, recipe: Recipe, overrides: Mapping[str, Origin]) -> None:
        """Write down what a resumed run does differently; origins of other values stay what they were.

        Raises:
            RunFolderError: the folder cannot be read or written.
        """
        origins = self.path / "origins.json"
        try:
            before = json.loads(origins.read_text())
            _replace(origins, _json({**before, **{key: str(origin) for key, origin in overrides.items()}}))
            _replace(self.recipe_file, dump_toml(recipe))
        except (OSError, ValueError, TypeError) as error:
            raise RunFolderError(f"{self.path}: cannot be updated: {error}") from error

    @property
    def world(self) -> str:
        """`real`, as is a folder that says nothing of it, or `simulated`.

        Raises:
            RunFolderError: it cannot be read.
        """
        path = self.path / "versions.json"
        try:
            return str(json.loads(path.read_text()).get("world", "real"))
        except (OSError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{path}: cannot be read: {error}") from error

    @property
    def recipe_file(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def journal(self) -> Path:
        """Folder of the journal's streams."""
        return self.path / "journal"

    @property
    def metrics(self) -> Path:
        """Folder of TensorBoard event files."""
        return self.path / "metrics"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    def latest_checkpoint(self) -> Path | None:
        """The checkpoint of the highest step, None when there is none yet; unfinished ones do not count."""
        found = [
            (int(match[1]), folder)
            for folder in self.checkpoints.iterdir()
            if (match := _CHECKPOINT.fullmatch(folder.name)) and folder.is_dir()
        ]
        return max(found)[1] if found else None


def new_folder(root: Path, name: str) -> Path:
    """Make an empty folder for something beside runs: `ROOT/NAME-YYYYmmdd-HHMMSS`, with a number where that is taken.

    Raises:
        RunFolderError: it cannot be made.
    """
    place = root / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        for number in range(1, _MAX_SAME_SECOND):
            free = place if number == 1 else place.with_name(f"{place.name}-{number}")
            with contextlib.suppress(FileExistsError):
                free.mkdir()
                return free
    except OSError as error:
        raise RunFolderError(
            f"{root}: a folder cannot be made here: {error.strerror or error}; choose another place with run.root=FOLDER"
        ) from error
    raise RunFolderError(f"{place}: {_MAX_SAME_SECOND - 1} of this name were made in this second")


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        # Only empty ones go: another run may have been started in it meanwhile.
        with contextlib.suppress(OSError):
            folder.rmdir()


def _fill(folder: Path, recipe: Recipe, origins: Mapping[str, Origin], world: str) -> None:
    for name in _SUBFOLDERS:
        (folder / name).mkdir()
    (folder / "recipe.toml").write_text(dump_toml(recipe), encoding="utf-8")
    (folder / "origins.json").write_text(_json({key: str(origin) for key, origin in origins.items()}))
    (folder / "versions.json").write_text(_json({**_versions(world), "model": model_files(recipe.model.path)}))


def _rename(partial: Path, place: Path) -> Path:
    """Rename into the first free place of `place`, `place-2`, `place-3`, ...; other runs may do the same just now."""
    for number in range(1, _MAX_SAME_SECOND):
        free = place if number == 1 else place.with_name(f"{place.name}-{number}")
        if free.exists():
            continue
        try:
            partial.rename(free)
        except OSError:
            # A lost race shows as an error, because a run folder is never empty.
            if free.exists():
                continue
            raise
        return free
    raise RunFolderError(f"{place}: {_MAX_SAME_SECOND - 1} runs of this name began in this second")


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def _json(value: object) -> str:
    return json.dumps(value, indent=2) + "\n"


def _versions(world: str) -> dict[str, object]:
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "world": world,
        "pearl": pearl.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: installed_version(name) for name in _PACKAGES},
    }


def installed_version(package: str) -> str | None:
    """Version of an installed package without importing it, None when it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _schema(path: Path) -> tuple[object, object]:
    try:
        document = json.loads(path.read_text())
        return document.get("schema"), document.get("version")
    except (OSError, ValueError, AttributeError) as error:
        raise RunFolderError(f"{path}: cannot be read: {error}") from error
