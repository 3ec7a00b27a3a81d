"""Where the data of benchmarks comes from: what was asked for, what lies beside, or made up and labelled so."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks import _data
from benchmarks._data import Data, add_data_argument, find_data
from pearl.errors import ProfileError
from pearl.sim.generate import SyntheticWorkload
from pearl.sim.script import ScriptTurn


@pytest.fixture(autouse=True)
def nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PEARL_DATA", raising=False)
    monkeypatch.setattr(_data, "BESIDE", tmp_path / "absent")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data" / "workloads").mkdir(parents=True)
    (tmp_path / "data" / "availability").mkdir()
    return tmp_path / "data"


def argument(*arguments: str) -> Path | None:
    parser = argparse.ArgumentParser()
    add_data_argument(parser)
    found: Path | None = parser.parse_args(arguments).data
    return found


class TestWhere:
    def test_the_order(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        places = [tmp_path / name for name in ("given", "variable", "beside")]
        for place in places:
            place.mkdir()
        given, variable, beside = places
        assert find_data(None) == Data(folder=None, label="synthetic")
        monkeypatch.setattr(_data, "BESIDE", beside)
        assert find_data(None).folder == beside
        monkeypatch.setenv("PEARL_DATA", str(variable))
        assert find_data(None).folder == variable
        assert find_data(argument("--data", str(given))) == Data(folder=given, label=str(given))

    def test_nothing_given(self) -> None:
        assert argument() is None

    def test_what_is_asked_for_must_be_there(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEARL_DATA", str(tmp_path / "nope"))
        with pytest.raises(
            ProfileError, match=r"^PEARL_DATA: got .*nope, which is no folder; want one with workloads/"
        ):
            find_data(None)
        with pytest.raises(ProfileError, match=r"^--data: got .*other, which is no folder"):
            find_data(tmp_path / "other")

    def test_an_empty_variable_is_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PEARL_DATA", "")
        assert find_data(None).folder is None


class TestWorkload:
    def test_recorded(self, folder: Path) -> None:
        line = {"turns": [{"input_tokens": 5, "output_tokens": 7, "env_s": None}]}
        (folder / "workloads" / "webshop_react.jsonl").write_text(json.dumps(line))
        found = find_data(folder).workload("webshop", seed=1)
        assert found.recorded
        assert found.label == "recorded: webshop_react.jsonl (waits not recorded: the prior webshop)"
        assert found.workload.script(0, 0).turns == (ScriptTurn(5, 7, 0.1),)

    @pytest.mark.parametrize("name", ["swe", "game"])
    def test_synthetic(self, folder: Path, name: str) -> None:
        found = find_data(folder).workload(name, seed=3)
        assert (found.recorded, found.label) == (False, f"synthetic: preset {name}")
        assert isinstance(found.workload, SyntheticWorkload)
        assert found.workload.seed == 3

    def test_another_name(self) -> None:
        with pytest.raises(
            ProfileError, match=r"^workload: got 'chess', want one of swe, terminal, tau, webshop, game$"
        ):
            find_data(None).workload("chess", seed=0)


class TestAvailability:
    def test_recorded(self, folder: Path) -> None:
        (folder / "availability" / "mine.csv").write_text("time_s,gpus\n0,3\n9,1\n")
        found = find_data(folder).availability("mine", seed=0)
        assert (found.trace, found.label, found.recorded) == (((0.0, 3), (9.0, 1)), "recorded: mine.csv", True)

    @pytest.mark.parametrize("name", ["bamboo_s1_2h", "bamboo_s2_2h", "bamboo_s3_2h"])
    def test_synthetic(self, name: str) -> None:
        found = find_data(None).availability(name, seed=0)
        assert (found.label, found.recorded) == (f"synthetic: like {name}", False)
        assert found.trace[0][0] == 0
        assert found.trace[-1][0] == 7200
        assert all(0 <= gpus <= 12 and gpus % 2 == 0 for _, gpus in found.trace)
        assert len(found.trace) > 3

    @pytest.mark.parametrize("name", ["gcp", "../secret", ""])
    def test_neither(self, folder: Path, name: str) -> None:
        with pytest.raises(
            ProfileError, match=r"^availability: got '.*' in .*, want one of bamboo_s1_2h, bamboo_s2_2h"
        ):
            find_data(folder).availability(name, seed=0)
