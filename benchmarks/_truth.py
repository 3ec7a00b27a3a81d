"""The truth of `benchmarks.predict`: what simulated runs took, and what was known when they were asked about.

A run has the policy `static`; its world is not what its recipe assumes: another workload, iterations that take `time_scale` times
what the tables say. Whenever a batch begins to be the next one to close, the elastic scheduler asks its predictor; what it gives
it (the profile refitted so far, the progress of the batch) is kept, with the seconds until the batch closed. With staleness that
is when the batch before is complete and its update begins; without it nothing is in flight then, and it is when the update has
ended. The first steps are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, lru_cache
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks import _cells
from benchmarks._cells import SETTING, Result, code_hash
from benchmarks._data import Data, find_data
from benchmarks._predict_cells import PRIORS, Cell, Load
from pearl.config.load import load_recipe
from pearl.config.recipe import Recipe
from pearl.core.decision import Moment
from pearl.core.distribution import Distribution
from pearl.core.fluid import FluidPredictor
from pearl.core.makespan import Forecast, Profile
from pearl.core.platform import Platform
from pearl.core.progress import Progress
from pearl.core.workload import WorkloadProfile
from pearl.records.journal import ChoiceEntry, JournalEntry, StepEntry
from pearl.report.planning import platform_of, policy_of
from pearl.sim.presets import preset
from pearl.sim.simulate import Hidden, simulate
from pearl.sim.workload import Workload, profile_of, truncated

WARM_UP_STEPS = 2
TURNS = 4_500
"""Of a run, all steps together, about: what its time goes with."""
FEWEST_STEPS, MOST_STEPS = 6, 12
"""Measured ones of a run with staleness."""
STEPS = 4
"""Of one without, where truths have little noise."""
UPDATE_SHARE = 0.1
"""An update takes so much of what a batch's rollout takes by the tables, about: rollout is what is waited for, as in the paper's
Fig. 2a, where it takes five times as long as training."""
PATHS = 80
"""Batches over which the mean of critical paths is taken."""
FAR = 1_000_000
"""The first group of those."""
MAX_TURNS = 145
PREDICTORS = tuple(
    f"core/{name}.py" for name in ("curve", "drain", "feasible", "fluid", "lookup", "pace", "paper_model", "stations")
)
"""Modules that a truth does not follow from: what is predicted changes nothing where the shape is given."""
ELSEWHERE = ("cli", "cluster", "engine", "env", "testing", "train")
"""Folders that no simulation imports."""
Json = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A question, and what became of it."""

    workload: WorkloadProfile
    time_scale: Mapping[int, float]
    progress: Progress
    close_s: float
    """Until the batch closed."""
    alone_s: float
    """What the slowest trajectory of the batch that closed would have taken by itself."""
    usual_s: float
    """The mean of that over batches of this workload."""


@dataclass(frozen=True, slots=True)
class _Listening:
    """A predictor that remembers what it was asked with."""

    asked: list[tuple[Profile, Progress]]
    inner: FluidPredictor
    name: str = "static"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        """As our predictor has it."""
        self.asked.append((profile, progress))
        return self.inner.forecast(profile, progress)


class _Sink:
    """A journal of which only questions and steps are kept."""

    def __init__(self, asked: list[tuple[Profile, Progress]], moment: Moment, path: _CriticalPath) -> None:
        self._asked, self._moment, self._path = asked, moment, path
        self._open: tuple[Profile, Progress, float] | None = None
        self.found: list[Asked] = []

    def write(self, entry: JournalEntry) -> None:
        """Remember the question behind a choice, and the answer once the next batch is complete."""
        if isinstance(entry, StepEntry):
            # The batch that closed last is known by now.
            if self.found and not self.found[-1].alone_s:
                groups = [int(group.removeprefix("g")) for group in entry.groups]
                self.found[-1] = replace(self.found[-1], alone_s=self._path.of(groups))
            return
        if not isinstance(entry, ChoiceEntry):
            return
        if entry.moment == Moment.TRAINING_BEGAN.value and self._open is not None:
            profile, progress, at_s = self._open
            self._open = None
            self.found.append(
                Asked(
                    workload=profile.workload,
                    time_scale=profile.platform.time_scale,
                    progress=progress,
                    close_s=entry.at_s - at_s,
                    alone_s=0.0,
                    usual_s=self._path.usual_s,
                )
            )
        if entry.moment == self._moment.value:
            self._open = (*self._asked[-1], entry.at_s)
        del self._asked[:-1]

    async def flush(self) -> None:
        """Nothing is written."""


class _CriticalPath:
    """What the slowest trajectory of a batch takes by itself: known from its scripts, without a simulation."""

    def __init__(self, workload: Workload, cell: Cell, token_s: float) -> None:
        self._workload, self._cell, self._token_s = workload, cell, token_s
        size, count = cell.load.groups, PATHS
        # Groups that no run comes to.
        batches = [range(FAR + first, FAR + first + size) for first in range(0, size * count, size)]
        self.usual_s = fmean(self.of(groups) for groups in batches)

    def of(self, groups: Iterable[int]) -> float:
        """Of a batch of these groups."""
        return max(self._alone_s(group, attempt) for group in groups for attempt in range(self._cell.load.group_size))

    def _alone_s(self, group: int, attempt: int) -> float:
        script = self._workload.script(group, attempt)
        played = truncated(script, max_turns=MAX_TURNS, max_context_tokens=self._cell.load.context_tokens)
        return sum(turn.output_tokens * self._token_s + turn.env_s for turn in played.turns) if played else 0.0


@cache
def _data(folder: Path | None) -> Data:
    return find_data(folder)


@cache
def _workload(name: str, seed: int, folder: Path | None) -> tuple[Workload, WorkloadProfile, str]:
    """A workload, what its scripts are like, and where it comes from."""
    kind, _, rest = name.rpartition(" ")
    if kind:
        found = _data(folder).workload(rest, seed=seed)
        workload, label = found.workload, found.label
    else:
        workload, label = preset(name, seed=seed), f"preset {name}"
    return workload, profile_of(workload.script(group, 0) for group in range(100)), label


def label_of(name: str, folder: Path | None) -> str:
    """Where a workload comes from."""
    return _workload(name, 0, folder)[2]


def recipe_of(cell: Cell, shape: str, steps: int, update_s: float) -> Recipe:
    """The recipe of a run."""
    load = cell.load
    overrides = [
        f'workload.prior="{PRIORS[cell.workload]}"',
        f'platform.prior="{cell.platform}"',
        'elastic.policy="static"',
        f'elastic.shape="{shape}"',
        f"run.steps={steps}",
        f"run.seed={cell.seed}",
        f"rollout.groups_per_batch={load.groups}",
        f"rollout.group_size={load.group_size}",
        f"rollout.max_staleness={cell.max_staleness}",
        f"rollout.max_turns={MAX_TURNS}",
        f"rollout.max_context_tokens={load.context_tokens}",
        f"engine.max_context_tokens={load.context_tokens}",
        f"environment.slots={load.batch * (cell.max_staleness + 1)}",
        "fleet.gpus_per_node=8",
        f"fleet.reserved_gpus={8 * -(-load.workers * load.tp // 8)}",
        "fleet.external_gpus=0",
        "fleet.training_gpus=8",
        f"fleet.tp=[{load.tp}]",
        f"fleet.overlap_tp={load.tp}",
        f"simulation.train_tokens_per_gpu_s={1 / update_s:.6g}",
    ]
    return load_recipe(SETTING, overrides).recipe


def platform_for(cell: Cell) -> Platform:
    """The tables that are assumed."""
    return platform_of(recipe_of(cell, f"{cell.load.workers}C@tp{cell.load.tp}", 1, 1e-3))


@lru_cache(maxsize=4)
def _path(cell: Cell, folder: Path | None) -> _CriticalPath:
    times = platform_for(cell).by_tp[cell.load.tp].iterations
    token_s = cell.time_scale * times.seconds(0, 2, cell.load.context_tokens / 4)
    return _CriticalPath(_workload(cell.workload, cell.seed, folder)[0], cell, token_s)


def truth_of(cell: Cell, shape: str, append_tokens: int, folder: Path | None) -> list[Asked]:
    """Run a cell under a shape: a question for each step after the first few."""
    workload, known, _ = _workload(cell.workload, cell.seed, folder)
    load = cell.load
    measured = round(TURNS / (load.batch * known.turns.mean)) - WARM_UP_STEPS
    steps = WARM_UP_STEPS + (min(MOST_STEPS, max(FEWEST_STEPS, measured)) if cell.max_staleness else STEPS)
    recipe = recipe_of(cell, shape, steps + 2 * cell.max_staleness, _update_s_per_token(cell, known))
    asked: list[tuple[Profile, Progress]] = []
    policy = policy_of(recipe)
    policy = replace(
        policy,
        predictor=_Listening(asked, FluidPredictor()),
        space=replace(policy.space, append_tokens=(append_tokens,)),
    )
    path = _path(cell, folder)
    sink = _Sink(asked, Moment.TRAINING_BEGAN if cell.max_staleness else Moment.TRAINING_FINISHED, path)
    simulate(recipe, sink, hidden=Hidden(workload=workload, time_scale=cell.time_scale, policy=policy))
    # At the end nothing more is admitted.
    first = WARM_UP_STEPS - 1
    return sink.found[first : first + steps - WARM_UP_STEPS]


def _update_s_per_token(cell: Cell, known: WorkloadProfile) -> float:
    """GPU-seconds of training per token, so that an update takes `UPDATE_SHARE` of a batch's time in colocated iterations."""
    platform, load = platform_for(cell), cell.load
    profile = platform.by_tp[load.tp]
    tokens = known.prompt_tokens.mean + known.turns.mean * known.growth_tokens
    each = load.batch / load.workers
    iteration_s = profile.iterations.seconds(0, max(1.0, each / 2), tokens / 2)
    decode_s = known.turns.mean * known.generated_tokens.mean * iteration_s * 2
    batch_s = decode_s + known.turns.mean * known.env_s.mean
    return UPDATE_SHARE * batch_s * 8 / (load.batch * min(tokens, load.context_tokens))


# -- as JSON ----------------------------------------------------------------------------------------------------------


def truths_code() -> str:
    """Hash of all that truths follow from, but for cells and data."""
    folder = Path(__file__).parent
    return code_hash(Path(__file__), folder / "_data.py", SETTING, without=(*PREDICTORS, *ELSEWHERE))


def cells_json(cell: Cell, folder: Path | None) -> list[_cells.Cell]:
    """A cell for `measure`: one for each of its shapes, with what is assumed and where its workload comes from."""
    more = {"prior": PRIORS[cell.workload], "source": label_of(cell.workload, folder)}
    return [{**asdict(cell), **more, "shape": shape, "append_tokens": bound} for shape, bound in cell.shapes()]


def simulated(given: _cells.Cell, *, folder: Path | None) -> Result:
    """What `measure` keeps of one of these: `asked`, to be read by `asked_from`."""
    values: dict[str, Any] = {field.name: given[field.name] for field in fields(Cell)}
    cell = Cell(**{**values, "load": Load(**given["load"])})
    return {"asked": [asked_json(each) for each in truth_of(cell, given["shape"], given["append_tokens"], folder)]}


_DISTRIBUTIONS = ("turns", "prompt_tokens", "new_tokens", "generated_tokens", "env_s")
_NUMBERS = ("retained", "turn_overhead_s", "theta", "likeness")


def asked_json(asked: Asked) -> Json:
    """To be read back by `asked_from`."""
    work, progress = asked.workload, asked.progress
    return {
        "workload": {name: [getattr(work, name).values, getattr(work, name).weights] for name in _DISTRIBUTIONS}
        | {name: getattr(work, name) for name in _NUMBERS},
        "time_scale": {str(tp): scale for tp, scale in asked.time_scale.items()},
        "progress": {
            "batch_trajectories": progress.batch_trajectories,
            "unfinished": progress.unfinished,
            "live_groups": progress.live_groups,
            "needed_groups": progress.needed_groups,
            "due_groups": progress.due_groups,
            "coming": progress.coming,
            "coming_s": progress.coming_s,
            "pause_s": progress.pause_s,
            "running": sorted(progress.running.items()),
            "due": sorted(progress.due.items()),
        },
        "close_s": asked.close_s,
        "alone_s": asked.alone_s,
        "usual_s": asked.usual_s,
    }


def asked_from(record: Json) -> Asked:
    """A question as it was."""
    work, progress = record["workload"], record["progress"]
    return Asked(
        workload=WorkloadProfile(
            **{name: Distribution(tuple(work[name][0]), tuple(work[name][1])) for name in _DISTRIBUTIONS},  # type: ignore[arg-type]
            **{name: work[name] for name in _NUMBERS},
        ),
        time_scale=MappingProxyType({int(tp): scale for tp, scale in record["time_scale"].items()}),
        progress=Progress(**{**progress, "running": dict(progress["running"]), "due": dict(progress["due"])}),
        close_s=record["close_s"],
        alone_s=record["alone_s"],
        usual_s=record["usual_s"],
    )
