"""Cells of predictions, and their truths: what is fixed beforehand, what is kept, and when it is measured again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType

import pytest

from benchmarks import _cells, _truth
from benchmarks._cells import ROOT, key_of
from benchmarks._predict_cells import HELD_OUT, PLATFORMS, PRIORS, WORKLOADS, Cell, Load, cells, quick_cells
from benchmarks._truth import (
    ELSEWHERE,
    PREDICTORS,
    STEPS,
    Asked,
    asked_from,
    asked_json,
    cells_json,
    platform_for,
    recipe_of,
    simulated,
    truth_of,
    truths_code,
)
from pearl.core.distribution import Distribution, constant
from pearl.core.fluid import FluidPredictor
from pearl.core.makespan import Candidates, Forecast, Predictions, Profile
from pearl.core.priors import workload_prior
from pearl.core.progress import Progress
from pearl.core.shape import parse_shape
from pearl.core.workload import WorkloadProfile

TINY = Cell(
    platform=PLATFORMS[0],
    workload="webshop",
    load=Load(groups=1, group_size=2, workers=2, tp=1),
    max_staleness=0,
    time_scale=1.2,
    seed=7,
)


ALL = tuple(cells())


class TestCells:
    def test_each_combination_once(self) -> None:
        """4 platforms, 8 workloads, with and without staleness: 64 configurations of five shapes."""
        combinations = Counter((cell.platform, cell.workload, cell.max_staleness) for cell in ALL)
        assert combinations == Counter((p, w, s) for p in PLATFORMS for w in WORKLOADS for s in (0, 1))
        assert len(ALL) == 64
        assert sum(len(cell.shapes()) for cell in ALL) == 320

    def test_they_are_the_same_every_time(self) -> None:
        assert tuple(cells()) == ALL

    def test_what_is_held_out(self) -> None:
        """Three of eight: 24 configurations."""
        assert HELD_OUT == ("terminal", "game", "recorded swe")
        assert sum(cell.held_out for cell in ALL) == 24
        assert all(cell.held_out == (cell.workload in HELD_OUT) for cell in ALL)

    def test_what_is_assumed_is_never_what_is_simulated(self) -> None:
        """Nor is the recording of a preset that preset."""
        for workload, prior in PRIORS.items():
            assert prior != workload.removeprefix("recorded ")
        assert PRIORS.keys() == set(WORKLOADS)

    def test_hidden_time_scales_differ(self) -> None:
        scales = [cell.time_scale for cell in ALL]
        assert min(scales) < 0.9 < 1.15 < max(scales)
        assert all(0.8 <= scale <= 1.25 for scale in scales)
        assert len(set(scales)) > 50

    def test_loads(self) -> None:
        """4 to 10 GPUs; batches of 32 to 128 trajectories, no fewer than 8 and no more than 26 for each worker."""
        for load in {cell.load for cell in ALL}:
            assert 4 <= load.workers * load.tp <= 10
            assert 32 <= load.batch <= 128
            assert 8 <= load.batch / load.workers <= 26

    def test_shapes_take_all_workers_and_no_others(self) -> None:
        for cell in ALL:
            for text, _ in cell.shapes():
                shape = parse_shape(text)
                assert sum(pool.workers for pool in shape.pools) == cell.load.workers
                assert {pool.tp for pool in shape.pools} == {cell.load.tp}
            assert len(set(cell.shapes())) == 5

    def test_shapes_by_hand(self) -> None:
        found = replace(TINY, load=Load(groups=4, group_size=12, workers=5, tp=2)).shapes()
        assert found == (("5C@tp2", 0), ("2P3D@tp2", 0), ("1P4D@tp2", 0), ("1P4D@tp2", 256), ("1P4D@tp2", 2048))

    def test_the_quick_ones_are_some_of_them(self) -> None:
        quick = quick_cells()
        assert [(each.workload, each.max_staleness) for each in quick] == [("webshop", 0), ("game", 0), ("webshop", 1)]
        assert all(each in ALL for each in quick)
        assert {each.held_out for each in quick} == {True, False}

    def test_a_cell_names_itself(self) -> None:
        assert str(TINY) == "qwen3-8b-h100 webshop, 1 x 2, 2 workers of tp 1, staleness 0"


class TestWorld:
    def test_the_recipe_assumes_another_workload_and_knows_no_time_scale(self) -> None:
        recipe = recipe_of(TINY, "1P1D", 6, 0.01)
        assert (recipe.workload.prior, recipe.platform.prior) == ("tau", TINY.platform)
        assert (recipe.elastic.policy, recipe.elastic.shape) == ("static", "1P1D")
        assert (recipe.run.steps, recipe.rollout.groups_per_batch, recipe.rollout.group_size) == (6, 1, 2)
        assert recipe.simulation.train_tokens_per_gpu_s == pytest.approx(100)
        assert platform_for(TINY).scale(1) == 1

    def test_there_are_gpus_for_all_workers(self) -> None:
        wide = replace(TINY, load=Load(groups=8, group_size=16, workers=5, tp=2))
        assert recipe_of(wide, "5C@tp2", 6, 0.01).fleet.reserved_gpus == 16


ASKED = Asked(
    workload=WorkloadProfile(
        turns=Distribution((1.0, 4.0), (0.25, 0.75)),
        prompt_tokens=constant(100),
        new_tokens=constant(50),
        generated_tokens=constant(20),
        env_s=Distribution((0.0, 0.1), (0.5, 0.5)),
        retained=0.9,
        turn_overhead_s=0.1,
        theta=0.3,
        likeness=0.2,
    ),
    time_scale=MappingProxyType({1: 1.1, 2: 0.9}),
    progress=Progress(
        batch_trajectories=8,
        unfinished=7,
        live_groups=3,
        needed_groups=2,
        running={0: 4, 3: 5},
        due_groups=1,
        due={3: 2},
        coming=8,
        coming_s=3.5,
        pause_s=1.5,
    ),
    close_s=12.5,
    alone_s=7.5,
    usual_s=8.25,
)


def test_questions_are_read_as_they_were_written() -> None:
    assert asked_from(json.loads(json.dumps(asked_json(ASKED)))) == ASKED


class TestTruths:
    def test_of_a_small_run(self) -> None:
        """One question for each step but the first few, about a batch that begins; nothing in it ends before its slowest."""
        found = truth_of(TINY, "2C", 0, None)
        assert len(found) == STEPS
        for each in found:
            assert dict(each.progress.running) == {0: 2}
            assert each.progress.coming == 0
            assert each.close_s > 0.9 * each.alone_s > 0
            assert 0 < each.usual_s == found[0].usual_s
        # Some of the way to 1.2 is learned with two trajectories a step, and what the workload is like.
        assert 1.02 < found[-1].time_scale[1] < 1.25
        prior, real = workload_prior("tau").turns.mean, workload_prior("webshop").turns.mean
        assert abs(found[-1].workload.turns.mean - prior) > 0.5 * abs(real - prior)

    def test_with_staleness_others_are_in_flight(self) -> None:
        """A batch is asked about while the one before is trained: it has begun already."""
        found = truth_of(replace(TINY, max_staleness=1), "1P1D", 256, None)
        assert len(found) >= 6
        assert all(each.progress.coming_s > 0 for each in found)
        assert all(each.progress.live_groups >= each.progress.needed_groups == 1 for each in found)
        assert any(turns for each in found for turns in each.progress.running)

    @pytest.mark.parametrize("max_staleness", [0, 1])
    def test_they_do_not_follow_from_what_is_predicted(
        self, max_staleness: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Predictions ten times as long: else modules of the predictor could not be left out of the hash."""
        cell = replace(TINY, max_staleness=max_staleness)
        before = truth_of(cell, "1P1D", 0, None)

        class Slow(FluidPredictor):
            def forecast(self, profile: Profile, progress: Progress) -> Forecast:
                inner = super().forecast(profile, progress)

                def predict(candidates: Candidates) -> Predictions:
                    found = inner(candidates)
                    return replace(found, close_s=10 * found.close_s, error_s=10 * found.error_s)

                return predict

        monkeypatch.setattr(_truth, "FluidPredictor", Slow)
        assert truth_of(cell, "1P1D", 0, None) == before

    def test_a_cell_goes_through_a_file(self) -> None:
        """What `measure` is given says all that a truth follows from."""
        given = [json.loads(json.dumps(each)) for each in cells_json(TINY, None)]
        assert [(each["shape"], each["append_tokens"]) for each in given] == list(TINY.shapes())
        assert {each["source"] for each in given} == {"preset webshop"}
        result = json.loads(json.dumps(simulated(given[0], folder=None)))
        assert [asked_from(each) for each in result["asked"]] == truth_of(TINY, *TINY.shapes()[0], None)


class TestKeptTruths:
    def test_keys_tell_cells_apart(self) -> None:
        """All 320, any cell with one thing changed, and another source of the workload."""
        every = [each for cell in cells() for each in cells_json(cell, None)]
        assert len({key_of(each, "x") for each in every}) == 320
        (one, *_) = cells_json(TINY, None)
        changes = [
            {"time_scale": 1.21},
            {"seed": 8},
            {"source": "recorded: webshop.jsonl"},
            {"prior": "swe"},
            {"append_tokens": 1},
            {"load": {**asdict(TINY.load), "groups": 2}},
        ]
        assert len({key_of({**one, **change}, "x") for change in ({}, *changes)}) == 7

    def test_the_code_is_that_of_the_simulation(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """A copy: other predictors and other folders leave the hash as it is, all else changes it."""
        source = tmp_path / "src" / "pearl"
        for name in (
            *PREDICTORS,
            *(f"{folder}/x.py" for folder in ELSEWHERE),
            "core/workload.py",
            "sim/x.py",
            "silicon/t.json",
        ):
            path = source / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("1")
        monkeypatch.setattr(_cells, "ROOT", tmp_path)

        def changed(names: Sequence[str]) -> bool:
            before = truths_code()
            for name in names:
                (source / name).write_text("2")
            return truths_code() != before

        assert not changed([*PREDICTORS, *(f"{folder}/x.py" for folder in ELSEWHERE)])
        for name in ("core/workload.py", "sim/x.py", "silicon/t.json"):
            assert changed([name])

    def test_nothing_that_is_left_out_is_used(self) -> None:
        """No simulation imports these folders; the predictors, it does (see above)."""
        code = (
            "import sys, benchmarks._truth, pearl.sim.simulate;"
            f"print([m for m in sys.modules if m.startswith(tuple('pearl.' + each for each in {ELSEWHERE!r}))])"
        )
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
        assert ran.stdout.strip() == "[]"
