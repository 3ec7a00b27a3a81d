"""A fake fleet: fake engines started all or nothing, with failures on request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from pearl.core.state import Role
from pearl.errors import EngineError, WorkerLost
from pearl.ports import FleetEvent, StartReport, WorkerGone, WorkerSpec, WorkerUnwell
from pearl.records.ids import GpuId, WorkerId
from pearl.testing.engine import FakeEngine
from pearl.testing.mailbox import Mailbox
from pearl.testing.tokens import TurnStarts


def default_engine(spec: WorkerSpec) -> FakeEngine:
    """A fake engine as it comes."""
    return FakeEngine(worker=spec.worker)


class FakeFleet:
    """A `Fleet` in this process; its engines share where turns began, so that a turn continues on any of them."""

    def __init__(self, make_engine: Callable[[WorkerSpec], FakeEngine] = default_engine, start_s: float = 0.0) -> None:
        self._make_engine = make_engine
        self._start_s = start_s
        self._turn_starts = TurnStarts()
        self._events: Mailbox[FleetEvent] = Mailbox()
        self._epochs: dict[WorkerId, int] = {}
        self._specs: dict[WorkerId, WorkerSpec] = {}
        self._starting: dict[WorkerId, WorkerSpec] = {}
        self._start_failures: dict[WorkerId, list[str]] = {}
        self._start_times_s: dict[WorkerId, list[float]] = {}
        self.engines: dict[WorkerId, FakeEngine] = {}
        """Workers that are up, asleep ones included."""
        self.roles: dict[WorkerId, Role] = {}
        self.asleep: set[WorkerId] = set()
        self.past_engines: list[FakeEngine] = []
        """Every engine that was ever up, in order of starting: their ledgers together cover the whole run."""
        self.starts: list[StartReport] = []
        self.role_s = 0.0
        """What a change of role takes."""
        self._role_failures: dict[WorkerId, list[str]] = {}
        self.sleep_s = 0.0
        """What it takes a worker to fall asleep."""
        self.wake_s = 0.0
        """What it takes a worker to wake."""
        self._hanging: dict[WorkerId, int] = {}

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        """Start workers, all or nothing."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failed = self._conflicts(specs)
        times_s = {spec.worker: self._take_start_time(spec.worker) for spec in specs}
        wanted = {spec.worker: spec for spec in specs} if not failed else {}
        self._starting.update(wanted)
        try:
            if not failed:
                await asyncio.sleep(min(timeout_s, max(times_s.values(), default=0.0)))
        finally:
            for worker in wanted:
                self._starting.pop(worker, None)
        for worker in wanted:
            if failures := self._start_failures.get(worker):
                failed[worker] = failures.pop(0)
            elif times_s[worker] > timeout_s:
                failed[worker] = f"worker {worker}: not up within {timeout_s:g} s, want cluster.start_timeout_s higher"
        if not failed:
            for spec in specs:
                self._admit(spec)
        report = StartReport(
            started=() if failed else tuple(spec.worker for spec in specs),
            failed=failed,
            seconds=loop.time() - began_s,
        )
        self.starts.append(report)
        return report

    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        """End workers; those with requests get `grace_s` first."""
        leaving = {worker: self.engines[worker] for worker in workers if worker in self.engines}
        if any(engine.busy for engine in leaving.values()):
            await asyncio.sleep(grace_s)
        for worker, engine in leaving.items():
            if self.engines.get(worker) is engine:
                self._forget(worker)
                engine.shut_down()

    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        """Release device memory; KV of before is gone."""
        await self._take(workers, self.sleep_s)
        for worker in workers:
            self._engine(worker).sleep()
            self.asleep.add(worker)

    async def wake(self, workers: Sequence[WorkerId]) -> None:
        """Take device memory again; its GPUs must be free."""
        await self._take(workers, self.wake_s)
        used = self._used_gpus()
        for worker in workers:
            engine = self._engine(worker)
            for gpu in self._specs[worker].gpus:
                if used.setdefault(gpu, worker) != worker:
                    raise EngineError(
                        f"worker {worker}: wake: GPU {gpu} is in use by worker {used[gpu]}; free it first"
                    )
            engine.wake()
            self.asleep.discard(worker)

    async def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change the role of a drained worker; takes `role_s`, and fails when `fail_next_role` said so."""
        if role is Role.TRAINING:
            raise EngineError(f"worker {worker}: got role {role.value}, want a role of rollout")
        await self._take([worker], self.role_s)
        if failures := self._role_failures.get(worker):
            raise EngineError(failures.pop(0))
        if self._engine(worker).busy:
            raise EngineError(f"worker {worker}: role {role.value}: it still has requests; drain it first")
        self.roles[worker] = role

    def engine(self, worker: WorkerId) -> FakeEngine:
        """The engine of a started worker."""
        return self._engine(worker)

    def events(self) -> AsyncIterator[FleetEvent]:
        """Unannounced changes."""
        return self._stream()

    async def _stream(self) -> AsyncIterator[FleetEvent]:
        while True:
            for event in await self._events.take():
                yield event

    # -- faults -----------------------------------------------------------------------------------------------------

    def fail_next_start(self, worker: WorkerId, detail: str = "made to fail") -> None:
        """Fail the next start of a worker; each call adds one failure."""
        self._start_failures.setdefault(worker, []).append(f"worker {worker}: {detail}")

    def fail_next_role(self, worker: WorkerId, detail: str = "made to fail") -> None:
        """Refuse the next change of a worker's role; each call adds one refusal."""
        self._role_failures.setdefault(worker, []).append(f"worker {worker}: {detail}")

    def hang_next(self, worker: WorkerId) -> None:
        """Never answer the next sleep, wake or change of role of a worker; each call adds one."""
        self._hanging[worker] = self._hanging.get(worker, 0) + 1

    def delay_next_start(self, worker: WorkerId, start_s: float) -> None:
        """Make the next start of a worker take this long."""
        self._start_times_s.setdefault(worker, []).append(start_s)

    def kill(self, worker: WorkerId, detail: str = "killed") -> None:
        """Kill a worker's process; the same as `engines[worker].kill()`."""
        self.engines[worker].kill(detail)

    def report_unwell(self, worker: WorkerId, detail: str = "no answer to the health check") -> None:
        """Report a worker as unwell."""
        self._events.put(WorkerUnwell(worker=worker, detail=detail))

    # -- the inside -------------------------------------------------------------------------------------------------

    async def _take(self, workers: Sequence[WorkerId], seconds: float) -> None:
        """What a change of processes that are up takes."""
        for worker in workers:
            self._engine(worker)
            if self._hanging.get(worker):
                self._hanging[worker] -= 1
                await asyncio.get_running_loop().create_future()
        if seconds:
            await asyncio.sleep(seconds)

    def _used_gpus(self) -> dict[GpuId, WorkerId]:
        return {
            gpu: spec.worker
            for spec in (*self._specs.values(), *self._starting.values())
            for gpu in spec.gpus
            if spec.worker not in self.asleep
        }

    def _conflicts(self, specs: Sequence[WorkerSpec]) -> dict[WorkerId, str]:
        used = self._used_gpus()
        failed: dict[WorkerId, str] = {}
        seen: set[WorkerId] = set()
        for spec in specs:
            if spec.worker in self.engines or spec.worker in self._starting or spec.worker in seen:
                failed[spec.worker] = f"worker {spec.worker}: is already up; stop it first"
            seen.add(spec.worker)
            for gpu in spec.gpus:
                if used.setdefault(gpu, spec.worker) != spec.worker:
                    failed[spec.worker] = f"worker {spec.worker}: GPU {gpu} is in use by worker {used[gpu]}"
        return failed

    def _take_start_time(self, worker: WorkerId) -> float:
        times_s = self._start_times_s.get(worker)
        return times_s.pop(0) if times_s else self._start_s

    def _admit(self, spec: WorkerSpec) -> None:
        engine = self._make_engine(spec)
        engine.share_turn_starts(self._turn_starts)
        self._epochs[spec.worker] = engine.kv.epoch = self._epochs.get(spec.worker, engine.kv.epoch - 1) + 1
        engine.on_death.append(lambda detail: self._lose(spec.worker, detail))
        self.engines[spec.worker] = engine
        self.past_engines.append(engine)
        self._specs[spec.worker] = spec
        self.roles[spec.worker] = spec.role

    def _lose(self, worker: WorkerId, detail: str) -> None:
        self._forget(worker)
        self._events.put(WorkerGone(worker=worker, detail=detail))

    def _forget(self, worker: WorkerId) -> None:
        self._epochs[worker] = self.engines.pop(worker).kv.epoch
        self._specs.pop(worker)
        self.roles.pop(worker)
        self.asleep.discard(worker)

    def _engine(self, worker: WorkerId) -> FakeEngine:
        engine = self.engines.get(worker)
        if engine is None:
            raise WorkerLost(f"fleet: got worker {worker}, want one of {sorted(self.engines)}; start it first")
        return engine
