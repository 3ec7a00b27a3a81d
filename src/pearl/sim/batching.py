"""What a simulated engine does, iteration by iteration: pure, driven by "advance to time t".

Laws of continuous batching:

- *decode*: every request with one token to compute is in every iteration, and draws a token at its end;
- *prefill*: longer remainders share the prompt budget, in the order in which they began. CHUNKED, in the same iterations;
  ALONE, in iterations of their own, in which nothing decodes;
- *admission*: first come, first served, while there are seats, and room for the whole context beside what the others need
  for their next token;
- *growth*: where the next tokens have no room, the request admitted last gives its up, and is computed again when there is;
- *boundary*: whatever happens from outside takes effect at the end of the iteration under way, and at once between two.

Iterations in which only tokens are drawn are not looked at one by one: a *run* of them ends with the first request that
ends or with the last free token of memory, and is cut at the next boundary when something happens. Law, *same*: nothing
but the time that it takes to simulate depends on `longest_run`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

from pearl.ports import EngineStats
from pearl.records.ids import HandleId, RequestId, TrajectoryId, WeightVersion
from pearl.records.training import LoadMode
from pearl.records.turn import EndReason
from pearl.sim.iterations import IterationCosts
from pearl.sim.kv import KvExports
from pearl.sim.limits import Limits, Mixing
from pearl.sim.plan import History, Plan, slack_s
from pearl.sim.prefix_cache import PrefixCache
from pearl.sim.roster import Roster
from pearl.sim.sequence import Phase, Sequence


class Batching:
    """The requests of one engine. Times never fall from call to call."""

    def __init__(
        self, costs: IterationCosts, limits: Limits, cache: PrefixCache, exports: KvExports, *, keep_s: float = 0.0
    ) -> None:
        """`keep_s`: how far back `length_at` may ask."""
        self._costs, self._limits, self._cache = costs, limits, cache
        self.roster = Roster(limits.max_sequences, cache, exports)
        self.scale = 1.0
        """Iterations take so many times what the profile says; a change takes effect at the next boundary."""
        self._arrived: list[Sequence] = []
        """Their import is done; takes effect at the boundary."""
        self._leaving: list[Sequence] = []
        """Interrupted; likewise."""
        self._pauses = 0
        self._frozen_s: float | None = None
        self._plan: Plan | None = None
        self._history = History(keep_s)

    # -- time -------------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float | None:
        """When `advance` is wanted next; None: nothing happens by itself."""
        if self._frozen_s is not None:
            return None
        plan = self._plan
        if plan is not None and (plan.is_cut or not self.roster.waiting):
            return plan.end_s
        free_s = self._cache.soonest_end_s if self.roster.waiting and not self._pauses else None
        if plan is None:
            return free_s
        return plan.end_s if free_s is None else min(plan.end_s, free_s)

    @property
    def is_between(self) -> bool:
        """Whether no iteration is under way."""
        return self._plan is None

    def advance(self, now_s: float) -> None:
        """Do what is over by now."""
        if self._frozen_s is not None:
            return
        limit_s = now_s + slack_s(now_s)
        while self._plan is not None and self._plan.end_s <= limit_s:
            plan = self._plan
            self._apply(plan)
            self._begin(plan.end_s)
        if self.roster.waiting and not self._pauses and (self._plan is None or not self._plan.is_cut):
            free_s = self._cache.soonest_end_s
            if free_s is not None and free_s <= now_s:
                self._change(now_s)

    def steps_by(self, now_s: float) -> int:
        """Tokens that each decoding request has drawn in the plan under way."""
        plan = self._plan
        return 0 if plan is None else plan.steps_by(now_s if self._frozen_s is None else min(now_s, self._frozen_s))

    def stats(self, now_s: float, *, kept_back: int = 0) -> EngineStats:
        """Counters and load, iterations under way included; `kept_back` requests wait elsewhere."""
        roster, counts, plan = self.roster, self.roster.counts, self._plan
        new_tokens = roster.decoding * self.steps_by(now_s)
        if self._frozen_s is not None:
            now_s = min(now_s, self._frozen_s)
        return EngineStats(
            version=roster.version,
            running=len(roster.running),
            waiting=len(roster.waiting) + kept_back,
            kv_used_tokens=min(self._cache.used_tokens + new_tokens, self._cache.capacity_tokens),
            generated_tokens=counts.generated_tokens + new_tokens,
            computed_prompt_tokens=counts.computed_prompt_tokens,
            iterations=counts.iterations + (0 if plan is None else plan.done_by(now_s)),
            busy_s=counts.busy_s + (0.0 if plan is None else max(0.0, now_s - plan.from_s)),
        )

    def length(self, sequence: Sequence, steps: int) -> int:
        """Length of a request now, given `steps_by(now)`."""
        length = self.roster.length(sequence)
        return length + steps if sequence.phase is Phase.DECODING else length

    def length_at(self, sequence: Sequence, time_s: float) -> int:
        """Length of a request at a moment that is no longer ago than `keep_s`."""
        plan = self._plan
        if plan is None or time_s < plan.from_s:
            return sequence.length_at(time_s, self._history.steps_at(time_s))
        return sequence.length_at(time_s, self.roster.steps + self.steps_by(time_s))

    # -- from outside -----------------------------------------------------------------------------------------------

    def submit(self, sequences: Many[Sequence], now_s: float) -> None:
        """Queue requests that can be served."""
        self.advance(now_s)
        is_blocked = bool(self.roster.waiting)
        for sequence in sequences:
            self.roster.add(sequence)
        if not is_blocked:
            # Behind one that has no room nobody is admitted, whatever boundary it is.
            self._change(now_s)

    def interrupt(self, ids: Many[RequestId], now_s: float) -> None:
        """End requests at the next boundary; unknown ones are ignored."""
        self.advance(now_s)
        found = [sequence for sequence in map(self.roster.requests.get, ids) if sequence is not None]
        if found:
            self._leaving += found
            self._change(now_s)

    def imported(self, sequence: Sequence, now_s: float) -> None:
        """The KV of an importing request is there."""
        self.advance(now_s)
        if sequence.phase is Phase.IMPORTING:
            self._arrived.append(sequence)
            self._change(now_s)

    def fail(self, sequence: Sequence, error: str, now_s: float) -> None:
        """An importing request cannot be served."""
        if sequence.phase is Phase.IMPORTING:
            self._settle(now_s)
            self.roster.end(sequence, EndReason.FAILED, now_s, error)
            self._change(now_s)

    def forget(self, trajectory: TrajectoryId, now_s: float) -> None:
        """Drop the prefix of a trajectory."""
        self._settle(now_s)
        self._cache.forget(trajectory)

    def unpin(self, trajectory: TrajectoryId, handle: HandleId, now_s: float) -> None:
        """End an export."""
        self._settle(now_s)
        if self._cache.unpin(trajectory, handle) and self.roster.waiting:
            self._change(now_s)

    def pause(self, now_s: float) -> None:
        """Begin no iteration after the one under way; each call wants a `resume`."""
        self.advance(now_s)
        self._pauses += 1
        self._change(now_s)

    def resume(self, now_s: float) -> None:
        """Undo a `pause`."""
        self._pauses -= 1
        self._change(now_s)

    @property
    def is_paused(self) -> bool:
        """Whether no iteration begins."""
        return self._pauses > 0

    def rescale(self, scale: float, now_s: float) -> None:
        """Change `scale`."""
        self.advance(now_s)
        self.scale = scale
        self._change(now_s)

    def freeze(self, now_s: float) -> None:
        """Let time stand still, in the middle of an iteration."""
        self.advance(now_s)
        plan = self._plan
        if plan is not None and 0 < (done := plan.done_by(now_s)) < plan.count:
            # What is over stays where it is when the rest is shifted.
            self._plan = plan.split(done)
            self._apply(plan)
        self._frozen_s = now_s

    def thaw(self, now_s: float) -> None:
        """Undo `freeze`."""
        if self._frozen_s is not None:
            if self._plan is not None:
                self._plan.shift(now_s - self._frozen_s)
            self._frozen_s = None
            self._change(now_s)

    def abandon(self, now_s: float) -> None:
        """End every request with the tokens that it has; the iteration under way comes to nothing."""
        self.advance(now_s)
        plan, self._plan = self._plan, None
        if plan is not None:
            plan.stop(now_s if self._frozen_s is None else self._frozen_s)
            if plan.count:
                self._apply(plan)
        for sequence in list(self.roster.requests.values()):
            self.roster.end(sequence, EndReason.INTERRUPTED, now_s)

    def reload(self, version: WeightVersion, mode: LoadMode, now_s: float) -> int:
        """Go on under new weights, between two iterations; how many tokens of running requests are computed again."""
        assert self._plan is None, "weights change at a boundary"
        return self.roster.reload(version, mode, now_s)

    # -- the inside ----------------------------------------------------------------------------------------------

    def _change(self, now_s: float) -> None:
        """Something happened: let it take effect at the next boundary."""
        if self._frozen_s is not None:
            return
        plan = self._plan
        if plan is None:
            self._begin(now_s)
        else:
            plan.cut(now_s)
            if not plan.count:
                self._begin(max(plan.from_s, now_s))
        self.advance(now_s)

    def _settle(self, now_s: float) -> None:
        """Evict what iterations that are over needed the room of, and end exports, before something else becomes free."""
        tokens = self.roster.decoding * self.steps_by(now_s)
        self._cache.held_tokens += tokens
        self._cache.make_room()
        self._cache.held_tokens -= tokens
        self._cache.expire(now_s)

    def _apply(self, plan: Plan) -> None:
        roster, counts = self.roster, self.roster.counts
        counts.iterations += plan.count
        counts.busy_s += plan.end_s - plan.from_s
        self._history.add(plan, roster.steps)
        if plan.decodes:
            roster.step(plan.count)
        # What was over before is used before what ends now.
        self._cache.make_room()
        self._cache.expire(plan.end_s + slack_s(plan.end_s))
        for sequence, tokens in plan.shares:
            roster.compute(sequence, tokens, plan.end_s)
        roster.finish(plan.end_s)

    def _begin(self, at_s: float) -> None:
        """At a boundary: let everything take effect, and plan what comes."""
        self._plan = None
        self._cache.make_room()
        self._cache.expire(at_s + slack_s(at_s))
        roster = self.roster
        if self._leaving:
            leaving, self._leaving = self._leaving, []
            for sequence in leaving:
                roster.end(sequence, EndReason.INTERRUPTED, at_s)
        if self._arrived:
            arrived, self._arrived = self._arrived, []
            for sequence in arrived:
                if sequence.phase is Phase.IMPORTING:
                    roster.take_import(sequence, at_s)
        if not self._pauses:
            roster.admit(at_s)
            stand_still = roster.prefills and self._limits.mixing is Mixing.ALONE
            preemptions = roster.counts.preemptions
            roster.make_way(0 if stand_still else 1, at_s)
            # Where somebody gave way, there may be more room than was needed: look again at the next boundary.
            longest = self._limits.longest_run if preemptions == roster.counts.preemptions else 1
            self._plan = self._next(at_s, longest)

    def _next(self, at_s: float, longest: int) -> Plan | None:
        roster = self.roster
        decoding = roster.decoding
        if roster.prefills:
            return self._prefill_plan(at_s)
        if not decoding:
            return None
        room = self._cache.free_tokens // decoding
        count = min(roster.steps_left(), room, longest)
        return Plan.run(at_s, self._costs.curve(decoding), self.scale, roster.lengths / decoding, count)

    def _prefill_plan(self, at_s: float) -> Plan:
        limits, roster = self._limits, self.roster
        decoding = roster.decoding if limits.mixing is Mixing.CHUNKED else 0
        budget = limits.chunk_tokens
        if limits.iteration_tokens is not None:
            budget = max(1, min(budget, limits.iteration_tokens - decoding))
        shares: list[tuple[Sequence, int]] = []
        left, contexts = budget, 0
        for sequence in roster.prefills.values():
            tokens = min(left, sequence.length - sequence.cached)
            shares.append((sequence, tokens))
            contexts += sequence.cached + tokens
            left -= tokens
            if not left:
                break
        context = roster.lengths / decoding if decoding else contexts / len(shares)
        seconds = self.scale * self._costs.seconds(budget - left, decoding, context)
        return Plan(at_s, shares, seconds=seconds, decodes=decoding > 0)
