"""`pearl doctor`: what this machine offers, without importing anything heavy."""

from __future__ import annotations

import enum
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pearl
from pearl.cli.packages import EXTRAS, pip_command
from pearl.report.run_folder import installed_version
from pearl.units import GIB, MIB, format_bytes

_MIN_PYTHON = (3, 11)
_MIN_MEMORY_BYTES = 4 * GIB
"""Driver, trainer, one rollout worker and one environment process, each with torch or ray loaded, need about this."""
_MIN_SHM_BYTES = 512 * MIB
"""Two versions of a small model and the smallest object store of Ray."""
_SHM = Path("/dev/shm")  # noqa: S108 - only looked at
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_GPU_TIMEOUT_S = 20.0


class Level(enum.Enum):
    """How good a finding is."""

    FINE = "ok"
    NOTE = "note"
    """Works, but look at the advice."""
    MISSING = "MISSING"
    """`pearl train` cannot work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing about this machine."""

    name: str
    value: str
    level: Level = Level.FINE
    advice: str = ""
    """The next step, when the level is not FINE."""


def examine() -> tuple[Finding, ...]:
    """Look at everything, in the order in which it is shown."""
    return (
        Finding(name="pearl", value=pearl.__version__),
        _python(sys.version_info[:2]),
        Finding(name="cores", value=str(len(os.sched_getaffinity(0)))),
        memory_finding(_memory_bytes()),
        shm_finding(shutil.disk_usage(_SHM).free if _SHM.is_dir() else None),
        *(
            package_finding(package, installed_version(package), minimum, "train")
            for package, minimum in EXTRAS["train"].items()
        ),
        gpu_finding(_gpus()),
    )


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether `pearl train` can work here."""
    return all(finding.level is not Level.MISSING for finding in findings)


def report_text(findings: Sequence[Finding]) -> str:
    """The findings, aligned, then the next steps, each once."""
    names = max(len(finding.name) for finding in findings)
    levels = max(len(level.value) for level in Level)
    lines = [f"{finding.level.value:<{levels}}  {finding.name:<{names}}  {finding.value}" for finding in findings]
    steps = dict.fromkeys(finding.advice for finding in findings if finding.advice)
    if steps:
        lines += ["", "Next steps:", *(f"  {step}" for step in steps)]
    return "\n".join(lines)


def memory_finding(size_bytes: int) -> Finding:
    """Memory that this process may use."""
    small = size_bytes < _MIN_MEMORY_BYTES
    return Finding(
        name="memory",
        value=format_bytes(size_bytes),
        level=Level.NOTE if small else Level.FINE,
        advice=f"memory: give at least {format_bytes(_MIN_MEMORY_BYTES)}, or use a tiny model and one worker"
        if small
        else "",
    )


def shm_finding(free_bytes: int | None) -> Finding:
    """Free shared memory, through which weights and Ray objects go; None where there is no /dev/shm."""
    if free_bytes is None:
        return Finding(
            name=str(_SHM),
            value="not there",
            level=Level.MISSING,
            advice=f"{_SHM}: pearl needs shared memory; use Linux, or mount a tmpfs there",
        )
    small = free_bytes < _MIN_SHM_BYTES
    return Finding(
        name=str(_SHM),
        value=f"{format_bytes(free_bytes)} free",
        level=Level.NOTE if small else Level.FINE,
        advice=f"{_SHM}: want at least {format_bytes(_MIN_SHM_BYTES)} free; in a container: --shm-size=2g"
        if small
        else "",
    )


def package_finding(package: str, version: str | None, minimum: str, extra: str) -> Finding:
    """A package of an extra; version None when it is not installed."""
    advice = f"the {extra} extra: {pip_command(extra)}"
    if version is None:
        return Finding(name=package, value="not installed", level=Level.MISSING, advice=advice)
    if _numbers(version) < _numbers(minimum):
        value = f"{version}, want {minimum} or newer"
        return Finding(name=package, value=value, level=Level.MISSING, advice=advice)
    return Finding(name=package, value=version)


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); enough to compare releases."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def gpu_finding(gpus: Sequence[str]) -> Finding:
    """GPUs by name; pearl also works without."""
    return Finding(name="gpu", value=", ".join(gpus) if gpus else "none (everything runs on the CPU)")


def _python(version: tuple[int, ...]) -> Finding:
    old = version < _MIN_PYTHON
    want = ".".join(map(str, _MIN_PYTHON))
    return Finding(
        name="python",
        value=platform.python_version(),
        level=Level.MISSING if old else Level.FINE,
        advice=f"python: want {want} or newer" if old else "",
    )


def _memory_bytes() -> int:
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        return min(physical, int(_CGROUP_LIMIT.read_text()))
    except (OSError, ValueError):
        return physical  # No limit: no such file, or the word `max`.


def _gpus() -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        listing = subprocess.run(  # noqa: S603 - fixed arguments
            [program, "--query-gpu=name", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_GPU_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in listing.stdout.splitlines() if line.strip()]
