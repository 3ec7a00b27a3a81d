"""Folders that are there whole or not at all, wherever their writer stops."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pearl.train.whole_folder import settle_all, written_whole


def write(folder: Path, text: str) -> None:
    with written_whole(folder) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text(text)


def texts(root: Path) -> dict[str, str]:
    return {str(path.relative_to(root)): path.read_text() for path in sorted(root.rglob("file"))}


def test_a_folder_is_written_and_replaced(tmp_path: Path) -> None:
    write(tmp_path / "a", "one")
    write(tmp_path / "a", "two")
    assert texts(tmp_path) == {"a/inner/file": "two"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_an_error_changes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a", "one")

    def fail() -> None:
        with written_whole(tmp_path / "a") as partial:
            (partial / "file").write_text("two")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert texts(tmp_path) == {"a/inner/file": "one"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


class Killed(BaseException):
    pass


@pytest.fixture(params=range(4))
def killed_at(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Nothing on disk changes any more from the n-th rename or removal on."""
    left = [request.param]

    def dying(act: Callable[..., object]) -> Callable[..., object]:
        def wrapped(*arguments: object, **named: object) -> object:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
            return act(*arguments, **named)

        return wrapped

    monkeypatch.setattr("pearl.train.whole_folder.os.rename", dying(os.rename))
    monkeypatch.setattr("pearl.train.whole_folder.shutil.rmtree", dying(shutil.rmtree))
    yield request.param
    monkeypatch.undo()


def test_a_writer_that_is_killed_leaves_the_old_or_the_new(
    tmp_path: Path, killed_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    del killed_at
    (tmp_path / "a" / "inner").mkdir(parents=True)
    (tmp_path / "a" / "inner" / "file").write_text("one")
    with pytest.raises(Killed):
        write(tmp_path / "a", "two")
    monkeypatch.undo()
    settle_all(tmp_path)
    assert texts(tmp_path) in ({"a/inner/file": "one"}, {"a/inner/file": "two"})
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
