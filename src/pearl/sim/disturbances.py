"""What goes wrong in a simulated run, as `[faults]` of its recipe says: a schedule from a file, and faults that are drawn.

A drawn fault of workers hits one of those that are up at its time; a fault of a schedule hits the slot that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pearl.config.simulation import FaultsConfig
from pearl.errors import ProfileError
from pearl.records.ids import WorkerId
from pearl.sim.faults import Fault, FaultKind, FaultRates, drawn_faults, faults_from_json
from pearl.sim.fleet import SimFleet
from pearl.text_file import Unreadable, read_text
from pearl.units import MIB

HORIZON_S = 7 * 86_400.0
"""For which faults are drawn where a run has no `simulation.duration_s`."""
_LONGEST_BYTES = 16 * MIB
_ANY = 1 << 30
"""Numbers that drawn faults name workers by: so many that two faults never name the same."""
_ENVIRONMENTS = (FaultKind.ENV_RAISE, FaultKind.ENV_HANG, FaultKind.ENV_LOST, FaultKind.ENV_NONSENSE)


def scheduled_faults(config: FaultsConfig) -> tuple[Fault, ...]:
    """Those of `faults.schedule`, in order of time.

    Raises:
        ProfileError: the file is missing, cannot be read, or is no list of faults: the message names file and entry.
    """
    path = config.schedule
    if path is None:
        return ()
    try:
        return faults_from_json(_text(path))
    except ProfileError as error:
        raise ProfileError(f"faults.schedule: {path}: {str(error).removeprefix('faults: ')}") from None


def _text(path: Path) -> str:
    try:
        return read_text(path, most_bytes=_LONGEST_BYTES)
    except Unreadable as error:
        raise ProfileError(f"faults.schedule: {error}; want a list of faults (JSON)") from None


def random_faults(config: FaultsConfig, *, seed: int, duration_s: float | None) -> tuple[Fault, ...]:
    """Those that are drawn, in order of time."""
    per_hour: Mapping[FaultKind, float] = {
        FaultKind.KILL: config.kills_per_h,
        FaultKind.HANG: config.hangs_per_h,
        FaultKind.SLOW: config.slow_per_h,
        FaultKind.FAIL_START: config.failed_starts_per_h,
        **dict.fromkeys(_ENVIRONMENTS, config.environment_faults_per_h),
    }
    rates = FaultRates(per_hour=per_hour, workers=_ANY, mean_s=config.mean_s, slowest=config.slowest)
    return drawn_faults(seed, HORIZON_S if duration_s is None else duration_s, rates)


@dataclass(slots=True)
class AnyWorker:
    """A fleet in which any number names a worker that is up: a `FaultyFleet`."""

    fleet: SimFleet
    _hit: dict[WorkerId, WorkerId] = field(default_factory=dict)
    """Number -> whom it named."""

    def engine(self, number: WorkerId) -> object:
        """Name a worker.

        Raises:
            WorkerLost: none is up.
        """
        up = sorted(self.fleet.engines)
        worker = up[number % len(up)] if up else number
        self._hit[number] = worker
        return self.fleet.engine(worker)

    def kill(self, number: WorkerId) -> None:
        """End its process."""
        self.fleet.kill(self._hit.pop(number, number))

    def hang(self, number: WorkerId) -> None:
        """Let it answer nobody."""
        self.fleet.hang(self._hit[number])

    def unhang(self, number: WorkerId) -> None:
        """Let it go on."""
        self.fleet.unhang(self._hit.pop(number, number))

    def slow(self, number: WorkerId, factor: float) -> None:
        """Let it take so many times as long as at its start."""
        self.fleet.slow(self._hit.get(number, number), factor)

    def fail_next_start(self, number: WorkerId) -> None:
        """Let the next start fail, whoever's."""
        self._hit.pop(number, None)
        self.fleet.fail_any_start()
