"""What the trainer consumes and reports."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats, TokenCount, TokenIds
from pearl.records.turn import Versions


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSample:
    """One trajectory as the loss sees it; L = prompt and generated tokens of all turns."""

    trajectory: TrajectoryId
    group: GroupId
    token_ids: TokenIds | TokenCount
    """Shape `[L]`; a count where a simulated engine generated."""
    trained: tuple[tuple[int, int], ...]
    """Half-open ranges `[start, stop)` of generated positions, ascending, disjoint; everything else is context."""
    logprobs: Floats
    """Shape `[G]`, G = total length of `trained`: log mu, as sampled."""
    versions: Versions
    """Covers G tokens."""
    reward: float

    @property
    def ids(self) -> TokenIds:
        """The token ids, for whoever computes with them.

        Raises:
            TypeError: they were counted, not drawn.
        """
        if isinstance(self.token_ids, TokenIds):
            return self.token_ids
        raise TypeError(f"trajectory {self.trajectory}: this needs token ids, got only their count")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBatch:
    """One training step's data: whole groups, in order of admission."""

    version: WeightVersion
    """The trainer's version at consumption; the step ends with `version + 1`."""
    samples: tuple[TrainingSample, ...]

    @property
    def groups(self) -> tuple[GroupId, ...]:
        """The groups of the batch, each once, in order."""
        return tuple(dict.fromkeys(sample.group for sample in self.samples))

    @property
    def staleness_tokens(self) -> dict[int, int]:
        """Trained tokens by staleness (`version` minus the token's own), ascending."""
        counts: dict[int, int] = {}
        for sample in self.samples:
            for run in sample.versions.runs:
                staleness = self.version - run.version
                counts[staleness] = counts.get(staleness, 0) + run.tokens
        return dict(sorted(counts.items()))

    @property
    def staleness_max(self) -> int:
        """Largest staleness of any sample; 0 for an empty batch."""
        return max(self.staleness_tokens, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainReport:
    """One training step, done."""

    version: WeightVersion
    """Version after the step."""
    train_s: float
    samples: int
    trained_tokens: int
    metrics: Mapping[str, float]
    """Loss, clip fraction, entropy, gradient norm, ..., each a mean over the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LendReport:
    """Training GPUs handed to rollout, or taken back."""

    seconds: float
    freed_bytes: int
    """Device memory released (lend) or occupied again (reclaim)."""


class LoadMode(enum.Enum):
    """What happens to running requests when an engine takes new weights."""

    KEEP_KV = "keep_kv"
    """They go on with the KV that older weights computed."""
    RECOMPUTE = "recompute"
    """Their context is prefilled again under the new weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One tensor, or a slice of one, of a published version."""

    name: str
    dtype: str
    """As in safetensors: `F32`, `BF16`, ..."""
    shape: tuple[int, ...]
    """Of this slice."""
    start: tuple[int, ...]
    """Offset of the slice in the full tensor, one number per dimension."""
    size_bytes: int
    checksum: str
    """`crc32:xxxxxxxx` of the raw bytes."""
    locations: tuple[str, ...]
    """Where the bytes are, nearest first; a file path for shared memory on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A published weight version."""

    version: WeightVersion
    model_hash: str
    """Hash of the architecture (names, shapes, dtypes): an engine refuses another model's weights."""
    shards: tuple[Shard, ...]

    @property
    def size_bytes(self) -> int:
        """Sum over shards."""
        return sum(shard.size_bytes for shard in self.shards)


def model_hash(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> str:
    """Hash `(name, dtype, shape)` of every tensor of a model, in any order, to 16 hex digits.

    `dtype` as in safetensors (`F32`). Tied tensors count once, under the name that the checkpoint stores.
    """
    digest = hashlib.blake2b(digest_size=8)
    for name, dtype, shape in sorted(tensors):
        digest.update(f"{name}|{dtype}|{','.join(map(str, shape))}\n".encode())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """An engine has taken new weights."""

    version: WeightVersion
    load_s: float
    loaded_bytes: int
    recomputed_tokens: int
    """Context tokens whose KV was dropped by `LoadMode.RECOMPUTE`."""
