"""Run folders: whole or not at all, and checked before a run goes on."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import pearl
from pearl.config.load import LoadedRecipe, load_recipe
from pearl.config.origins import OVERRIDE
from pearl.errors import RunFolderError
from pearl.report import run_folder
from pearl.report.run_folder import RunFolder, installed_version, new_folder


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadedRecipe:
    monkeypatch.chdir(tmp_path)
    Path("x.toml").write_text('[model]\npath = "m"\n[environment]\nkind = "k"\n')
    return load_recipe(Path("x.toml"), ["run.name=guess", "run.root=out/runs"])


def create(loaded: LoadedRecipe) -> RunFolder:
    return RunFolder.create(loaded.recipe, loaded.origins)


def everything(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def test_a_new_folder_holds_the_resolved_recipe_origins_and_versions(loaded: LoadedRecipe) -> None:
    folder = create(loaded)
    assert folder.path.parent == Path("out/runs")
    assert re.fullmatch(r"guess-\d{8}-\d{6}", folder.path.name)
    assert everything(folder.path) == [
        "checkpoints", "journal", "lock", "metrics", "origins.json", "recipe.toml", "versions.json",
    ]  # fmt: skip
    assert load_recipe(folder.recipe_file).recipe == loaded.recipe
    origins = json.loads((folder.path / "origins.json").read_text())
    assert origins["model.path"] == "x.toml:2"
    assert origins["run.name"] == "override"
    assert origins["run.seed"] == "default"
    versions = json.loads((folder.path / "versions.json").read_text())
    assert (versions["schema"], versions["version"]) == ("pearl.run_folder", 1)
    assert versions["pearl"] == pearl.__version__
    assert versions["packages"]["pydantic"] == metadata.version("pydantic")
    assert {"torch", "ray", "transformers"} <= set(versions["packages"])


def test_nothing_else_is_left_in_the_root(loaded: LoadedRecipe) -> None:
    folder = create(loaded)
    assert list(Path("out/runs").iterdir()) == [folder.path]


def test_runs_of_the_same_second_are_numbered(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20250131-120000")
    names = [create(loaded).path.name for _ in range(3)]
    assert names == ["guess-20250131-120000", "guess-20250131-120000-2", "guess-20250131-120000-3"]


def test_a_file_in_the_place_is_left_alone(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20250131-120000")
    place = Path("out/runs/guess-20250131-120000")
    place.parent.mkdir(parents=True)
    place.write_text("mine")
    assert create(loaded).path.name == "guess-20250131-120000-2"
    assert place.read_text() == "mine"


def test_a_race_for_the_place_is_lost_gracefully(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20250131-120000")
    real = Path.rename
    rival = Path("out/runs/guess-20250131-120000")

    def rename(self: Path, target: Path) -> Path:
        # Another run takes the place between the look and the rename.
        if target == rival and not rival.exists():
            (rival / "journal").mkdir(parents=True)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    assert create(loaded).path.name == "guess-20250131-120000-2"
    assert everything(rival) == ["journal"]


def test_a_root_that_cannot_be_made(loaded: LoadedRecipe) -> None:
    Path("out").write_text("a file")
    before = everything(Path())
    with pytest.raises(RunFolderError) as caught:
        create(loaded)
    assert str(caught.value) == (
        "out/runs: a run folder cannot be made here: Not a directory; choose another place with run.root=FOLDER"
    )
    assert everything(Path()) == before


def test_a_root_that_the_system_refuses(loaded: LoadedRecipe) -> None:
    recipe = loaded.recipe.model_copy(update={"run": loaded.recipe.run.model_copy(update={"root": Path("/proc/runs")})})
    with pytest.raises(RunFolderError, match=r"^/proc/runs: a run folder cannot be made here: "):
        RunFolder.create(recipe, loaded.origins)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_an_end_half_way_leaves_nothing(
    loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = everything(Path())
    real = Path.write_text

    def write_text(self: Path, *arguments: str, **options: str) -> int:
        if self.name == "versions.json":
            raise error
        return real(self, *arguments, **options)

    monkeypatch.setattr(Path, "write_text", write_text)
    with pytest.raises((RunFolderError, KeyboardInterrupt)) as caught:
        create(loaded)
    assert isinstance(caught.value, RunFolderError) == isinstance(error, OSError)
    assert everything(Path()) == before


def test_other_runs_in_the_root_survive_a_failure(loaded: LoadedRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    other = create(loaded)
    before = everything(Path())
    monkeypatch.setattr(run_folder, "dump_toml", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(RunFolderError, match="No space left"):
        create(loaded)
    assert everything(Path()) == before
    other.close()
    with RunFolder.open(other.path) as again:
        assert again == other


class TestOpen:
    def test_a_whole_folder(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        folder.close()
        assert RunFolder.open(folder.path) == folder

    def test_one_process_at_a_time(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        held = f"^{folder.path}: the run is in use by process {os.getpid()}; wait until it has ended"
        with pytest.raises(RunFolderError, match=held):
            RunFolder.open(folder.path)
        folder.close()
        with RunFolder.open(folder.path), pytest.raises(RunFolderError, match=held):
            RunFolder.open(folder.path)
        with RunFolder.open(folder.path):
            pass

    def test_a_process_that_was_killed_holds_nothing(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        folder.close()
        code = (
            "from pathlib import Path; from pearl.report.run_folder import RunFolder; "
            f"folder = RunFolder.open(Path({str(folder.path)!r})); print('held', flush=True); input()"
        )
        other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=f"in use by process {other.pid};"):
            RunFolder.open(folder.path)
        other.kill()
        other.communicate()
        RunFolder.open(folder.path).close()

    def test_a_place_where_nothing_can_be_locked(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        (folder.path / "lock").unlink()
        (folder.path / "lock").mkdir()
        with pytest.raises(RunFolderError, match="lock: cannot be locked: Is a directory"):
            RunFolder.open(folder.path)

    def test_no_folder(self, tmp_path: Path) -> None:
        with pytest.raises(RunFolderError, match="nope: no such run folder"):
            RunFolder.open(tmp_path / "nope")

    def test_missing_parts_are_named(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        (folder.path / "recipe.toml").unlink()
        folder.journal.rmdir()
        with pytest.raises(RunFolderError, match=r"not a whole run folder: recipe\.toml, journal/ missing"):
            RunFolder.open(folder.path)

    @pytest.mark.parametrize(
        "text",
        [
            '{"schema": "pearl.run_folder", "version": 2}',
            '{"schema": "pearl.other", "version": 1}',
            "{}",
            "[]",
            "{",
            "\udcff",
        ],
    )
    def test_unknown_or_damaged_schemas(self, loaded: LoadedRecipe, text: str) -> None:
        folder = create(loaded)
        (folder.path / "versions.json").write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(RunFolderError, match=r"versions\.json: (got schema|cannot be read)"):
            RunFolder.open(folder.path)


class TestDiscard:
    def test_a_run_that_never_began_leaves_nothing(self, loaded: LoadedRecipe) -> None:
        before = everything(Path())
        create(loaded).discard()
        assert everything(Path()) == before

    def test_other_runs_stay(self, loaded: LoadedRecipe) -> None:
        first = create(loaded)
        second = create(loaded)
        first.discard()
        assert list(Path("out/runs").iterdir()) == [second.path]


class TestUpdate:
    def test_changes_are_written_down_with_their_origin(self, loaded: LoadedRecipe) -> None:
        folder = create(loaded)
        again = load_recipe(folder.recipe_file, ["run.steps=7"])
        folder.update(again.recipe, {"run.steps": OVERRIDE})
        assert load_recipe(folder.recipe_file).recipe.run.steps == 7
        origins = json.loads((folder.path / "origins.json").read_text())
        assert origins["run.steps"] == "override"
        assert origins["model.path"] == "x.toml:2"
        assert everything(folder.path) == [
            "checkpoints", "journal", "lock", "metrics", "origins.json", "recipe.toml", "versions.json",
        ]  # fmt: skip

    @pytest.mark.parametrize("text", ["{", "[]"])
    def test_damaged_origins(self, loaded: LoadedRecipe, text: str) -> None:
        folder = create(loaded)
        (folder.path / "origins.json").write_text(text)
        with pytest.raises(RunFolderError, match="cannot be updated: "):
            folder.update(loaded.recipe, {})


def test_the_latest_checkpoint_is_the_highest_whole_one(loaded: LoadedRecipe) -> None:
    folder = create(loaded)
    assert folder.latest_checkpoint() is None
    for name in ("step-000009", "step-000010", ".step-000011.partial", "step-000012.old", "notes"):
        (folder.checkpoints / name).mkdir()
    (folder.checkpoints / "step-000099").write_text("a file")
    latest = folder.latest_checkpoint()
    assert latest == folder.checkpoints / "step-000010"
    for name in ("step-999999", "step-1000000"):
        (folder.checkpoints / name).mkdir()
    assert folder.latest_checkpoint() == folder.checkpoints / "step-1000000"


def test_versions_need_no_import() -> None:
    assert installed_version("pydantic") == metadata.version("pydantic")
    assert installed_version("no-such-package-of-any-name") is None


def test_it_says_which_world_it_is_of(loaded: LoadedRecipe) -> None:
    with create(loaded) as real, RunFolder.create(loaded.recipe, loaded.origins, world="simulated") as simulated:
        assert (real.world, simulated.world) == ("real", "simulated")
        versions = real.path / "versions.json"
        old = json.loads(versions.read_text())
        del old["world"]
        versions.write_text(json.dumps(old))
        assert real.world == "real"
        versions.write_text("[]")
        with pytest.raises(RunFolderError, match=r"versions\.json: cannot be read"):
            _ = real.world


def test_a_place_of_its_own(loaded: LoadedRecipe) -> None:
    """With a number behind it where that is taken."""
    place = Path("elsewhere/a-seed0")
    paths = []
    for _ in range(2):
        with RunFolder.create(loaded.recipe, loaded.origins, place=place) as folder:
            paths.append(folder.path)
    assert paths == [place, Path("elsewhere/a-seed0-2")]
    assert not Path("out").exists()


def test_folders_beside_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder.time, "strftime", lambda _: "20260101-000000")
    made = [new_folder(tmp_path / "runs", "x-compare").name for _ in range(3)]
    assert made == ["x-compare-20260101-000000", "x-compare-20260101-000000-2", "x-compare-20260101-000000-3"]
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match=r"file: a folder cannot be made here: .*run\.root=FOLDER"):
        new_folder(tmp_path / "file", "x")
