"""A request in a simulated engine: how far it is, and the chunks that it delivers."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pearl.records.ids import WeightVersion
from pearl.records.tokens import Zeros
from pearl.records.turn import Chunk, EndReason, KvHandle, TurnRequest, VersionRun, Versions
from pearl.sim.script import Script, ScriptedTokens


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"
    """For room; also after a preemption."""
    IMPORTING = "importing"
    """It has room, and its KV is on its way."""
    PREFILLING = "prefilling"
    """It has more than one token to compute."""
    DECODING = "decoding"
    """It computes one token per iteration."""
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Stint:
    """A time in which a request decoded, and that something else than its end ended."""

    since_s: float
    offset: int
    until_s: float
    length: int
    """Of context and completion when it ended."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One request; its lengths count context and completion together."""

    request: TurnRequest
    script: Script
    context: int
    """Length of the request's context."""
    goal: int
    """Length at which it ends."""
    end: EndReason
    """How it ends there."""
    versions: list[tuple[int, WeightVersion]]
    """`(length, version)`: from this length on, tokens are drawn by this version; lengths rise."""
    kv_version: WeightVersion
    """Oldest weights that computed some of its KV."""
    imports: KvHandle | None = None
    """KV to fetch once there is room."""
    number: int = -1
    """Order of admission."""
    phase: Phase = Phase.WAITING
    length: int = 0
    """While it does not decode."""
    offset: int = 0
    """While it decodes, its length less the engine's count of iterations that decode."""
    since_s: float = 0.0
    """When it began to decode."""
    stints: list[Stint] = field(default_factory=list)
    """Earlier ones, in order."""
    finish: int = 0
    """While it decodes, the engine's count at its end."""
    cached: int = 0
    """While it does not decode, tokens whose KV is there."""
    computed: int = 0
    """Tokens of the context that went through a forward pass for it."""
    single: int = -1
    """Length at which it began to decode with one token of context to compute: that one counts from the next token on."""
    told: int = 0
    """Length up to which it was delivered."""

    def __post_init__(self) -> None:
        self.length = self.told = self.context

    def computed_by(self, length: int) -> int:
        """Tokens of the context computed when it has a length."""
        return self.computed + (0 <= self.single < length)

    def length_at(self, time_s: float, counted: int) -> int:
        """Length at a moment of the past, given the engine's count of decode iterations then; told ones are a lower bound."""
        if self.phase is Phase.DECODING and time_s >= self.since_s:
            return max(self.told, self.offset + counted)
        for stint in reversed(self.stints):
            if time_s >= stint.until_s:
                return max(self.told, stint.length)
            if time_s >= stint.since_s:
                return max(self.told, stint.offset + counted)
        return self.told

    def mark_version(self, version: WeightVersion, length: int) -> None:
        """Tokens from this length on are drawn by this version."""
        if self.versions[-1][0] == length:
            self.versions.pop()
        self.versions.append((length, version))

    def chunk(
        self, length: int, end: EndReason | None, *, kv: KvHandle | None = None, error: str | None = None
    ) -> Chunk:
        """What was not told up to a length; it counts as told."""
        count = length - self.told
        chunk = Chunk(
            request=self.request.id,
            start=self.told,
            token_ids=ScriptedTokens(count, self.script),
            logprobs=Zeros(count),
            versions=self._versions(length),
            end=end,
            kv=kv,
            computed_prompt_tokens=self.computed_by(length),
            error=error,
        )
        self.told = length
        return chunk

    def _versions(self, length: int) -> Versions:
        told = self.told
        if told == length:
            return NO_VERSIONS
        since, version = self.versions[-1]
        if since <= told:
            return Versions((VersionRun(version=version, tokens=length - told),))
        ends = [start for start, _ in self.versions[1:]] + [length]
        return Versions.of(
            (version, min(end, length) - max(start, told))
            for (start, version), end in zip(self.versions, ends, strict=True)
        )


NO_VERSIONS = Versions()
