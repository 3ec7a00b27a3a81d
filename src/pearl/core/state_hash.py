"""The hash of a fleet state, and the same one after the other with what does not change from version to version remembered.

Versions share what they have in common, so whatever is the same object as before has the same text. A version of a fleet of
hundreds of workers differs from the one before in one of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from pearl.core.events import Gpu, Worker
from pearl.records.ids import GpuId, WorkerId

if TYPE_CHECKING:
    from pearl.core.state import FleetState


class StateHash:
    """Hashes states; quickly, where each follows from the one before."""

    def __init__(self) -> None:
        self._gpus: Mapping[GpuId, Gpu] | None = None
        self._slots: Mapping[WorkerId, tuple[GpuId, ...]] | None = None
        self._after_gpus = self._after_slots = hashlib.blake2b(digest_size=8)
        self._lines: dict[WorkerId, tuple[Worker, bytes]] = {}

    def of(self, state: FleetState) -> str:
        """16 hex digits over the content in slot order; equal states have equal hashes in every process."""
        digest = self._prefix(state).copy()
        digest.update(b"".join([self._line(worker) for _, worker in sorted(state.workers.items())]))
        for lease_id in sorted(state.leases):
            lease = state.leases[lease_id]
            end = "open" if lease.end_s is None else _seconds(lease.end_s)
            digest.update(f"lease {lease_id}|{','.join(lease.gpus)}|{_seconds(lease.since_s)}|{end}\n".encode())
        for gpu_id in sorted(state.notices):
            digest.update(f"notice {gpu_id}|{_seconds(state.notices[gpu_id])}\n".encode())
        return digest.hexdigest()

    def _prefix(self, state: FleetState) -> hashlib.blake2b:
        """After GPUs and slots, which change seldom."""
        if state.gpus is not self._gpus:
            self._gpus, self._slots = state.gpus, None
            self._after_gpus = hashlib.blake2b(digest_size=8)
            for gpu_id in sorted(state.gpus):
                gpu = state.gpus[gpu_id]
                self._after_gpus.update(f"{gpu.id}|{gpu.node}|{gpu.owner.value}\n".encode())
        if state.slots is not self._slots:
            self._slots = state.slots
            self._after_slots = self._after_gpus.copy()
            text = "".join([f"{slot}|{','.join(gpus)}\n" for slot, gpus in sorted(state.slots.items())])
            self._after_slots.update(text.encode())
        return self._after_slots

    def _line(self, worker: Worker) -> bytes:
        known = self._lines.get(worker.id)
        if known is None or known[0] is not worker:
            line = f"{worker.id}|{worker.role.value}|{worker.activity.value}\n".encode()
            known = self._lines[worker.id] = (worker, line)
        return known[1]


def _seconds(time_s: float) -> str:
    """Equal times as equal text: 1 as 1.0, -0.0 as 0.0."""
    return repr(float(time_s) + 0.0)
