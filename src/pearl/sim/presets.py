"""Workloads that a recipe names: the presets, and what `[workload]` says.

A preset is the prior of its name (`pearl.core.priors`: every number with its source), drawn with attempts at one task alike.
"""

from __future__ import annotations

from pearl.config.elastic import WorkloadConfig
from pearl.core.priors import workload_prior
from pearl.errors import ProfileError
from pearl.report.trajectories import read_recording
from pearl.sim.generate import Likeness, SyntheticWorkload
from pearl.sim.recorded import RecordedWorkload

ALIKE = Likeness(turns=0.9, generated=0.6, new=0.3)
"""With which the longest of four attempts at a task generates 1.27 times the mean of the four, in the middle of all tasks, as
those of tau-bench do. Fitted to that alone, in steps of 0.05, and within 4 % of it for swe, tau and webshop. `new` is measured
in the same recordings (0.29); measured directly there, `turns` would be 0.58 and `generated` 0.28, and the longest 1.42 times."""


def preset(name: str, *, seed: int) -> SyntheticWorkload:
    """A preset, by the name of its prior.

    Raises:
        ProfileError: no such preset; the message lists them.
    """
    return SyntheticWorkload(workload_prior(name), seed=seed, likeness=ALIKE)


def configured_workload(config: WorkloadConfig, *, seed: int) -> SyntheticWorkload | RecordedWorkload:
    """The trajectories of `[workload]`: recorded ones where it names them, with waits of the prior where none was recorded.

    Raises:
        ProfileError: the recording is missing, damaged, or cannot be played.
    """
    if config.trajectories is None:
        return preset(config.prior, seed=seed)
    try:
        return RecordedWorkload(
            read_recording(config.trajectories),
            seed=seed,
            env_s=workload_prior(config.prior).env_s,
            env_source=f"the prior {config.prior}",
        )
    except ProfileError as error:
        raise ProfileError(f"workload.trajectories: {error}") from None
