"""A turn under way: the job, its requests on workers, and what they have generated together.

Law, *kept*: what a worker delivered stays, whatever becomes of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from pearl.records.ids import TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, Tokens
from pearl.records.turn import Chunk, Completion, EndReason, KvHandle, Mode, Sampling, TurnRequest, Versions

_NO_LOGPROBS = Floats()
_NO_VERSIONS = Versions()


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnJob:
    """A turn to generate, wherever."""

    trajectory: TrajectoryId
    turn: int
    context: Tokens
    sampling: Sampling
    max_new_tokens: int
    min_version: WeightVersion


@dataclass(slots=True)
class Pending:
    """One request on one worker."""

    request: TurnRequest
    began_s: float
    ended: asyncio.Future[EndReason]
    token_ids: Tokens
    on_answer: Callable[[], None] | None = None
    """Called at the first chunk or the end: the KV that came with the request is not needed any more."""
    logprobs: Floats = _NO_LOGPROBS
    versions: Versions = _NO_VERSIONS
    computed: int = 0
    kv: KvHandle | None = None
    """Exported at its end."""
    error: str = ""
    working: bool = True
    """Whether the worker may still generate for it."""

    def take(self, chunk: Chunk) -> None:
        """Append a chunk; a duplicate is dropped, a gap or an overlap ends the request as failed.

        A turn is one or a few chunks, so appending copies little.
        """
        if self.on_answer is not None:
            self.answer()
        if chunk.kv is not None:
            self.kv = chunk.kv
        expected = len(self.request.context) + len(self.token_ids)
        if chunk.start > expected or chunk.start < expected < chunk.start + len(chunk.token_ids):
            self.error = f"a chunk begins at token {chunk.start}, want {expected}: tokens were lost on the way"
            self.working = chunk.end is None
            self.finish(EndReason.FAILED)
            return
        if chunk.start == expected:
            self.token_ids = self.token_ids + chunk.token_ids
            self.logprobs = self.logprobs + chunk.logprobs
            self.versions = self.versions + chunk.versions
        self.computed = max(self.computed, chunk.computed_prompt_tokens)
        if chunk.end is not None:
            self.error = chunk.error or ""
            self.working = False
            self.finish(chunk.end)

    def answer(self) -> None:
        """Tell, once, that the worker has taken over the KV that came with the request, or never will."""
        on_answer, self.on_answer = self.on_answer, None
        if on_answer is not None:
            on_answer()

    def refuse(self, error: str) -> None:
        """End it as failed: the worker did not take it."""
        self.error, self.working = error, False
        self.finish(EndReason.FAILED)

    def finish(self, reason: EndReason) -> None:
        """End it, once."""
        if not self.ended.done():
            self.ended.set_result(reason)


@dataclass(slots=True)
class Turn:
    """What a turn has come to, over all of its requests."""

    job: TurnJob
    token_ids: Tokens
    logprobs: Floats = _NO_LOGPROBS
    versions: Versions = _NO_VERSIONS
    workers: list[WorkerId] = field(default_factory=list)
    computed: int = 0
    failed: dict[WorkerId, None] = field(default_factory=dict)
    """Workers that failed it, through no fault of KV that came along."""
    whole: bool = False
    """No further hand-off: one has failed."""
    appended: bool = False
    end: EndReason | None = None
    """STOP or LENGTH once it is complete."""
    error: str = ""
    """Of the last request that failed."""

    @classmethod
    def of(cls, job: TurnJob) -> Turn:
        """A turn that has nothing yet."""
        return cls(job, job.context[:0])

    @property
    def tokens(self) -> int:
        """Length of the context of its next request."""
        return len(self.job.context) + len(self.token_ids)

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.job.max_new_tokens - len(self.token_ids)

    def take(self, worker: WorkerId, pending: Pending, end: EndReason) -> None:
        """Join what an ended request has delivered."""
        if self.workers:
            self.token_ids = self.token_ids + pending.token_ids
            self.logprobs = self.logprobs + pending.logprobs
            self.versions = self.versions + pending.versions
        else:
            # Most turns are one request.
            self.token_ids, self.logprobs, self.versions = pending.token_ids, pending.logprobs, pending.versions
        self.workers.append(worker)
        self.computed += pending.computed
        # The length of a prefill is one token, and says nothing of the turn's.
        if end is EndReason.STOP or (end is EndReason.LENGTH and pending.request.mode is not Mode.PREFILL):
            self.end = end
        elif self.left <= 0:
            # A worker may be lost after its last token and before its end was told.
            self.end = EndReason.LENGTH

    def completion(self) -> Completion:
        """The turn, complete."""
        assert self.end is not None, "the turn goes on"
        return Completion(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            versions=self.versions,
            end=self.end,
            workers=tuple(self.workers),
            computed_prompt_tokens=self.computed,
        )


@dataclass(slots=True)
class RouterCounts:
    """What happened to turns, for reports."""

    turns: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    continued: int = 0
    """Turns that went on with another request after an interruption or a loss."""
    worker_losses: int = 0
    failed_requests: int = 0
    handoffs: int = 0
    """KV handed from a prefill worker to the one that generates."""
    appended_turns: int = 0
    """Turns whose few new tokens a decode worker computed itself."""
    readbacks: int = 0
    """KV handed back to a prefill worker."""
    failed_handoffs: int = 0
    """Requests that failed with KV that came along, in either direction; they are tried again without."""
    handoff_bytes: int = 0
    """KV handed over, in both directions."""
