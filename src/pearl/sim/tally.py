"""What a run came to, summed up from its journal as it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pearl.core.state import Activity, FleetState, Gpu, GpuOwner, Role
from pearl.ports import JournalSink
from pearl.records.ids import GpuId
from pearl.records.journal import (
    ChangeEntry,
    ChoiceEntry,
    JournalEntry,
    StateEntry,
    StepEntry,
    TrajectoryEntry,
    TurnEntry,
)

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """GPUs from a time on until the next one."""

    at_s: float
    owned: Counts
    """Owner -> GPUs that the job has."""
    serving: Counts
    """Role -> GPUs of workers that serve, `borrowed` among them counted again; `transition`: of workers in transition."""


@dataclass(slots=True, kw_only=True)
class Tally:
    """A journal sink that sums up what it passes on."""

    sink: JournalSink
    state: Callable[[], FleetState]
    generated_tokens: int = 0
    prompt_tokens: int = 0
    """New to the engines, turn by turn."""
    computed_tokens: int = 0
    """Prompt tokens that went through a forward pass; beyond `prompt_tokens` they were computed again."""
    turns: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """Status -> trajectories."""
    steps: list[StepEntry] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    """Reason -> decisions."""
    changes: Counter[str] = field(default_factory=Counter)
    """Kind of a group of steps -> how often it was done; `failed` where it was not."""
    timeline: list[Moment] = field(default_factory=list)
    _gpus: Mapping[GpuId, Gpu] | None = None
    """Of which `_owned` counts the owners; the next version mostly has the same."""
    _owned: Counter[str] = field(default_factory=Counter)

    def write(self, entry: JournalEntry) -> None:
        """Count an entry, and pass it on."""
        match entry:
            case TurnEntry():
                self.turns += 1
                self.generated_tokens += entry.generated
                self.prompt_tokens += entry.prompt
                self.computed_tokens += entry.computed
            case TrajectoryEntry():
                self.ends[entry.status] += 1
            case StepEntry():
                self.steps.append(entry)
            case ChoiceEntry():
                self.reasons[entry.reason] += 1
            case ChangeEntry():
                for group in entry.groups:
                    if isinstance(group, list):
                        self.changes[str(group[0]) if group[1] else "failed"] += 1
            case StateEntry():
                self._see(entry.at_s)
            case _:
                pass
        self.sink.write(entry)

    async def flush(self) -> None:
        """Of what was passed on."""
        await self.sink.flush()

    def gpu_hours(self, until_s: float) -> dict[str, float]:
        """Owner -> GPU-hours held; `serving`, `borrowed` and `transition`: of what workers had."""
        hours: Counter[str] = Counter()
        ends = [*(moment.at_s for moment in self.timeline[1:]), until_s]
        for moment, end_s in zip(self.timeline, ends, strict=False):
            lasts_h = max(0.0, min(end_s, until_s) - moment.at_s) / 3600
            for name, gpus in moment.owned.items():
                hours[name] += gpus * lasts_h  # type: ignore[assignment]
            for name, gpus in moment.serving.items():
                kind = name if name in ("borrowed", "transition") else "serving"
                hours[kind] += gpus * lasts_h  # type: ignore[assignment]
        return dict(hours)

    def _see(self, at_s: float) -> None:
        state = self.state()
        if self._gpus is not state.gpus:
            self._gpus, self._owned = state.gpus, Counter(gpu.owner.value for gpu in state.gpus.values())
        serving: Counter[str] = Counter()
        for slot, worker in state.workers.items():
            if worker.role is Role.TRAINING or worker.activity is Activity.INACTIVE:
                continue
            gpus = len(worker.gpus)
            if worker.activity is Activity.TRANSITIONING:
                serving["transition"] += gpus
                continue
            serving[worker.role.value] += gpus
            if state.is_overlap(slot):
                serving["borrowed"] += gpus
        if self.timeline and self.timeline[-1].at_s == at_s:
            self.timeline.pop()
        self.timeline.append(Moment(at_s=at_s, owned=dict(self._owned), serving=dict(serving)))


OWNERS = tuple(owner.value for owner in GpuOwner)
