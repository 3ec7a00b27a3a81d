"""The runtime tracker: what turns and trajectories of a training step showed, and the profile that follows from it.

Laws:

- the profile moves once per training step, by the turns and trajectories that ended in it, and by what iterations took; nothing
  else is known of the world, in simulation either;
- what is assumed before anything was seen is dropped once `PRIOR_TRAJECTORIES` trajectories have ended within a step, and counts
  as many until then: it is a guess about some work, a step is the work. Its tail would else stand in every slowest trajectory.
  In that step its largest values still say what an outlier is (`pearl.core.workload`);
- what was measured is never dropped for one step, however odd: a step's share is that of its trajectories among all seen, and
  `share` where that is more. So an odd first step is half forgotten with the second of its size, two thirds with the third.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pearl.core.makespan import Profile
from pearl.core.platform import refit_scale
from pearl.core.workload import WorkloadSample, likeness_of, refit_workload
from pearl.elastic.meter import Meter
from pearl.ports import JournalSink
from pearl.records.journal import GroupEntry, JournalEntry, StepEntry, TrajectoryEntry, TurnEntry
from pearl.records.trajectory import TrajectoryStatus

PRIOR_TRAJECTORIES = 8
"""Trajectories that a prior is worth. A choice: half a group of sixteen."""
_WHOLE = frozenset(status.value for status in TrajectoryStatus if status.trainable)


@dataclass(slots=True)
class _Seen:
    turns: list[float] = field(default_factory=list)
    groups: list[list[float]] = field(default_factory=list)
    """Turns of the trajectories of groups that ended."""
    prompt_tokens: list[float] = field(default_factory=list)
    new_tokens: list[float] = field(default_factory=list)
    generated_tokens: list[float] = field(default_factory=list)
    env_s: list[float] = field(default_factory=list)
    generate_s: float = 0.0
    waited_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Tracker:
    """A journal sink that remembers what it passes on, until the next refit."""

    sink: JournalSink
    profile: Profile
    share: float
    """Weight of the newest step in the moving averages, once there were several."""
    meter: Meter | None = None
    """Of the engines; None: iterations take what the platform says."""
    ignored: int = 0
    """Numbers that were no use."""
    known: int = 0
    """Trajectories behind the profile."""
    update_s: float = 0.0
    """What an update takes, publication included: a moving average; 0 before the first one."""
    publish_s: float = 0.0
    """Of that, publishing the weights and loading them into the engines, which stand still for most of it."""
    _seen: _Seen = field(default_factory=_Seen)
    _open: dict[str, list[float]] = field(default_factory=dict)
    """Group that has not ended -> turns of its trajectories that have."""

    def write(self, entry: JournalEntry) -> None:
        """Remember an entry, and pass it on."""
        match entry:
            case TurnEntry():
                self._add(entry)
                if self.meter is not None:
                    self.meter.turn_ended(entry.at_s)
            case TrajectoryEntry() if entry.status in _WHOLE:
                self._seen.turns.append(float(entry.turns))
                self._open.setdefault(entry.group, []).append(float(entry.turns))
            case StepEntry():
                share = self.share if self.update_s else 1.0
                self.update_s += share * (entry.train_s + entry.publish_s - self.update_s)
                self.publish_s += share * (entry.publish_s - self.publish_s)
            case GroupEntry():
                self._seen.groups.append(self._open.pop(entry.group, []))
            case _:
                pass
        self.sink.write(entry)

    async def flush(self) -> None:
        """Of what was passed on."""
        await self.sink.flush()

    def refit(self) -> None:
        """The profile after what was seen since the last time."""
        seen, self._seen = self._seen, _Seen()
        busy_s = seen.generate_s + seen.waited_s
        sample = WorkloadSample(
            turns=seen.turns,
            prompt_tokens=seen.prompt_tokens,
            new_tokens=seen.new_tokens,
            generated_tokens=seen.generated_tokens,
            env_s=seen.env_s,
            decoding_share=seen.generate_s / busy_s if busy_s > 0 else None,
            likeness=likeness_of([group for group in seen.groups if group]),
        )
        count = len(seen.turns)
        known, self.known = self.known, self.known + count
        if known < PRIOR_TRAJECTORIES:
            share = 1.0 if count >= PRIOR_TRAJECTORIES else max(self.share, count / (count + PRIOR_TRAJECTORIES))
        else:
            share = max(self.share, count / (count + known))
        refitted = refit_workload(self.profile.workload, sample, share)
        self.ignored += refitted.ignored
        platform = self.profile.platform
        for tp, ratio in (self.meter.take() if self.meter is not None else {}).items():
            platform = refit_scale(platform, tp, ratio, share)
        self.profile = replace(self.profile, workload=refitted.profile, platform=platform)

    def _add(self, turn: TurnEntry) -> None:
        seen = self._seen
        (seen.new_tokens if turn.turn else seen.prompt_tokens).append(float(turn.prompt))
        seen.generated_tokens.append(float(turn.generated))
        seen.env_s.append(turn.env_s)
        seen.generate_s += turn.generate_s
        seen.waited_s += turn.env_s
