"""`pearl profile`: what it writes, shows and refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from pearl.cli import profile as profile_command
from pearl.cli import train as train_command
from pearl.cli.main import app
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile, parse_profile
from pearl.errors import ConfigError

PROFILE = PlatformProfile(
    model="tiny",
    model_hash="abc",
    device="some device",
    dtype="bfloat16",
    tp=1,
    iterations=IterationTimes(
        prefill_tokens=(0, 2048),
        decoding=(0, 1, 64),
        context_tokens=(64, 1024),
        cells_s=(((0.001, 0.001), (0.001, 0.0025), (0.01, 0.00005)), ((1.5, 1.25), (2.0, 2.0), (3.0, 3.0))),
    ),
    kv_capacity_tokens=2_097_152,
    kv_bytes_per_token=512,
    hand_off=HandOff(fixed_s=0.0125, s_per_byte=1 / 2**31),
    weight_load_s=0.2,
    sleep_s=0.03,
    wake_s=0.0,
    engine_start_s=72.0,
)


def pearl_command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["profile", *arguments])


class Measurer:
    """Stands in for what measures."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.error: BaseException | None = None

    def measure_profile(self, request: Any, tell: Any) -> PlatformProfile:
        self.requests.append(request)
        tell("model", "reading it")
        if self.error is not None:
            raise self.error
        return PROFILE


@pytest.fixture
def measurer(monkeypatch: pytest.MonkeyPatch) -> Measurer:
    from pearl.cluster.profile import ProfileRequest

    measurer = Measurer()
    module = ModuleType("pearl.cluster.profile")
    module.measure_profile = measurer.measure_profile  # type: ignore[attr-defined]
    module.ProfileRequest = ProfileRequest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pearl.cluster.profile", module)
    return measurer


def files() -> set[str]:
    return {path.name for path in Path().iterdir()} - {"x.toml"}


def test_what_is_shown_and_written(measurer: Measurer) -> None:
    result = pearl_command("models/tiny", "--out", "p.json")
    assert result.exit_code == 0, result.output
    assert result.stdout == (
        "model        reading it\n"
        "\n"
        "profile      p.json\n"
        "\n"
        "model        tiny, architecture abc\n"
        "device       some device, bfloat16, tp 1\n"
        "kv           512 B per token, 2,097,152 tokens in 1.0 GiB\n"
        "hand-off     0.0125 s and 2.0 GiB per second\n"
        "weights      loaded in 0.2 s\n"
        "engine       starts in 1 min 12 s\n"
        "             sleeps in 0.03 s, wakes in 0 s\n"
        "\n"
        "seconds per iteration  context 64  context 1,024\n"
        "decode 1                  0.001 s       0.0025 s\n"
        "decode 64                  0.01 s     0.000050 s\n"
        "prefill 2,048               1.5 s         1.25 s\n"
    )
    assert files() == {"p.json"}
    assert parse_profile(Path("p.json").read_text()) == PROFILE


def test_options(measurer: Measurer) -> None:
    pearl_command("m", "--device", "cpu", "--dtype", "bfloat16", "--quick", "--max-context", "128")
    pearl_command("m", "--max-sequences", "7", "--kv-gib", "0.5")
    first, second = measurer.requests
    assert (first.model, first.device, first.dtype, first.quick) == (Path("m"), "cpu", "bfloat16", True)
    assert (first.max_context_tokens, first.max_sequences, first.kv_bytes) == (128, 64, 0)
    assert (second.device, second.dtype, second.quick) == ("auto", "float32", False)
    assert (second.max_context_tokens, second.max_sequences, second.kv_bytes) == (None, 7, 2**29)


def test_by_default_the_file_is_named_after_the_model(measurer: Measurer) -> None:
    pearl_command("some/where/tiny/")
    assert files() == {"tiny.profile.json"}


def test_parts_that_were_not_measured(measurer: Measurer) -> None:
    text = profile_command.render_profile(replace(PROFILE, hand_off=None, engine_start_s=None), Path("p"))
    assert "hand-off     not measured\n" in text
    assert "engine       start not measured\n" in text
    flat = profile_command.render_profile(replace(PROFILE, hand_off=HandOff(fixed_s=1.0, s_per_byte=0.0)), Path("p"))
    assert "hand-off     1 s, whatever the size\n" in flat


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--out", "none/p.json"],
        ["m", "--out", "."],
        ["m", "--out", "x.toml/p.json"],
        ["m", "--kv-gib", "0"],
        ["m", "--kv-gib", "nan"],
        ["m", "--max-context", "1"],
        ["m", "--max-sequences", "0"],
        [],
    ],
)
def test_mistakes_are_found_before_anything_is_measured(measurer: Measurer, arguments: list[str]) -> None:
    result = pearl_command(*arguments)
    assert result.exit_code == 2
    assert result.stderr
    assert (measurer.requests, files()) == ([], set())


def test_a_place_that_cannot_be_written_is_named(measurer: Measurer) -> None:
    assert pearl_command("m", "--out", "none/p.json").stderr == (
        "--out: none/p.json: cannot be written: No such file or directory; want a file in a folder that exists\n"
    )


def test_a_pipe_is_not_replaced(measurer: Measurer) -> None:
    os.mkfifo("pipe")
    assert pearl_command("m", "--out", "pipe").stderr == (
        "--out: pipe: cannot be written: is no regular file; want a file in a folder that exists\n"
    )
    assert (measurer.requests, Path("pipe").is_fifo()) == ([], True)


@pytest.mark.parametrize("error", [ConfigError("--max-context: got 9"), KeyboardInterrupt()])
def test_an_earlier_profile_stays_when_measuring_fails(measurer: Measurer, error: BaseException) -> None:
    Path("p.json").write_text("before")
    measurer.error = error
    result = pearl_command("m", "--out", "p.json")
    assert result.exit_code == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert (files(), Path("p.json").read_text()) == ({"p.json"}, "before")


def test_a_disk_that_fills_leaves_what_was_there(measurer: Measurer, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("p.json").write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profile_command.os, "fsync", full)
    result = pearl_command("m", "--out", "p.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("--out: p.json: cannot be written: No space left on device; ")
    assert (files(), Path("p.json").read_text()) == ({"p.json"}, "before")


@pytest.mark.parametrize(("missing", "status"), [("torch", 2), ("ray", 0)])
def test_only_ray_may_be_missing(
    measurer: Measurer, monkeypatch: pytest.MonkeyPatch, missing: str, status: int
) -> None:
    monkeypatch.setattr(train_command, "find_spec", lambda name: None if name == missing else object())
    result = pearl_command("m")
    assert result.exit_code == status
    if status:
        assert result.stderr == (
            "profile: torch not installed; install the train extra: pip install 'pearl-rl[train]'\n"
        )


def test_what_may_be_missing_is_not_imported() -> None:
    code = (
        "import sys\n"
        f"for name in {profile_command._NOT_NEEDED!r}:\n    sys.modules[name] = None\n"
        "import pearl.cluster.profile as profile\n"
        "print(profile.find_spec('ray'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


def test_a_tiny_model(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pearl.cluster import profile as measuring

    monkeypatch.setattr(measuring, "find_spec", lambda name: None)
    result = pearl_command(
        str(tiny_model), "--quick", "--device", "cpu", "--max-context", "16", "--max-sequences", "2", "--out", "p.json"
    )
    assert result.exit_code == 0, result.output
    profile = parse_profile(Path("p.json").read_text())
    assert profile.iterations.seconds(8, 1, 10) > 0
    assert "processes    left out: Ray is not installed" in result.stdout


def test_no_model(tmp_path: Path) -> None:
    result = pearl_command("none", "--out", "p.json")
    assert result.exit_code == 2
    assert result.stderr.startswith("none: no such folder")
    assert files() == set()
