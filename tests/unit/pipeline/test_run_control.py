"""What a run promises whoever shapes its fleet."""

from __future__ import annotations

import pytest

from pearl.core.state import GpusJoined, Role, WorkerAdded
from pearl.errors import RunFailed, TrainingError
from pearl.pipeline.run import FleetContext
from pearl.ports import JournalSink, WorkerSpec
from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.training import Manifest
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import FakeWorld, fake_gpus, fake_recipe
from tests.unit.pipeline._run import ENGINE, quick


class OneWorker:
    """Starts one worker, and notes what it is told."""

    def __init__(self, fails: bool = False) -> None:
        self.told: list[object] = []
        self.fails = fails
        self.context: FleetContext | None = None

    def journal(self, sink: JournalSink) -> JournalSink:
        self.told.append("journal")
        return sink

    async def start(self, context: FleetContext, manifest: Manifest) -> None:
        self.told.append(("start", manifest.version))
        self.context = context
        if self.fails:
            raise RunFailed("no GPUs")
        workers, gpus = context.workers, fake_gpus(1)
        workers.begin(manifest)
        workers.state.submit(GpusJoined(gpus=gpus))
        workers.state.submit(WorkerAdded(worker=WorkerId(0), gpus=(gpus[0].id,), role=Role.COLOCATED))
        spec = WorkerSpec(worker=WorkerId(0), gpus=(gpus[0].id,), role=Role.COLOCATED)
        await workers.fleet.start([spec], 10.0)
        assert await workers.admit({WorkerId(0): Role.COLOCATED}) is None

    async def training_begin(self, version: WeightVersion) -> None:
        self.told.append(("begin", version))

    async def training_finished(self, version: WeightVersion) -> None:
        self.told.append(("finished", version))

    async def stop(self) -> None:
        assert self.context is None or self.context.workers.router.workers or self.fails  # before they are ended
        self.told.append("stop")

    async def leave(self) -> None:
        assert self.context is None or not self.context.workers.router.workers
        self.told.append("leave")


def world(control: OneWorker) -> FakeWorld:
    return FakeWorld(fake_recipe(run={"steps": 2}), engine=ENGINE, script=quick, control=control)


def test_it_is_called_in_this_order() -> None:
    control = OneWorker()
    one = world(control)
    run_virtual(one.run())
    one.check_ledger()
    assert control.told == [
        "journal",
        ("start", 0),
        ("begin", 0),
        ("finished", 1),
        ("begin", 1),
        ("finished", 2),
        "stop",
        "leave",
    ]
    assert control.context is not None
    assert control.context.progress().batch_trajectories == 4


def test_it_is_stopped_when_it_could_not_start() -> None:
    control = OneWorker(fails=True)
    one = world(control)
    with pytest.raises(RunFailed, match="no GPUs"):
        run_virtual(one.run())
    one.check_ledger()
    assert control.told == ["journal", ("start", 0), "stop", "leave"]


def test_it_is_stopped_when_the_run_fails() -> None:
    control = OneWorker()
    one = world(control)
    one.trainer.fail_next()
    with pytest.raises(TrainingError):
        run_virtual(one.run())
    one.check_ledger()
    assert control.told[-3:] == [("begin", 0), "stop", "leave"]
