"""TensorBoard event files, without torch or tensorflow."""

from __future__ import annotations

import time
from pathlib import Path

from pearl.report.live import StepReport


class TensorboardReporter:
    """Scalars of every training step, for `tensorboard --logdir RUN/metrics`."""

    def __init__(self, folder: Path) -> None:
        """Open an event file in a folder; one that holds files already is continued."""
        # Imported here: it costs half a second and belongs to the train extra.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._is_continued = any(folder.glob("events.out.tfevents.*"))
        self._writer = EventFileWriter(str(folder), flush_secs=10)
        self._is_open = True

    def stage(self, name: str, text: str) -> None:
        """Nothing to show."""

    def step(self, report: StepReport) -> None:
        """Write all scalars of the step."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        if self._is_continued:
            # Steps after the checkpoint are done again: TensorBoard forgets their first version.
            self._is_continued = False
            start = SessionLog(status=SessionLog.START)
            self._writer.add_event(Event(wall_time=time.time(), step=report.step, session_log=start))
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(report).items()]
        self._writer.add_event(Event(wall_time=time.time(), step=report.step, summary=Summary(value=values)))

    def close(self) -> None:
        """Flush and close the file."""
        if self._is_open:
            self._is_open = False
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
