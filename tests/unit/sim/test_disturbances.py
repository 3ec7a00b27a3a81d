"""Faults of a recipe."""

from __future__ import annotations

from pathlib import Path

import pytest

from pearl.config.simulation import FaultsConfig
from pearl.errors import ProfileError, WorkerLost
from pearl.records.ids import WorkerId
from pearl.sim.disturbances import HORIZON_S, AnyWorker, random_faults, scheduled_faults
from pearl.sim.faults import Fault, FaultKind


class Fleet:
    """Notes what is done to whom."""

    def __init__(self, *up: int) -> None:
        self.engines = {WorkerId(slot): object() for slot in up}
        self.done: list[tuple[object, ...]] = []

    def engine(self, worker: WorkerId) -> object:
        if worker not in self.engines:
            raise WorkerLost("no")
        return self.engines[worker]

    def kill(self, worker: WorkerId) -> None:
        self.done.append(("kill", worker))

    def hang(self, worker: WorkerId) -> None:
        self.done.append(("hang", worker))

    def unhang(self, worker: WorkerId) -> None:
        self.done.append(("unhang", worker))

    def slow(self, worker: WorkerId, factor: float) -> None:
        self.done.append(("slow", worker, factor))

    def fail_any_start(self) -> None:
        self.done.append(("fail",))


def test_a_number_names_a_worker_that_is_up_and_keeps_naming_it() -> None:
    fleet = Fleet(7, 2, 5)
    any_worker = AnyWorker(fleet)  # type: ignore[arg-type]
    number = WorkerId(3 * 1000 + 1)  # the second in order of slots
    any_worker.engine(number)
    any_worker.hang(number)
    del fleet.engines[WorkerId(2)]
    any_worker.unhang(number)
    any_worker.engine(WorkerId(3))  # of 5 and 7
    any_worker.kill(WorkerId(3))
    any_worker.fail_next_start(WorkerId(9))
    assert fleet.done == [("hang", 5), ("unhang", 5), ("kill", 7), ("fail",)]


def test_nobody_is_up() -> None:
    with pytest.raises(WorkerLost):
        AnyWorker(Fleet()).engine(WorkerId(4))  # type: ignore[arg-type]


def test_drawn_faults_are_as_many_as_asked_for_and_follow_the_seed() -> None:
    config = FaultsConfig(kills_per_h=50, environment_faults_per_h=10)
    one, again, other = (random_faults(config, seed=seed, duration_s=36_000.0) for seed in (0, 0, 1))
    assert one == again != other
    kills = [fault for fault in one if fault.kind is FaultKind.KILL]
    assert 400 < len(kills) < 600  # 500, 4.5 standard deviations
    kinds = {fault.kind for fault in one}
    assert kinds == {
        *(FaultKind.KILL, FaultKind.ENV_RAISE, FaultKind.ENV_HANG),
        *(FaultKind.ENV_LOST, FaultKind.ENV_NONSENSE),
    }
    assert all(fault.at_s < 36_000.0 for fault in one)
    assert random_faults(FaultsConfig(), seed=0, duration_s=None) == ()
    assert random_faults(FaultsConfig(hangs_per_h=1), seed=0, duration_s=None)[-1].at_s < HORIZON_S


def test_a_schedule_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "faults.json"
    path.write_text('[{"at_s": 9, "kind": "kill", "worker": 2}, {"at_s": 1, "kind": "hang", "seconds": 3}]')
    assert scheduled_faults(FaultsConfig(schedule=path)) == (
        Fault(at_s=1, kind=FaultKind.HANG, seconds=3),
        Fault(at_s=9, kind=FaultKind.KILL, worker=2),
    )
    assert scheduled_faults(FaultsConfig()) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "faults.json: no such file"),
        ("{", "faults.json: no JSON"),
        ("{}", "got dict, want a list"),
        ('[{"at_s": -1, "kind": "kill"}]', r"entry 0: fault kill: at_s: got -1, want a finite number >= 0"),
        ('[{"at_s": 1, "kind": "kil"}]', r"entry 0: kind: got 'kil', want one of"),
        ('[{"at_s": 1}]', r"entry 0: got \{'at_s': 1\}, want at_s, kind"),
    ],
)
def test_a_schedule_that_is_none(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "faults.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ProfileError, match=f"faults.schedule: .*{message}"):
        scheduled_faults(FaultsConfig(schedule=path))
