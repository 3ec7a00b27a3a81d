"""What `pearl doctor` finds and advises."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pearl.cli import doctor
from pearl.cli.doctor import Finding, Level, examine, gpu_finding, is_healthy, memory_finding, report_text, shm_finding
from pearl.cli.main import app
from pearl.cli.packages import EXTRAS


def test_this_machine_is_examined() -> None:
    names = [finding.name for finding in examine()]
    assert names[:5] == ["pearl", "python", "cores", "memory", "/dev/shm"]
    assert names[5:] == [*EXTRAS["train"], "gpu"]


def test_the_command_succeeds_exactly_when_nothing_essential_is_missing() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    installed = all(find_spec(package) for package in EXTRAS["train"])
    assert result.exit_code == (0 if installed else 1)
    assert re.search(r"^ok +python +3\.\d+", result.stdout, re.MULTILINE)


def test_missing_packages_end_with_status_1_and_one_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    real = doctor.installed_version
    monkeypatch.setattr(doctor, "installed_version", lambda name: None if name in ("torch", "ray") else real(name))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    assert re.search(r"^MISSING +torch +not installed$", result.stdout, re.MULTILINE)
    assert re.search(r"^MISSING +ray +not installed$", result.stdout, re.MULTILINE)
    assert result.stdout.count("pip install 'pearl-rl[train]'") == 1


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.13.0+cpu", Level.FINE),
        ("2.6", Level.FINE),
        ("2.6.0", Level.FINE),
        ("3", Level.FINE),
        ("2.5.1", Level.MISSING),
        ("1.13", Level.MISSING),
        (None, Level.MISSING),
    ],
)
def test_versions_are_compared_as_numbers(version: str | None, level: Level) -> None:
    assert doctor.package_finding("torch", version, "2.6", "train").level is level


def test_an_old_version_says_what_is_wanted() -> None:
    finding = doctor.package_finding("torch", "2.5.1", "2.6", "train")
    assert (finding.value, finding.advice) == (
        "2.5.1, want 2.6 or newer", "the train extra: pip install 'pearl-rl[train]'",
    )  # fmt: skip


GIB = 1 << 30


def test_little_memory_is_a_note() -> None:
    assert memory_finding(4 * GIB).level is Level.FINE
    small = memory_finding(4 * GIB - 1)
    assert (small.level, small.value) == (Level.NOTE, "4.0 GiB")
    assert is_healthy([small])


def test_shared_memory() -> None:
    assert shm_finding(GIB // 2).level is Level.FINE
    assert shm_finding(64 << 20).level is Level.NOTE
    assert "--shm-size" in shm_finding(64 << 20).advice
    assert not is_healthy([shm_finding(None)])


def test_gpus_are_named() -> None:
    assert gpu_finding([]).value.startswith("none")
    assert gpu_finding(["A", "B"]).value == "A, B"


@pytest.mark.parametrize("script", ["#!/bin/sh\necho 'NVIDIA X'\necho 'NVIDIA Y'\n", "#!/bin/sh\nexit 9\n"])
def test_the_driver_is_asked(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert examine()[-1].value == ("NVIDIA X, NVIDIA Y" if "NVIDIA" in script else gpu_finding([]).value)


def test_the_report_is_aligned_and_ends_with_next_steps() -> None:
    findings = [
        Finding(name="a", value="1"),
        Finding(name="long name", value="2", level=Level.MISSING, advice="do this"),
        Finding(name="b", value="3", level=Level.NOTE, advice="do this"),
    ]
    assert report_text(findings) == (
        "ok       a          1\n"
        "MISSING  long name  2\n"
        "note     b          3\n"
        "\n"
        "Next steps:\n"
        "  do this"
    )  # fmt: skip
    assert "Next steps" not in report_text(findings[:1])
