"""The simulated fleet: the `Fleet` port over simulated engines, with the times that changes take and faults on request.

Laws: a group starts whole or not at all, in the time of its slowest worker; a death is told once, and so is, after
`health_s`, a worker that hangs; every engine that comes up in a slot has a new epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, fields

from pearl.core.platform import TransitionCosts
from pearl.core.profile import PlatformProfile
from pearl.core.state import Role
from pearl.errors import EngineError, ProfileError, WorkerLost
from pearl.ports import FleetEvent, StartReport, WorkerGone, WorkerSpec, WorkerUnwell
from pearl.records.ids import GpuId, WorkerId
from pearl.sim.engine import SimEngine
from pearl.sim.iterations import IterationCosts
from pearl.sim.settings import EngineSettings, EngineWorld, end_name
from pearl.sim.stream import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """Seconds that changes of one worker take."""

    start_s: float
    """A new process, until it could be admitted."""
    sleep_s: float
    """Freeing device memory."""
    wake_s: float
    """Taking it again; weights come on top."""
    role_change_s: float = 0.0
    stop_s: float = 0.0
    """Ending a worker."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value < float("inf"):
                raise ProfileError(f"fleet: {each.name}: got {value}, want a finite number >= 0")

    @classmethod
    def measured(cls, profile: PlatformProfile, costs: TransitionCosts) -> WorkerTimes:
        """What a profile has measured; what it has not (starts sometimes, changes of role, ends), from the costs."""
        return cls(
            start_s=costs.start_s if profile.engine_start_s is None else profile.engine_start_s,
            sleep_s=profile.sleep_s,
            wake_s=profile.wake_s,
            role_change_s=costs.role_change_s,
            stop_s=costs.stop_s,
        )

    @classmethod
    def published(cls, profile: PlatformProfile, costs: TransitionCosts) -> WorkerTimes:
        """The costs alone: a return is a sleep, and an activation is a wake and the loading of weights."""
        return cls(
            start_s=costs.start_s,
            sleep_s=costs.return_s,
            wake_s=max(0.0, costs.activate_s - profile.weight_load_s),
            role_change_s=costs.role_change_s,
            stop_s=costs.stop_s,
        )


@dataclass(slots=True)
class _Starting:
    spec: WorkerSpec
    lost: asyncio.Future[str]
    """Resolved when it dies before it is up."""


class SimFleet:
    """Simulated rollout workers."""

    def __init__(
        self,
        settings: Callable[[WorkerSpec], EngineSettings],
        times: Callable[[WorkerSpec], WorkerTimes],
        world: EngineWorld | None = None,
        *,
        health_s: float = 30.0,
        left: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`settings` and `times` are asked for at each start; `left` is told the `end_name` of a worker whose memory is gone."""
        self._settings, self._times, self._world = settings, times, world or EngineWorld()
        self._health_s, self._left = health_s, left
        self._costs: dict[int, tuple[PlatformProfile, IterationCosts]] = {}
        """Identity of a profile -> the profile, which so stays what it is, and its iteration times."""
        self._events: Stream[FleetEvent] = Stream()
        self._epochs: dict[WorkerId, int] = {}
        self._specs: dict[WorkerId, WorkerSpec] = {}
        self._starting: dict[WorkerId, _Starting] = {}
        self._start_failures: dict[WorkerId, list[str]] = {}
        self._any_failures: list[str] = []
        self._busy_gpu_s = 0.0
        self._asleep: dict[WorkerId, None] = {}
        self.engines: dict[WorkerId, SimEngine] = {}
        """Workers that are up, asleep ones included."""
        self.roles: dict[WorkerId, Role] = {}
        self.lost_tokens = 0
        """Generated, and not delivered when their worker died."""

    # -- the port ---------------------------------------------------------------------------------------------------

    async def start(self, specs: Sequence[WorkerSpec], timeout_s: float) -> StartReport:
        """Start workers, all or nothing."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        failed = self._conflicts(specs)
        if not failed:
            failed = await self._come_up(specs, timeout_s)
        if not failed:
            for spec in specs:
                self._admit(spec)
        started = () if failed else tuple(spec.worker for spec in specs)
        return StartReport(started=started, failed=failed, seconds=loop.time() - began_s)

    async def stop(self, workers: Sequence[WorkerId], grace_s: float) -> None:
        """End workers; those with requests get `grace_s` first, and their end takes `stop_s`."""
        leaving = {worker: self.engines[worker] for worker in dict.fromkeys(workers) if worker in self.engines}
        if grace_s > 0 and any(engine.is_busy for engine in leaving.values()):
            await asyncio.sleep(grace_s)
        stop_s = 0.0
        for worker, engine in leaving.items():
            if self.engines.get(worker) is engine:
                stop_s = max(stop_s, self._times(self._specs[worker]).stop_s)
                self._forget(worker)
                engine.shut_down()
        if stop_s:
            await asyncio.sleep(stop_s)

    async def sleep(self, workers: Sequence[WorkerId]) -> None:
        """Release device memory; requests end as interrupted, KV of before is gone."""
        engines = {worker: self._engine(worker) for worker in dict.fromkeys(workers)}
        await asyncio.gather(*(engine.sleep() for engine in engines.values()))
        await self._take_time(engines, lambda times: times.sleep_s)
        for worker in engines:
            self._asleep[worker] = None
            self._left(end_name(worker))

    async def wake(self, workers: Sequence[WorkerId]) -> None:
        """Take device memory again.

        Raises:
            EngineError: one of the GPUs is in use.
            WorkerLost: there is no such worker.
        """
        engines = {worker: self._engine(worker) for worker in dict.fromkeys(workers)}
        used = self._used_gpus()
        for worker in engines:
            for gpu in self._specs[worker].gpus:
                if used.setdefault(gpu, worker) != worker:
                    raise EngineError(
                        f"worker {worker}: wake: GPU {gpu} is in use by worker {used[gpu]}; free it first"
                    )
        for worker in engines:
            self._asleep.pop(worker, None)
        await self._take_time(engines, lambda times: times.wake_s)
        for engine in engines.values():
            engine.wake()

    async def set_role(self, worker: WorkerId, role: Role) -> None:
        """Change the role of a drained worker.

        Raises:
            EngineError: no role of rollout, or it still has requests.
            WorkerLost: there is no such worker, or it was lost meanwhile.
        """
        engine = self._engine(worker)
        if role is Role.TRAINING:
            raise EngineError(f"worker {worker}: got role {role.value}, want a role of rollout")
        if role is not self.roles[worker]:
            await self._take_time({worker: engine}, lambda times: times.role_change_s)
        if engine.is_busy:
            raise EngineError(f"worker {worker}: role {role.value}: it still has requests; drain it first")
        self.roles[worker] = role

    def engine(self, worker: WorkerId) -> SimEngine:
        """The engine of a started worker.

        Raises:
            WorkerLost: there is no such worker.
        """
        return self._engine(worker)

    def events(self) -> AsyncIterator[FleetEvent]:
        """Unannounced changes."""
        return self._stream()

    async def _stream(self) -> AsyncIterator[FleetEvent]:
        async for batch in self._events.read():
            for event in batch:
                yield event

    # -- faults -----------------------------------------------------------------------------------------------------

    def kill(self, worker: WorkerId, detail: str = "killed") -> None:
        """End a worker's process without notice; one that is starting fails to. Unknown workers are ignored."""
        starting = self._starting.get(worker)
        if starting is not None and not starting.lost.done():
            starting.lost.set_result(f"worker {worker}: {detail}")
        elif (engine := self.engines.get(worker)) is not None:
            engine.kill(detail)

    def hang(self, worker: WorkerId) -> None:
        """Let a worker answer nobody and generate nothing; told as unwell after `health_s`. Unknown workers are ignored."""
        engine = self.engines.get(worker)
        if engine is not None:
            engine.hang()
            asyncio.get_running_loop().call_later(self._health_s, self._tell_unwell, worker, engine)

    def unhang(self, worker: WorkerId) -> None:
        """Let a worker go on. Unknown workers are ignored."""
        if worker in self.engines:
            self.engines[worker].unhang()

    def slow(self, worker: WorkerId, factor: float) -> None:
        """Let a worker's iterations take so many times what they took at its start. Unknown workers are ignored."""
        if worker in self.engines:
            self.engines[worker].slow(factor)

    def fail_next_start(self, worker: WorkerId, detail: str = "made to fail") -> None:
        """Fail the next start of a worker, at its end; each call adds one failure."""
        self._start_failures.setdefault(worker, []).append(f"worker {worker}: {detail}")

    def fail_any_start(self, detail: str = "made to fail") -> None:
        """Fail the next start of whichever worker; each call adds one failure."""
        self._any_failures.append(detail)

    @property
    def busy_gpu_s(self) -> float:
        """GPU-seconds inside iterations, of all workers that ever were, up to the last iteration that was looked at."""
        return self._busy_gpu_s + sum(
            engine.busy_s * len(self._specs[worker].gpus) for worker, engine in self.engines.items()
        )

    # -- the inside -------------------------------------------------------------------------------------------------

    async def _come_up(self, specs: Sequence[WorkerSpec], timeout_s: float) -> dict[WorkerId, str]:
        """Wait until all of a group are up, or one is not going to be; what went wrong."""
        loop = asyncio.get_running_loop()
        lost: asyncio.Future[str] = loop.create_future()
        times_s = {spec.worker: self._times(spec).start_s for spec in specs}
        for spec in specs:
            self._starting[spec.worker] = _Starting(spec, lost)
        wait_s = min(timeout_s, max(times_s.values(), default=0.0))
        timer = loop.call_later(wait_s, lambda: None if lost.done() else lost.set_result(""))
        try:
            why = await lost
        finally:
            timer.cancel()
            for spec in specs:
                del self._starting[spec.worker]
        failed: dict[WorkerId, str] = {}
        if why:
            worker = next(spec.worker for spec in specs if why.startswith(f"worker {spec.worker}: "))
            return {worker: why}
        for worker, start_s in times_s.items():
            if failures := self._start_failures.get(worker):
                failed[worker] = failures.pop(0)
            elif self._any_failures:
                failed[worker] = f"worker {worker}: {self._any_failures.pop(0)}"
            elif start_s > timeout_s:
                failed[worker] = f"worker {worker}: not up within {timeout_s:g} s, want cluster.start_timeout_s higher"
        return failed

    async def _take_time(self, engines: dict[WorkerId, SimEngine], of: Callable[[WorkerTimes], float]) -> None:
        """What a change of some workers takes; they change side by side."""
        seconds = max((of(self._times(self._specs[worker])) for worker in engines), default=0.0)
        if seconds:
            await asyncio.sleep(seconds)
        for worker, engine in engines.items():
            if self.engines.get(worker) is not engine:
                raise WorkerLost(f"worker {worker}: was lost meanwhile")

    def _used_gpus(self) -> dict[GpuId, WorkerId]:
        up = [spec for spec in self._specs.values() if spec.worker not in self._asleep]
        return {
            gpu: spec.worker
            for spec in (*up, *(starting.spec for starting in self._starting.values()))
            for gpu in spec.gpus
        }

    def _conflicts(self, specs: Sequence[WorkerSpec]) -> dict[WorkerId, str]:
        used = self._used_gpus()
        failed: dict[WorkerId, str] = {}
        seen: dict[WorkerId, None] = {}
        for spec in specs:
            if spec.worker in self.engines or spec.worker in self._starting or spec.worker in seen:
                failed[spec.worker] = f"worker {spec.worker}: is already up; stop it first"
            seen[spec.worker] = None
            for gpu in spec.gpus:
                if used.setdefault(gpu, spec.worker) != spec.worker:
                    failed[spec.worker] = f"worker {spec.worker}: GPU {gpu} is in use by worker {used[gpu]}"
        return failed

    def _admit(self, spec: WorkerSpec) -> None:
        worker, settings = spec.worker, self._settings(spec)
        self._epochs[worker] = self._epochs.get(worker, -1) + 1
        self._specs[worker], self.roles[worker] = spec, spec.role
        self.engines[worker] = SimEngine(
            worker,
            settings,
            self._world,
            costs=self._costs_of(settings.profile),
            epoch=self._epochs[worker],
            on_death=lambda detail: self._lose(worker, detail),
        )

    def _costs_of(self, profile: PlatformProfile) -> IterationCosts:
        found = self._costs.get(id(profile))
        if found is None:
            found = self._costs[id(profile)] = (profile, IterationCosts(profile.iterations))
        return found[1]

    def _lose(self, worker: WorkerId, detail: str) -> None:
        self.lost_tokens += self.engines[worker].lost_tokens
        self._forget(worker)
        self._events.put(WorkerGone(worker=worker, detail=detail))

    def _tell_unwell(self, worker: WorkerId, engine: SimEngine) -> None:
        if self.engines.get(worker) is engine and engine.is_hung:
            detail = f"worker {worker}: no answer within {self._health_s:g} s"
            self._events.put(WorkerUnwell(worker=worker, detail=detail))

    def _forget(self, worker: WorkerId) -> None:
        engine = self.engines.pop(worker)
        self._epochs[worker] = engine.exports.epoch
        self._busy_gpu_s += engine.busy_s * len(self._specs[worker].gpus)
        del self._specs[worker], self.roles[worker]
        self._asleep.pop(worker, None)
        self._left(end_name(worker))

    def _engine(self, worker: WorkerId) -> SimEngine:
        engine = self.engines.get(worker)
        if engine is None:
            raise WorkerLost(f"fleet: got worker {worker}, want one of {sorted(self.engines)}; start it first")
        return engine
