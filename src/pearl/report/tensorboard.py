"""TensorBoard event files, without torch or tensorflow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pearl.report.live import StepReport

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

_log = logging.getLogger(__name__)


class TensorboardReporter:
    """Scalars of every training step, for `tensorboard --logdir RUN/metrics`; a run without a step leaves no file."""

    def __init__(self, folder: Path) -> None:
        """Write into a folder; one that holds files already is continued."""
        self._folder = folder
        self._writer: EventFileWriter | None = None
        self._is_over = False

    def stage(self, name: str, text: str) -> None:
        """Nothing to show."""

    def step(self, report: StepReport) -> None:
        """Write all scalars of the step."""
        if self._is_over:
            return
        # Imported here: it costs half a second and belongs to the train extra.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(report).items()]
        with self._unless_it_fails():
            writer = self._writer or self._open(report.step)
            writer.add_event(Event(wall_time=time.time(), step=report.step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None and not self._is_over:
            with self._unless_it_fails():
                self._writer.close()
        self._is_over = True

    def _open(self, step: int) -> EventFileWriter:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        is_continued = any(self._folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(self._folder), flush_secs=10)
        if is_continued:
            # Steps after the checkpoint are done again: TensorBoard forgets their first version.
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=step, session_log=start))
        return self._writer

    @contextlib.contextmanager
    def _unless_it_fails(self) -> Iterator[None]:
        """Curves must not end a run, which has better ways to say that a disk is full."""
        try:
            yield
        except OSError as error:
            self._is_over = True
            _log.warning("%s: curves end here: %s", self._folder, error)
            if self._writer is not None:
                with contextlib.suppress(OSError):
                    self._writer.close()


def scalars(report: StepReport) -> dict[str, float]:
    """Tag -> value of everything worth a curve; a success that is not known has no point."""
    values = {
        "rollout/reward_mean": report.reward_mean,
        "rollout/tokens_per_s": report.tokens_per_s,
        "rollout/in_flight_trajectories": float(report.in_flight_trajectories),
        "rollout/idle_frac": report.rollout_idle_frac,
        "staleness/mean": report.staleness_mean,
        "staleness/max": float(report.staleness_max),
        "staleness/stale_token_frac": report.stale_token_frac,
        "train/idle_frac": report.trainer_idle_frac,
        "train/version": float(report.version),
        "run/elapsed_s": report.elapsed_s,
        "faults/total": float(sum(report.faults.values())),
    }
    if report.success_mean is not None:
        values["rollout/success_mean"] = report.success_mean
    values |= {f"faults/{status}": float(count) for status, count in report.faults.items()}
    values |= {f"train/{name}": value for name, value in report.metrics.items()}
    return values
