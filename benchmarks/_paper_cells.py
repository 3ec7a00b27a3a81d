"""One simulated run of the paper's setting: a cell in, figures out."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks._cells import SETTING, Cell, Result
from benchmarks._data import Data, find_data, write_trace, write_trajectories
from benchmarks._paper_world import Fitted, fitted, scripts_of, trajectories_of
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.records.journal import ChoiceEntry, JournalEntry, StepEntry, TurnEntry
from pearl.sim.simulate import simulate

TRACES = ("bamboo_s1_2h", "bamboo_s2_2h", "bamboo_s3_2h")
GROUP_SIZE = 16
RESERVED, EXTERNAL, TRAINING = 4, 12, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperCell:
    """A setting, a policy and a seed."""

    model: str
    policy: str
    seed: int
    workload: str = "section3"
    """Or the name of a preset whose recording is played."""
    trace: str = ""
    """Of external GPUs beside `RESERVED`; empty: `gpus` reserved ones, and none from outside."""
    gpus: int = RESERVED
    training: int = TRAINING
    batch: int = 64
    context: int = 32768
    staleness: int = 1
    shape: str = ""
    tp: tuple[int, ...] = (2,)
    steps: int = 1000
    duration_s: float = 0
    """0: until `steps`."""
    data: str = ""

    @property
    def cell(self) -> Cell:
        return {**asdict(self), "tp": list(self.tp)}


@dataclass(slots=True)
class _Watch:
    """A journal sink that keeps what is reported."""

    steps: list[StepEntry] = field(default_factory=list)
    choices: list[ChoiceEntry] = field(default_factory=list)
    flight_s: dict[str, float] = field(default_factory=dict)
    """Trajectory -> seconds of its turns."""

    def write(self, entry: JournalEntry) -> None:
        if isinstance(entry, StepEntry):
            self.steps.append(entry)
        elif isinstance(entry, ChoiceEntry):
            self.choices.append(entry)
        elif isinstance(entry, TurnEntry):
            taken_s = self.flight_s.get(entry.trajectory, 0.0)
            self.flight_s[entry.trajectory] = taken_s + entry.generate_s + entry.env_s

    async def flush(self) -> None:
        pass


def run_cell(cell: Cell) -> Result:
    """Play it."""
    logging.getLogger("pearl").setLevel(logging.ERROR)  # workers that leave are what this is about
    wanted = PaperCell(**{**cell, "tp": tuple(cell["tp"])})
    watch = _Watch()
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(_recipe(wanted, Path(folder)), watch)
    ends = [step.at_s for step in watch.steps]
    later = watch.steps[1:] or watch.steps
    tally = run.tally
    return {
        "tokens_per_s": run.tokens_per_s,
        "seconds": run.seconds,
        "steps": len(ends),
        "step_s": (ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None,
        "wait_s": sum(step.wait_s for step in later) / len(later) if later else None,
        "train_s": sum(step.train_s for step in later) / len(later) if later else None,
        "flight_s": sum(watch.flight_s.values()) / max(1, len(watch.flight_s)),
        "turns": tally.turns,
        "generated": tally.generated_tokens,
        "prompt": tally.prompt_tokens,
        "computed": tally.computed_tokens,
        "trajectories": dict(tally.ends),
        "trained": run.trained_tokens,
        "hours": tally.gpu_hours(run.seconds),
        "changes": dict(tally.changes),
        "shapes": _shapes(watch.choices, borrowed=False),
        "shapes_borrowed": _shapes(watch.choices, borrowed=True),
        "stalls": len(run.stalls),
    }


def _shapes(choices: Sequence[ChoiceEntry], *, borrowed: bool) -> dict[str, int]:
    """Shape -> how often it was the choice."""
    return dict(Counter(entry.chosen for entry in choices if entry.chosen and bool(entry.borrowed) == borrowed))


def _recipe(cell: PaperCell, folder: Path) -> Recipe:
    world = fitted()[cell.model]
    overrides = [
        *_model(world),
        f'workload.trajectories="{_trajectories(cell, world, folder)}"',
        f"fleet.reserved_gpus={RESERVED if cell.trace else cell.gpus}",
        f"fleet.external_gpus={EXTERNAL if cell.trace else 0}",
        f"fleet.training_gpus={cell.training}",
        f"fleet.tp={list(cell.tp)}",
        f'elastic.policy="{cell.policy}"',
        f"rollout.groups_per_batch={cell.batch // GROUP_SIZE}",
        f"rollout.max_staleness={cell.staleness}",
        f"rollout.max_context_tokens={cell.context}",
        f"engine.max_context_tokens={cell.context}",
        "rollout.max_turns=1000",
        f"environment.slots={2 * cell.batch}",
        f"run.seed={cell.seed}",
        f"run.steps={cell.steps}",
    ]
    if cell.shape:
        overrides.append(f'elastic.shape="{cell.shape}"')
    if cell.duration_s:
        overrides.append(f"simulation.duration_s={cell.duration_s}")
    if cell.trace:
        overrides.append(f'simulation.availability="{_trace(cell, folder)}"')
    return load_recipe(SETTING, overrides).recipe


def _model(world: Fitted) -> list[str]:
    return [
        f'platform.prior="{world.platform}"',
        f"platform.time_scale={world.time_scale}",
        f"simulation.weight_bytes={world.weight_bytes}",
        f"simulation.train_tokens_per_gpu_s={world.train_tokens_per_gpu_s}",
    ]


def _trajectories(cell: PaperCell, world: Fitted, folder: Path) -> Path:
    path = folder / "trajectories.jsonl"
    if cell.workload == "section3":
        return write_trajectories(scripts_of(trajectories_of(world)), path)
    data = _data(cell)
    recorded = data.recording(cell.workload)
    return recorded or write_trajectories(scripts_of(data.workload(cell.workload, seed=1).workload), path)


def _data(cell: PaperCell) -> Data:
    return find_data(Path(cell.data) if cell.data else None)


def _trace(cell: PaperCell, folder: Path) -> Path:
    return write_trace(_data(cell).availability(cell.trace, seed=1).trace, folder / f"{cell.trace}.csv")
