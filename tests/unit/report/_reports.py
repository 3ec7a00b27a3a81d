"""A step's report, and a terminal to show it on."""

import errno
import io

from pearl.report.live import StepReport

REPORT = StepReport(
    step=7,
    version=7,
    elapsed_s=125.0,
    reward_mean=0.5312,
    success_mean=0.4375,
    tokens_per_s=1234.4,
    staleness_mean=0.618,
    staleness_max=1,
    stale_token_frac=0.612,
    trainer_idle_frac=0.124,
    rollout_idle_frac=1.0,
    in_flight_trajectories=128,
    faults={},
    metrics={"loss": -0.0123, "entropy": 0.81},
)


class Terminal(io.StringIO):
    """A terminal that can go away."""

    is_gone = False

    def write(self, text: str) -> int:
        if self.is_gone:
            raise OSError(errno.EIO, "Input/output error")
        return super().write(text)
