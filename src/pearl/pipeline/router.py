"""The router: serves turns on workers and keeps every generated token through whatever happens to them.

Laws:

- *placed*: where and in which way a turn is served is `pearl.pipeline.placement`'s choice;
- *kept*: when a worker leaves, drains or dies, what it delivered stays and the turn is continued elsewhere from there;
- *never needed*: KV on its way between workers saves work and decides nothing. Where it is lost, late or refused, the
  context is computed again, and a turn whose hand-off failed is served whole from then on;
- *given back*: a handle is released at its owner when the importer has answered, when a newer one replaces it, or with its
  trajectory, and a prefix when its trajectory leaves the worker or ends;
- *bounded*: a turn is attempted at most `max_turn_attempts` times, a prefill with its decode being one attempt; a drain
  takes at most `DRAIN_TIMEOUT_S`; the caller bounds its whole wait;
- *alive*: when a turn is given up and its worker said nothing, about any request, for `silence_s` or more, the worker is
  lost: one that answers every call and generates nothing is otherwise found by nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pearl.core.state import Role
from pearl.errors import EngineError, WeightsError, WorkerLost
from pearl.pipeline.concurrency import Changed, GuardExpired, Nursery, guard
from pearl.pipeline.placement import Need, Placement, Way, left_behind
from pearl.pipeline.seat import Seat
from pearl.pipeline.standings import Standings
from pearl.pipeline.trails import Trail, Trails
from pearl.pipeline.turns import Pending, RouterCounts, Turn, TurnJob
from pearl.ports import Engine
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.training import LoadMode, Manifest
from pearl.records.turn import Completion, EndReason, KvHandle, Mode, TurnRequest

_log = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 60.0
"""For a worker to end what it has at the next token boundary; a load under way comes first."""


class Router:
    """Sends turns to workers; one per run."""

    def __init__(
        self,
        nursery: Nursery,
        max_turn_attempts: int,
        on_lost: Callable[[WorkerId, str], None],
        *,
        load_timeout_s: float = 600.0,
        silence_s: float = 600.0,
        append_prefill_tokens: int = 64,
        readback: bool = True,
    ) -> None:
        self._nursery = nursery
        self._max_attempts = max_turn_attempts
        self._on_lost = on_lost
        self._load_timeout_s = load_timeout_s
        self._silence_s = silence_s
        self._append_tokens = append_prefill_tokens
        self._readback = readback
        self._seats: dict[WorkerId, Seat] = {}
        self._standings = Standings(self._seats)
        self._trails = Trails()
        self._changed = Changed()
        self._requests = 0
        self.counts = RouterCounts()

    # --- workers -------------------------------------------------------------------------------------------------

    def admit(self, worker: WorkerId, engine: Engine, version: WeightVersion, role: Role = Role.COLOCATED) -> None:
        """Let a started worker, whose weights are loaded, serve."""
        if worker in self._seats:
            self._withdraw(worker)
        seat = Seat(worker, engine, version, role, self._lose, self._changed.notify, self._standings.eased)
        self._seats[worker] = seat
        self._nursery.spawn(seat.listen(), name=f"router: events of worker {worker}")
        self._nursery.spawn(seat.send(), name=f"router: requests to worker {worker}")
        self._workers_changed()

    def retire(self, worker: WorkerId, detail: str) -> None:
        """Forget a worker that is gone; its turns go on elsewhere. Repeating it does nothing."""
        if worker not in self._seats:
            return
        self._withdraw(worker)
        self.counts.worker_losses += 1
        _log.warning("worker %d lost: %s", worker, detail)

    def close(self) -> None:
        """Forget all workers, because they are about to be stopped: that is no loss."""
        for worker in self.workers:
            self._withdraw(worker)

    def leave(self, worker: WorkerId) -> None:
        """Forget a worker that is about to be stopped or put to sleep: that is no loss. Unknown ones are ignored."""
        if worker in self._seats:
            self._withdraw(worker)

    @property
    def append_tokens(self) -> int:
        """A decode worker computes at most so many new tokens of a turn itself."""
        return self._append_tokens

    @append_tokens.setter
    def append_tokens(self, tokens: int) -> None:
        self._append_tokens = tokens

    async def drain(self, worker: WorkerId) -> bool:
        """Give a worker nothing new, interrupt what it has, and wait until its engine has nothing left.

        `set_role` lets it serve again. False: the worker is unknown, or was lost meanwhile; one that does not end what it
        has in time is.
        """
        seat = self._seats.get(worker)
        if seat is None:
            return False
        seat.drain()
        # Turns that were to be handed to it choose again, and so may those that wait.
        self._workers_changed()
        while not (seat.lost or seat.idle):
            # An engine that loads weights answers behind that, and the load has a bound of its own.
            await self._changed.until(lambda: True if seat.lost or seat.idle or not seat.loading else None)
            try:
                async with guard(DRAIN_TIMEOUT_S, f"worker {worker}: drain"):
                    await self._changed.until(lambda: True if seat.lost or seat.idle else None)
            except GuardExpired as error:
                if not seat.loading:
                    self._lose(seat, str(error))
        return not seat.lost

    def set_role(self, worker: WorkerId, role: Role) -> None:
        """Let a drained worker serve in a role; the prefixes that it holds stay its own. Unknown workers are ignored."""
        seat = self._seats.get(worker)
        if seat is not None:
            seat.role, seat.draining = role, False
            self._workers_changed()

    def role(self, worker: WorkerId) -> Role | None:
        """The role of a serving worker."""
        seat = self._seats.get(worker)
        return seat.role if seat else None

    def _withdraw(self, worker: WorkerId) -> None:
        self._seats.pop(worker).withdraw()
        self._trails.drop_worker(worker)
        self._workers_changed()

    def _workers_changed(self) -> None:
        self._standings.changed()
        self._changed.notify()

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        """Serving workers, draining ones included, in slot order."""
        return tuple(sorted(self._seats))

    @property
    def served_version(self) -> WeightVersion | None:
        """The oldest weights that a serving worker holds; None when nobody serves."""
        return min((seat.version for seat in self._seats.values()), default=None)

    def engine(self, worker: WorkerId) -> Engine | None:
        """The engine of a serving worker."""
        found = self._seats.get(worker)
        return found.engine if found else None

    async def load(self, manifest: Manifest, mode: LoadMode) -> None:
        """Load new weights into every serving worker; one that cannot is given up."""
        loads = [self._load(self._seats[worker], manifest, mode) for worker in self.workers]
        await asyncio.gather(*loads)

    async def _load(self, seat: Seat, manifest: Manifest, mode: LoadMode) -> None:
        seat.loading = True
        try:
            async with guard(self._load_timeout_s, f"worker {seat.id}: loading weights {manifest.version}"):
                await seat.engine.load(manifest, mode)
        except (WorkerLost, WeightsError, GuardExpired) as error:
            self._lose(seat, f"loading weights {manifest.version}: {error}")
            return
        finally:
            seat.loading = False
        seat.version = max(seat.version, manifest.version)
        if mode is LoadMode.RECOMPUTE:
            for trajectory, handle in self._trails.void(seat.id, manifest.version):
                self._give_back(trajectory, handle)
        self._workers_changed()

    # --- turns ---------------------------------------------------------------------------------------------------

    async def generate(self, job: TurnJob) -> Completion:
        """Generate one turn.

        Raises:
            EngineError: no worker could serve it within the bound on attempts.
        """
        turn, trail = Turn.of(job), self._trails.of(job.trajectory)
        for trajectory, handle in self._trails.expired(asyncio.get_running_loop().time()):
            self._give_back(trajectory, handle)
        for _ in range(self._max_attempts):
            placed = self._place(turn, trail)
            if placed is None:
                placed = await self._changed.until(lambda: self._place(turn, trail))
            self._leave(job.trajectory, trail, placed)
            if placed.prefill is None:
                if placed.way is Way.APPEND and not turn.appended:
                    turn.appended = True
                    self.counts.appended_turns += 1
                await self._request(placed.generator, turn, trail)
            else:
                await self._hand_off(turn, trail, placed.prefill, placed.generator)
            if turn.end is not None:
                self.counts.turns += 1
                self.counts.generated_tokens += len(turn.token_ids)
                self.counts.computed_prompt_tokens += turn.computed
                return turn.completion()
            self.counts.continued += 1
        raise EngineError(
            f"trajectory {job.trajectory}, turn {job.turn}: given up after {self._max_attempts} attempts on workers "
            f"{turn.workers}: {turn.error or 'each was interrupted'}"
        )

    def release(self, trajectory: TrajectoryId) -> None:
        """Let every worker that holds a prefix or a handle of a trajectory forget it."""
        trail = self._trails.pop(trajectory)
        if trail is None:
            return
        for worker in trail.held:
            self._seats[worker].release(trajectory)
        if trail.readback is not None:
            self._give_back(trajectory, trail.readback)

    def _place(self, turn: Turn, trail: Trail) -> Placement[Seat] | None:
        need = Need(turn.tokens, turn.job.min_version, trail.held, turn.failed, self._append_tokens, turn.whole)
        return self._standings.choose(need)

    def _leave(self, trajectory: TrajectoryId, trail: Trail, placed: Placement[Seat]) -> None:
        """Release prefixes that nobody will look for."""
        held = trail.held
        if len(held) > 1 or (held and placed.generator.id not in held):
            for worker in left_behind(self._seats, held, placed):
                del held[worker]
                self._seats[worker].release(trajectory)

    async def _hand_off(self, turn: Turn, trail: Trail, prefill: Seat, generator: Seat) -> None:
        """The first token from the prefill worker, the rest from the generator."""
        trajectory = turn.job.trajectory
        readback = self._take_readback(trajectory, trail, prefill)
        generator.load += 1
        try:
            first, end = await self._request(
                prefill,
                turn,
                trail,
                mode=Mode.PREFILL,
                kv=readback,
                export_from=trail.held.get(generator.id, 0),
            )
        finally:
            generator.ease()
        handle = first.kv
        goes_on = end is EndReason.LENGTH and turn.end is None
        if not goes_on or generator.draining or generator.lost or generator.role is not Role.DECODE:
            self._give_back(trajectory, handle)
            return
        if handle is None or prefill.lost:
            # Nothing to hand over: the generator computes what it lacks.
            await self._request(generator, turn, trail)
            return
        self.counts.handoffs += 1
        rest, _ = await self._request(
            generator,
            turn,
            trail,
            mode=Mode.DECODE,
            kv=handle,
            # A turn that was handed over is the best sign that the next one will be.
            export_kv=self._readback,
            export_from=trail.held.get(prefill.id, 0),
        )
        if rest.kv is not None and not generator.lost:
            self._give_back(trajectory, trail.readback)
            self._trails.keep(trajectory, trail, rest.kv)

    def _take_readback(self, trajectory: TrajectoryId, trail: Trail, prefill: Seat) -> KvHandle | None:
        """The handle that was kept for the next prefill, unless it has expired or tells this worker nothing."""
        handle, trail.readback = trail.readback, None
        if handle is None:
            return None
        expired = handle.expires_s <= asyncio.get_running_loop().time()
        if expired or not handle.start <= trail.held.get(prefill.id, 0) < handle.tokens:
            self._give_back(trajectory, handle)
            return None
        self.counts.readbacks += 1
        return handle

    def _give_back(self, trajectory: TrajectoryId, handle: KvHandle | None) -> None:
        if handle is not None and (owner := self._seats.get(handle.owner)) is not None:
            owner.release(trajectory, handle)

    # --- one request ---------------------------------------------------------------------------------------------

    async def _request(
        self,
        seat: Seat,
        turn: Turn,
        trail: Trail,
        *,
        mode: Mode = Mode.COLOCATED,
        kv: KvHandle | None = None,
        export_kv: bool = False,
        export_from: int = 0,
    ) -> tuple[Pending, EndReason]:
        """Ask a worker for what is left of a turn, and join what it gives."""
        self._requests += 1
        job = turn.job
        request = TurnRequest(
            id=RequestId(f"{job.trajectory}/{job.turn}#{self._requests}"),
            trajectory=job.trajectory,
            turn=job.turn,
            context=job.context + turn.token_ids if turn.workers else job.context,
            sampling=job.sampling,
            max_new_tokens=turn.left,
            min_version=job.min_version,
            mode=mode,
            kv=kv,
            export_kv=export_kv,
            export_from=export_from,
        )
        if kv is not None:
            self.counts.handoff_bytes += kv.size_bytes
        trail.held.setdefault(seat.id, 0)
        pending = seat.begin(request, None if kv is None else lambda: self._give_back(job.trajectory, kv))
        try:
            end = await pending.ended
        except asyncio.CancelledError:
            self._lose_if_silent(seat, pending)
            self._give_back(job.trajectory, pending.kv)
            raise
        finally:
            seat.end(pending)
            if kv is not None:
                pending.answer()
        turn.take(seat.id, pending, end)
        if seat.lost:
            trail.held.pop(seat.id, None)
        else:
            trail.note(seat.id, len(request.context), len(pending.token_ids), end)
        if end is EndReason.FAILED:
            self._blame(turn, seat, pending)
        return pending, end

    def _blame(self, turn: Turn, seat: Seat, pending: Pending) -> None:
        """KV that came along is the first suspect; without it, the worker is."""
        self.counts.failed_requests += 1
        self._give_back(turn.job.trajectory, pending.kv)
        turn.error, pending.kv = pending.error, None
        if pending.request.kv is None:
            turn.failed[seat.id] = None
        else:
            self.counts.failed_handoffs += 1
            turn.whole = turn.whole or pending.request.mode is Mode.DECODE
        job = turn.job
        _log.warning("turn %s/%d failed on worker %d: %s", job.trajectory, job.turn, seat.id, pending.error)

    def _lose_if_silent(self, seat: Seat, pending: Pending) -> None:
        silent_s = asyncio.get_running_loop().time() - max(seat.heard_s, pending.began_s)
        if silent_s >= self._silence_s:
            self._lose(seat, f"silent for {silent_s:g} s with requests to work on")

    def _lose(self, seat: Seat, detail: str) -> None:
        if seat.lost:
            return
        self.retire(seat.id, detail)
        self._on_lost(seat.id, detail)
