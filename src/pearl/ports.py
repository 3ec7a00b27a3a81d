"""Every port between the runtime and a world, real or simulated.

The pipeline and `elastic` talk to these protocols only. For each there is an in-process fake and a contract suite in
`pearl.testing`; changing a port needs an ADR and every suite green. Methods that wait are coroutines; every wait of the
caller is bounded by a guard of the caller's own.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pearl.core.state import Gpu, Role
from pearl.records.ids import GpuId, LeaseId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.journal import JournalEntry
from pearl.records.tokens import Tokens
from pearl.records.training import (
    LendReport,
    LoadMode,
    LoadReport,
    Manifest,
    TrainingBatch,
    TrainReport,
)
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.records.turn import Chunk, KvHandle, TurnRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine is."""

    model_hash: str
    epoch: int
    """Rises whenever KV held before becomes unusable (restart, sleep); handles of another epoch are refused."""
    max_context_tokens: int
    kv_capacity_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start, and the load now."""

    version: WeightVersion
    running: int
    waiting: int
    kv_used_tokens: int
    generated_tokens: int
    computed_prompt_tokens: int
    iterations: int
    busy_s: float
    """Time inside iterations."""
    late_iterations: int = 0
    """Iterations that took longer than the pace asked for; 0 without pacing."""


class Engine(Protocol):
    """One rollout worker's inference engine."""

    async def info(self) -> EngineInfo:
        """What the engine is."""

    async def submit(self, requests: Sequence[TurnRequest]) -> None:
        """Queue requests; a request that cannot be served ends with `EndReason.FAILED`.

        Raises:
            WorkerLost: the worker is gone; none of the requests was taken.
        """

    async def interrupt(self, ids: Sequence[RequestId]) -> None:
        """End running requests at the next token boundary, losing none; unknown ids are ignored."""

    async def release(self, trajectory: TrajectoryId, kv: KvHandle | None = None) -> None:
        """Forget a handle if one is given, else the cached prefix of a trajectory; unknown ones are ignored."""

    async def load(self, manifest: Manifest, mode: LoadMode) -> LoadReport:
        """Take new weights between two iterations.

        Raises:
            WeightsError: another model's weights, damaged or vanished bytes; the old weights stay.
            WorkerLost: the worker is gone.
        """

    async def stats(self) -> EngineStats:
        """Counters and load."""

    def events(self) -> AsyncIterator[tuple[Chunk, ...]]:
        """The one ordered, batched stream of a worker: completions at once, progress at most every `progress_interval_s`.

        Raises (from the iterator):
            WorkerLost: the worker died; what the last delta did not carry is lost.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """A worker to start."""

    worker: WorkerId
    gpus: tuple[GpuId, ...]
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReport:
    """All workers of a group are up (but not admitted), or none is."""

    started: tuple[WorkerId, ...]
    failed: Mapping[WorkerId, str]
    """Worker -> what happened; not empty means that nothing was started."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """A worker's process died without notice."""

    worker: WorkerId
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerUnwell:
    """A worker does not answer its health check, but its process is there."""

    worker: WorkerId
    detail: str


FleetEvent = WorkerGone | WorkerUnwell


class Fleet(Protocol):
    """Processes of rollout workers."""

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        """Start a group of workers, all or nothing; does not admit them."""

    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        """End workers; unknown ones are ignored."""

    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        """Release device memory and keep the processes."""

    async def wake(self, workers: Sequence[WorkerId]) -> None:
        """Take device memory again; weights must be loaded before serving, KV of before is gone (a new epoch)."""

    async def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change the role of a drained worker."""

    def engine(self, worker: WorkerId) -> Engine:
        """The engine of a started worker.

        Raises:
            WorkerLost: there is no such worker.
        """

    def events(self) -> AsyncIterator[FleetEvent]:
        """Unannounced changes, each once."""


class WeightStore(Protocol):
    """Published weight versions: at most two are kept."""

    async def publish(self, version: WeightVersion) -> Manifest:
        """Make the trainer's current weights available under a version.

        Raises:
            WeightsError: the version does not rise, or the host memory budget does not hold it.
        """

    async def newest(self) -> Manifest | None:
        """The version published last, None before the first."""

    async def fetch(self, manifest: Manifest, names: Sequence[str]) -> Mapping[str, bytes]:
        """Raw bytes of some shards by name, checked against their checksums.

        Raises:
            WeightsError: unknown name, version no longer kept, or damaged bytes.
        """


class Trainer(Protocol):
    """The training side: one object however many ranks it has."""

    async def train(self, batch: TrainingBatch) -> TrainReport:
        """One training step; the version rises by one."""

    async def lend_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Move training state off these GPUs so that rollout can use them."""

    async def reclaim_gpus(self, gpus: Sequence[GpuId]) -> LendReport:
        """Bring training state back; afterwards `train` gives what it would have given without the loan."""

    async def save(self, folder: Path) -> None:
        """Write trainer state (weights, optimizer, random state, version) atomically."""

    async def restore(self, folder: Path) -> WeightVersion:
        """Read it back, bit for bit.

        Raises:
            CheckpointError: missing, damaged, or of another model.
        """


class Environment(Protocol):
    """One task being acted on; owned by one trajectory."""

    async def reset(self, seed: int) -> str:
        """First observation.

        Raises:
            EnvironmentFault: one of its subclasses.
        """

    async def step(self, action: str) -> EnvironmentReply:
        """Answer one action.

        Raises:
            EnvironmentFault: one of its subclasses.
        """

    async def close(self) -> None:
        """Give the slot back; never raises, also after a fault."""


class EnvironmentPool(Protocol):
    """Bounded slots, each with an environment of its own, outside the driver."""

    @property
    def slots(self) -> int:
        """Environments open at once, at most."""

    async def open(self, task: Task) -> Environment:
        """Open an environment, waiting for a free slot; slots are given in the order of asking.

        Raises:
            EnvironmentFault: the environment could not be made.
        """


class Codec(Protocol):
    """Tokenizer and chat template; history is never re-encoded."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""

    def first_prompt(self, observation: str) -> Tokens:
        """Token ids of the first prompt, ready for the model to answer."""

    def append(self, observation: str, *, closed: bool) -> Tokens:
        """Token ids to put behind a completion: end of the answer (unless a stop token `closed` it), observation, cue."""

    def action(self, token_ids: Tokens) -> str:
        """Text of a completion, stop token left out."""


class JournalSink(Protocol):
    """Where journal entries go."""

    def write(self, entry: JournalEntry) -> None:
        """Queue an entry; never blocks. When the bounded queue is full the entry is counted as dropped."""

    async def flush(self) -> None:
        """Wait until everything written before is on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """GPUs that the job may take."""

    lease: LeaseId
    gpus: tuple[Gpu, ...]
    end_s: float | None
    """Loop time at which the lease ends, None when not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """GPUs that will be taken away."""

    gpus: tuple[GpuId, ...]
    deadline_s: float
    """Loop time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdrawn:
    """GPUs that are gone."""

    gpus: tuple[GpuId, ...]


GpuSourceEvent = Offered | Notice | Withdrawn


class GpuSource(Protocol):
    """Where GPUs from outside come from."""

    def events(self) -> AsyncIterator[GpuSourceEvent]:
        """Offers, notices and withdrawals, in order."""

    async def accept(self, lease: LeaseId, gpus: Sequence[GpuId]) -> bool:
        """Take GPUs of an offer; False when it is over."""

    async def give_back(self, gpus: Sequence[GpuId]) -> None:
        """Return GPUs before they are withdrawn."""
