"""The stream of tasks: group number -> task and sampling seeds, a pure function of the run's seed.

A resumed run therefore needs no more than the cursor, and a group that begins again draws the same task.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from pearl.records.ids import TaskId
from pearl.records.trajectory import Scalar, Task


def derive_seed(*parts: int | str) -> int:
    """A seed in 0 .. 2**63 - 1 from any parts, alike in every process."""
    digest = hashlib.blake2b("|".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStream:
    """Tasks of one environment kind; group `index` gets the environment seed derived from `(seed, index)`."""

    environment: str
    params: Mapping[str, Scalar]
    seed: int

    def task(self, index: int) -> Task:
        """The task of a group."""
        return Task(
            id=TaskId(f"{self.environment}#{index}"),
            environment=self.environment,
            seed=derive_seed("task", self.seed, index) % 2**31,
            params=self.params,
        )

    def sampling_seed(self, index: int, attempt: int) -> int:
        """Seed of one attempt of a group; attempts draw different tokens."""
        return derive_seed("sampling", self.seed, index, attempt)
