"""What a run came to, summed up from its journal as it is written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pearl.core.state import Activity, FleetState, Gpu, GpuOwner, Role, Worker
from pearl.ports import JournalSink
from pearl.records.ids import GpuId, WorkerId
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
    """Role -> GPUs of workers that serve, `borrowed` among them counted again; `transition`: of workers in transition, `lent`
    those of training among them counted again; `updating`: GPUs that train."""


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
    workers: Counter[str] = field(default_factory=Counter)
    """`started`, `stopped`, `lost` or `withdrawn`; `roles` that were changed; training GPUs' workers `borrowed`, `returned`."""
    is_ending: Callable[[], bool] = lambda: False
    """Whether the run ends its workers: what leaves from then on is no change."""
    timeline: list[Moment] = field(default_factory=list)
    _gpus: Mapping[GpuId, Gpu] | None = None
    """Of which `_owned` counts the owners; the next version mostly has the same."""
    _owned: Counter[str] = field(default_factory=Counter)
    _before: Mapping[WorkerId, Worker] = field(default_factory=dict)
    _just_lost: list[tuple[float, Worker]] = field(default_factory=list)

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
                if not (entry.refused or self.is_ending()):
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
                kind = name if name in NO_ROLES else "serving"
                hours[kind] += gpus * lasts_h  # type: ignore[assignment]
        return dict(hours)

    def _see(self, at_s: float) -> None:
        state = self.state()
        if self._gpus is not state.gpus:
            self._gpus, self._owned = state.gpus, Counter(gpu.owner.value for gpu in state.gpus.values())
        self._count(state, at_s)
        serving: Counter[str] = Counter()
        for slot, worker in state.workers.items():
            if worker.activity is Activity.INACTIVE:
                continue
            gpus = len(worker.gpus)
            if worker.role is Role.TRAINING:
                serving["updating"] += gpus if worker.activity is Activity.ACTIVE else 0
                continue
            is_moving = worker.activity is Activity.TRANSITIONING
            serving["transition" if is_moving else worker.role.value] += gpus
            if state.is_overlap(slot):
                serving["lent" if is_moving else "borrowed"] += gpus
        if self.timeline and self.timeline[-1].at_s == at_s:
            self.timeline.pop()
        self.timeline.append(Moment(at_s=at_s, owned=dict(self._owned), serving=dict(+serving)))

    def _count(self, state: FleetState, at_s: float) -> None:
        before, now = self._before, state.workers
        self._before = now
        for slot, worker in now.items():
            was = before.get(slot)
            if was is worker or worker.role is Role.TRAINING:
                continue
            if was is None:
                self.workers["started"] += not state.is_overlap(slot)
                continue
            self.workers["roles"] += worker.role is not was.role
            if state.is_overlap(slot) and worker.activity is not was.activity:
                self.workers["borrowed"] += worker.activity is Activity.ACTIVE
                self.workers["returned"] += was.activity is Activity.ACTIVE
        self._just_lost = [(lost_s, was) for lost_s, was in self._just_lost if lost_s == at_s]
        for was in [was for _, was in self._just_lost if _is_gone(was, state)]:
            # Its death was told before the reason for it.
            self._just_lost.remove((at_s, was))
            self.workers["lost"] -= 1
            self.workers["withdrawn"] += 1
        for was in [was for slot, was in before.items() if slot not in now]:
            if _is_gone(was, state):
                self.workers["withdrawn"] += 1
            elif was.activity is Activity.ACTIVE:
                # Whoever leaves as planned drains first.
                self.workers["lost"] += 1
                self._just_lost.append((at_s, was))
            else:
                self.workers["stopped"] += 1


def _is_gone(worker: Worker, state: FleetState) -> bool:
    return any(gpu not in state.gpus for gpu in worker.gpus)


NO_ROLES = ("borrowed", "lent", "transition", "updating")
"""What `Moment.serving` counts beside roles."""
OWNERS = tuple(owner.value for owner in GpuOwner)
