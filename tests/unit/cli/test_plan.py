"""`pearl plan explain`: what it says of a whole recipe, and how each mistake ends."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pearl.cli.main import app
from pearl.core.priors import platform_prior
from pearl.silicon.tables import silicon_profiles

RECIPE = """\
model.path = "m"
environment = { kind = "guess_number", slots = 128 }
rollout = { groups_per_batch = 4, group_size = 16, max_turns = 145, max_context_tokens = 32768 }
engine.max_context_tokens = 32768
sampling.max_new_tokens = 8192
fleet = { reserved_gpus = 4, external_gpus = 12, training_gpus = 16, tp = [2], overlap_tp = 2 }
"""


@pytest.fixture(autouse=True)
def plan_file(folder: Path) -> Path:
    path = folder / "p.toml"
    path.write_text(RECIPE)
    return path


def explain(*arguments: str) -> Result:
    result = CliRunner().invoke(app, ["plan", "explain", "p.toml", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    return result


def told(*arguments: str) -> str:
    result = explain(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*arguments: str) -> str:
    result = explain(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def document(*arguments: str) -> dict[str, object]:
    def no_constant(name: str) -> float:
        raise AssertionError(name)

    found: dict[str, object] = json.loads(told(*arguments, "--json"), parse_constant=no_constant)
    return found


def numbers(value: object) -> Iterator[float]:
    match value:
        case dict():
            for each in value.values():
                yield from numbers(each)
        case list():
            for each in value:
                yield from numbers(each)
        case bool() | str() | None:
            return
        case int() | float():
            yield value


def chosen(found: dict[str, object]) -> tuple[object, object]:
    option = found["chosen"]
    assert isinstance(option, dict)
    return option["shape"], option["borrowed"]


class TestText:
    def test_nothing_serves_yet(self) -> None:
        """Sixteen dedicated GPUs make eight workers of two, the training GPUs eight more."""
        lines = told("elastic.policy=borrow_all").splitlines()
        assert lines[0] == "fleet        4 reserved + 12 external + 16 training GPUs; tp 2"
        assert lines[2] == "policy       borrow_all, predicted by pearl"
        assert lines[3] == "batch        64 of 64 trajectories to finish, 128 in flight"
        assert lines[8] == "serving      nothing"
        titles = [line for line in lines if line and not line.startswith(" ")][9:]
        assert [title.split(":")[0] for title in titles] == [
            "shapes considered, the best of each kind",
            "gates",
            "decision",
            "plan",
        ]
        assert any(line.startswith("  reason") and "forced: " in line for line in lines)
        assert sum("chosen" in line for line in lines) == 1
        # Borrowed ones wake: 8 + 8 steps; then the others start.
        assert [line.split() for line in lines if "admit together" in line] == [
            ["16", "admit", "together", "0-7"],
            ["33", "admit", "together", "8-15"],
        ]

    def test_what_serves_is_told(self) -> None:
        """Two prefill and six decode workers serve on the dedicated GPUs; nothing is started again."""
        lines = told("--serving", "2P6D@tp2").splitlines()
        assert any(line.startswith("serving      2P6D@tp2: closes in ") for line in lines)
        assert not any("start as" in line for line in lines)

    def test_training_uses_its_gpus(self) -> None:
        text = told("elastic.policy=rlboost_plus", "--serving", "8C@tp2", "--training")
        assert "borrow  " not in text
        assert "  reason     best: " in text
        assert "\nplan" not in text

    def test_a_static_policy(self) -> None:
        text = told("elastic.policy=static", "elastic.shape=1P3D@tp2")
        assert "policy       static (1P3D@tp2), predicted by pearl" in text
        assert "instead of" not in text

    def test_a_static_shape_that_is_too_large(self) -> None:
        """All eight workers that there are room for, and word of it."""
        text = told("elastic.policy=static", "elastic.shape=9C@tp2")
        assert "  shape       8C@tp2: closes in" in text
        assert "  instead of  9C@tp2, which does not fit" in text

    def test_nothing_fits(self) -> None:
        """One GPU each on two nodes, and workers want two on one."""
        text = told("fleet.reserved_gpus=1", "fleet.external_gpus=1", "--training")
        assert "  none: nothing that the policy may choose fits on the GPUs" in text
        assert "  reason     nothing_fits: no shape on these GPUs can serve" in text

    def test_ten_thousand_gpus_stay_readable(self) -> None:
        text = told("fleet.reserved_gpus=2000", "fleet.external_gpus=4000", "fleet.training_gpus=4000")
        assert len(text.splitlines()) < 60
        assert max(map(len, text.splitlines())) < 220


class TestJson:
    @pytest.mark.parametrize(
        "arguments",
        [
            (),
            ("--serving", "2P6D@tp2"),
            ("--training",),
            ("fleet.reserved_gpus=1", "fleet.external_gpus=1"),
            ("fleet.tp=[1, 2, 4]", "fleet.hybrid=true", "--serving", "2P@tp1+3D@tp4"),
        ],
    )
    def test_every_number_is_one(self, arguments: tuple[str, ...]) -> None:
        found = document(*arguments)
        assert all(math.isfinite(value) for value in numbers(found))
        assert json.loads(json.dumps(found)) == found

    def test_nothing_serves_yet(self) -> None:
        found = document()
        assert (found["policy"], found["predictor"], found["reason"]) == ("pearl", "pearl", "forced")
        assert found["current"] is None
        assert chosen(found)[1] in range(9)

    def test_training_borrows_nothing(self) -> None:
        assert chosen(document("--training"))[1] == 0

    def test_borrowing_all(self) -> None:
        assert chosen(document("elastic.policy=borrow_all"))[1] == 8

    @pytest.mark.parametrize(
        ("arguments", "shape", "borrowed"),
        [
            (("elastic.policy=roll",), "2C@tp2", 0),
            (("elastic.policy=roll_large", "elastic.fixed_gpus=9"), "4C@tp2", 0),
            (("elastic.policy=rlboost_plus",), "8C@tp2", 0),
            (("elastic.policy=rlboost_plus_seeding",), "16C@tp2", 8),
            (("elastic.policy=rlboost_plus_seeding", "--training"), "8C@tp2", 0),
            (("elastic.policy=static", "elastic.shape=1P3D@tp2"), "1P3D@tp2", 0),
        ],
    )
    def test_policies(self, arguments: tuple[str, ...], shape: str, borrowed: int) -> None:
        """What each is allowed leaves one shape: two workers on reserved GPUs, eight on all dedicated ones, ..."""
        found = document(*arguments)
        assert chosen(found) == (shape, borrowed)

    def test_the_paper(self) -> None:
        found = document("elastic.policy=paper")
        assert (found["policy"], found["predictor"]) == ("paper", "paper")

    def test_what_serves(self) -> None:
        current = document("--serving", "2P6D@tp2")["current"]
        assert isinstance(current, dict)
        assert (current["shape"], current["borrowed"], current["append_tokens"]) == ("2P6D@tp2", 0, 0)

    def test_thresholds_are_those_of_the_recipe(self) -> None:
        """The pair that serves is far from the best ratio, so a gate is asked."""
        gains = ("elastic.switch_gain_ratio=0.011", "elastic.switch_gain_mode=0.022", "elastic.switch_gain_tp=0.033")
        gates = document("--serving", "7P1D@tp2", "--training", *gains)["gates"]
        assert isinstance(gates, list)
        shares = {gate["numbers"].get("threshold_share") for gate in gates}
        assert shares
        assert shares <= {0.011, 0.022}


class TestMistakes:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (("elastic.policy=best",), 'command line: elastic.policy: got "best", want one of "pearl", "paper"'),
            (("elastic.policy=static", "elastic.shape=9Q"), "command line: elastic.shape: got '9Q', want e.g. `2C`"),
            (
                ("elastic.policy=static", "elastic.shape=4C@tp8"),
                'command line: elastic.shape: got "4C@tp8" with tp 8, want tensor parallelisms in fleet.tp = [2]',
            ),
            (("elastic.policy=static",), 'command line: elastic.shape: got "", want a shape'),
            (
                ("elastic.switch_gain_mode=1",),
                "command line: elastic.switch_gain_mode: got 1, want a number >= 0 and < 1",
            ),
            (("elastic.return_z=-1",), "command line: elastic.return_z: got -1, want a number 0..5"),
            (("fleet.overlap_tp=4",), "command line: fleet.overlap_tp: got 4, want one of fleet.tp = [2]"),
            (
                ("fleet.reserved_gpus=0", "fleet.external_gpus=0"),
                "command line: fleet.reserved_gpus: got 0 with fleet.external_gpus, want >= 2",
            ),
            (
                ("fleet.tp=[2, 16]", "fleet.gpus_per_node=16"),
                "fleet.tp: got 16, want one of 1, 2, 4, 8 (what platform.prior qwen3-8b-h100 knows)",
            ),
            (('platform.profiles=["nope.json"]',), "platform.profiles: nope.json: no such file; want a file of"),
            (('platform.profiles=["p.toml"]',), "platform.profiles: p.toml: cannot be read as JSON: "),
            (
                ("workload.trajectories=nope.jsonl",),
                "workload.trajectories: nope.jsonl: no such file; want a file of trajectories",
            ),
            (("workload.trajectories=p.toml",), "workload.trajectories: p.toml: line 1: not JSON: "),
            (
                ('workload.trajectories="a\\u0000b"',),
                "workload.trajectories: 'a\\x00b': cannot be read: embedded null byte",
            ),
            (
                ("rollout.max_context_tokens=1000", "sampling.max_new_tokens=1"),
                "rollout.max_context_tokens: got 1000, want >= 13738 (the first turn of workload.prior swe, mean)",
            ),
            (("--serving", "x"), "--serving: got 'x', want e.g. `2C`"),
            (("--serving", "2P@tp2"), "--serving: got '2P@tp2', which has no decode (D) worker"),
            (("--serving", "2C@tp2+1C"), "--serving: got 2C@tp2+1C with tp 1, want fleet.tp = [2]"),
            (
                ("--serving", "9C@tp2"),
                "--serving: got 9C@tp2, which does not fit the dedicated GPUs of the recipe: wants 18 GPUs, there are 16",
            ),
            (("--serving", "9" * 5000 + "C"), "--serving: got '999"),
            (("platform.max_sequences=1" + "0" * 400,), "command line: platform.max_sequences: got 1000"),
            (("rollout.groups_per_batch=1" + "0" * 400,), "command line: rollout.groups_per_batch: got 1000"),
            (("platform.start_s=1e308",), "command line: platform.start_s: got 1e+308, want a number 0..86400"),
        ],
    )
    def test_one_clear_line(self, arguments: tuple[str, ...], message: str) -> None:
        error = refused(*arguments)
        assert error.startswith(message)
        assert error.count("\n") == 1

    def test_a_shape_is_read_before_anything_is_done(self) -> None:
        assert refused("--serving", "x", "workload.trajectories=nope.jsonl").startswith("--serving: ")

    def test_profiles_of_two_models(self) -> None:
        for name, prior in (("a.json", "qwen3-8b-h100"), ("b.json", "qwen3-30b-a3b-h100")):
            Path(name).write_text(platform_prior(prior).by_tp[1 if name == "a.json" else 2].to_json())
        error = refused('platform.profiles=["a.json", "b.json"]')
        assert error == "platform.profiles: model_hash: got prior-qwen3-8b and prior-qwen3-30b-a3b, want one\n"

    def test_no_recipe(self) -> None:
        result = CliRunner().invoke(app, ["plan", "explain", "run.seed=1"])
        assert result.exit_code == 2
        assert result.stderr.startswith("command line: no recipe; want at least one")


def test_profiles_take_the_place_of_a_prior() -> None:
    """The profile of a prior, read from a file, gives what the prior gives, but for the costs of changes."""
    costs = platform_prior("qwen3-8b-h100").costs
    Path("a.json").write_text(silicon_profiles("qwen3-8b", "h100", (2,))[2].to_json())
    set_costs = [f"platform.{name}={getattr(costs, name)}" for name in costs.__slots__]
    assert document('platform.profiles=["a.json"]', *set_costs) == document()
