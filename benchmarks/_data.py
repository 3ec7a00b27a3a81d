"""Recorded data for benchmarks where it is at hand, else made-up data, labelled so.

The folder is that of `--data`, else of the environment variable `PEARL_DATA`, else `../shared/data` beside the project. What is
asked for must be there; what lies beside the project may be absent, as a whole or file by file.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pearl.core.priors import WORKLOAD_PRIORS, workload_prior
from pearl.errors import ProfileError
from pearl.report.trajectories import read_recording
from pearl.sim.availability import Availability, recorded_availability, synthetic_availability
from pearl.sim.presets import preset
from pearl.sim.recorded import RecordedWorkload
from pearl.sim.script import Script
from pearl.sim.workload import Workload

BESIDE = Path(__file__).resolve().parents[2] / "shared" / "data"
SYNTHETIC = "synthetic"

_RECORDINGS: Mapping[str, str] = {
    "swe": "swe_claudecode_glm47flash",
    "tau": "tau_airline_gpt4o",
    "webshop": "webshop_react",
}
"""Preset -> the recording that it stands for."""
_TRACES: Mapping[str, Mapping[str, float]] = {
    "bamboo_s1_2h": {"length_s": 7200, "most_gpus": 12, "mean_gpus": 9.72, "changes_per_h": 9.5, "step_gpus": 2},
    "bamboo_s2_2h": {"length_s": 7200, "most_gpus": 12, "mean_gpus": 5.02, "changes_per_h": 11.5, "step_gpus": 2},
    "bamboo_s3_2h": {"length_s": 7200, "most_gpus": 12, "mean_gpus": 7.73, "changes_per_h": 5.5, "step_gpus": 2},
}
"""Trace -> what a made-up one has in common with it: ends, mean, changes per hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Something to simulate with, and where it came from."""

    label: str
    """`recorded: FILE` or `synthetic: ...`: for the settings that a report prints."""

    @property
    def recorded(self) -> bool:
        return not self.label.startswith(SYNTHETIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundWorkload(Found):
    workload: Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundTrace(Found):
    trace: Availability


@dataclass(frozen=True, slots=True, kw_only=True)
class Data:
    """The folder of recorded data, where there is one."""

    folder: Path | None
    label: str
    """The folder, or `synthetic`."""

    def workload(self, name: str, *, seed: int) -> FoundWorkload:
        """The recording behind a preset; the preset itself where it is not at hand, or there is none.

        Raises:
            ProfileError: no such preset, or a recording that cannot be played.
        """
        if name not in WORKLOAD_PRIORS:
            raise ProfileError(f"workload: got {name!r}, want one of {', '.join(WORKLOAD_PRIORS)}")
        path = self.recording(name)
        if path is None:
            return FoundWorkload(workload=preset(name, seed=seed), label=f"{SYNTHETIC}: preset {name}")
        recorded = RecordedWorkload(
            read_recording(path), seed=seed, env_s=workload_prior(name).env_s, env_source=f"the prior {name}"
        )
        return FoundWorkload(workload=recorded, label=f"recorded: {path.name} (waits {recorded.waits})")

    def recording(self, name: str) -> Path | None:
        """The file behind a preset; None: there is none, or it is not at hand."""
        return self._file("workloads", f"{_RECORDINGS[name]}.jsonl") if name in _RECORDINGS else None

    def availability(self, name: str, *, seed: int) -> FoundTrace:
        """A recorded trace by its name; one with the same mean and changes where it is not at hand.

        Raises:
            ProfileError: neither a file of that name nor a made-up trace for it, or a file that is no trace.
        """
        path = self._file("availability", f"{name}.csv") if re.fullmatch(r"\w+", name) else None
        if path is not None:
            return FoundTrace(trace=recorded_availability(path), label=f"recorded: {path.name}")
        if name not in _TRACES:
            raise ProfileError(f"availability: got {name!r} in {self.label}, want one of {', '.join(_TRACES)}")
        trace = synthetic_availability(seed=seed, **_TRACES[name])  # type: ignore[arg-type]
        return FoundTrace(trace=trace, label=f"{SYNTHETIC}: like {name}")

    def _file(self, kind: str, name: str) -> Path | None:
        path = self.folder / kind / name if self.folder is not None else None
        return path if path is not None and path.exists() else None


def write_trace(trace: Availability, path: Path) -> Path:
    """A file for `simulation.availability`."""
    rows = "".join(f"{at_s:.3f},{gpus}\n" for at_s, gpus in trace)
    path.write_text(f"time_s,gpus\n{rows}", encoding="utf-8")
    return path


def write_trajectories(scripts: Iterable[tuple[str | None, Script]], path: Path) -> Path:
    """A file for `workload.trajectories`: each with its task, where that is known."""
    with path.open("w", encoding="utf-8") as file:
        for number, (task, script) in enumerate(scripts):
            turns = [
                {"input_tokens": turn.input_tokens, "output_tokens": turn.output_tokens, "env_s": round(turn.env_s, 3)}
                for turn in script.turns
            ]
            group = {} if task is None else {"group": task}
            file.write(json.dumps({"id": str(number), **group, "turns": turns}) + "\n")
    return path


def add_data_argument(parser: argparse.ArgumentParser) -> None:
    """`--data FOLDER`."""
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FOLDER",
        help="recorded workloads and traces; else PEARL_DATA, else ../shared/data where present, else made-up ones",
    )


def find_data(given: Path | None) -> Data:
    """The folder of `--data`, else of `PEARL_DATA`, else beside the project, else none.

    Raises:
        ProfileError: one was asked for that is no folder.
    """
    variable = os.environ.get("PEARL_DATA", "")
    asked = given if given is not None else Path(variable) if variable else None
    if asked is not None and not asked.is_dir():
        source = "--data" if given is not None else "PEARL_DATA"
        raise ProfileError(f"{source}: got {asked}, which is no folder; want one with workloads/ and availability/")
    folder = asked if asked is not None else BESIDE if BESIDE.is_dir() else None
    return Data(folder=folder, label=str(folder) if folder is not None else SYNTHETIC)
