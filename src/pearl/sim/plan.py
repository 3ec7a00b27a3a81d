"""Iterations that follow each other without anything else happening, and those that lately did."""

from __future__ import annotations

import math
from collections import deque

from pearl.sim.iterations import DecodeCurve
from pearl.sim.sequence import Sequence

SLACK_S = 1e-9
"""A boundary that is no further away is here: clocks, and sums of seconds, are no more exact."""

_EXACT_S = 1e6
"""Up to here, four steps of the float are less."""


def slack_s(now_s: float) -> float:
    """`SLACK_S`, or a few steps of the float that far from 0."""
    return SLACK_S if now_s < _EXACT_S else max(SLACK_S, 4 * math.ulp(now_s))


class Plan:
    """From one boundary on: a run of iterations that only decode, or one iteration that computes prompts too."""

    __slots__ = ("_context", "_curve", "_scale", "count", "decodes", "end_s", "from_s", "is_cut", "shares")

    def __init__(
        self, from_s: float, shares: list[tuple[Sequence, int]], *, seconds: float = 0.0, decodes: bool = True
    ) -> None:
        """One iteration that computes prompt tokens, `shares`, and takes so long."""
        self.from_s = from_s
        self.end_s = from_s + seconds
        self.count = 1
        self.shares = shares
        self.decodes = decodes
        """Whether every decoding request draws a token in each iteration."""
        self.is_cut = False
        """Whether it holds nothing any more but what had begun."""
        self._curve: DecodeCurve | None = None
        self._scale, self._context = 1.0, 0.0

    @classmethod
    def run(cls, from_s: float, curve: DecodeCurve, scale: float, context_tokens: float, count: int) -> Plan:
        """So many iterations that only decode, the first at a mean context."""
        plan = cls(from_s, [])
        plan._curve, plan._scale, plan._context = curve, scale, context_tokens
        plan.count = count
        plan.end_s = from_s + scale * curve.span_s(context_tokens, count)
        return plan

    def done_by(self, time_s: float) -> int:
        """Iterations that are over."""
        if time_s + slack_s(time_s) >= self.end_s:
            return self.count
        if self._curve is None:
            return 0
        spent_s = time_s - self.from_s + slack_s(time_s)
        return self._curve.within(self._context, self.count, spent_s / self._scale)

    def steps_by(self, time_s: float) -> int:
        """Tokens that each decoding request has drawn."""
        return self.done_by(time_s) if self.decodes else 0

    def cut(self, now_s: float) -> None:
        """Leave out what has not begun."""
        if self.is_cut:
            return
        spent_s = now_s - self.from_s
        if spent_s <= slack_s(now_s):
            self.count = 0
            return
        self.is_cut = True
        if self._curve is not None:
            done = self.done_by(now_s)
            end_s = self.from_s + self._scale * self._curve.span_s(self._context, done)
            if end_s < now_s - slack_s(now_s):
                done += 1
            if done < self.count:
                self.count = done
                self.end_s = self.from_s + self._scale * self._curve.span_s(self._context, done)

    def stop(self, now_s: float) -> None:
        """Leave out what is not over."""
        self.count = self.done_by(now_s)
        self.end_s = min(self.end_s, now_s)

    def split(self, done: int) -> Plan:
        """End behind the first iterations of a run, at least one and not all; what is left of it."""
        assert self._curve is not None, "one iteration cannot be split"
        first_s = self._scale * self._curve.span_s(self._context, done)
        rest = Plan.run(self.from_s + first_s, self._curve, self._scale, self._context + done, self.count - done)
        rest.is_cut, rest.end_s = self.is_cut, self.end_s
        self.count, self.end_s = done, rest.from_s
        return rest

    def shift(self, seconds: float) -> None:
        """Do it later."""
        self.from_s += seconds
        self.end_s += seconds


class History:
    """Plans that are over, and how many tokens each decoding request had drawn before, as far back as asked for."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._plans: deque[tuple[Plan, int]] = deque()

    def add(self, plan: Plan, steps: int) -> None:
        """A plan that is over, and the count when it began."""
        plans = self._plans
        plans.append((plan, steps))
        while plans[0][0].end_s < plan.end_s - self._keep_s and len(plans) > 1:
            plans.popleft()

    def steps_at(self, time_s: float) -> int:
        """The count at a moment of the past."""
        for plan, steps in reversed(self._plans):
            if plan.from_s <= time_s:
                return steps + plan.steps_by(time_s)
        return self._plans[0][1] if self._plans else 0
