"""What becomes of a request when a simulated engine takes it."""

from __future__ import annotations

from pearl.records.ids import WeightVersion, WorkerId
from pearl.records.tokens import Zeros
from pearl.records.turn import Chunk, EndReason, Mode, TurnRequest
from pearl.sim.script import ScriptedTokens
from pearl.sim.sequence import NO_VERSIONS, Sequence


def begin(
    request: TurnRequest, *, worker: WorkerId, limit_tokens: int, version: WeightVersion, refused: str | None = None
) -> Sequence | Chunk:
    """A request that is served, or the only chunk of one that is not: refused, or without a token left to generate."""
    refused = refused or _refusal(request, limit_tokens, version)
    if refused is not None:
        return end_of(request, EndReason.FAILED, f"worker {worker}: request {request.id}: {refused}")
    assert isinstance(request.context, ScriptedTokens), "checked before"
    script, tokens = request.context.script, len(request.context)
    left = script.output_left(request.turn, tokens)
    if left < 1 or tokens == limit_tokens:
        return end_of(request, EndReason.STOP if left < 1 else EndReason.LENGTH)
    count = 1 if request.mode is Mode.PREFILL else min(request.max_new_tokens, limit_tokens - tokens)
    return Sequence(
        request=request,
        script=script,
        context=tokens,
        goal=tokens + min(left, count),
        end=EndReason.STOP if left <= count else EndReason.LENGTH,
        versions=[(tokens, version)],
        kv_version=version,
        imports=request.kv,
    )


def _refusal(request: TurnRequest, limit_tokens: int, version: WeightVersion) -> str | None:
    context = request.context
    if not isinstance(context, ScriptedTokens):
        return f"context: got {type(context).__name__}, want ScriptedTokens"
    if not 1 <= len(context) <= limit_tokens:
        return f"context: got {len(context)} tokens, want 1 .. {limit_tokens}"
    turns = len(context.script.turns)
    if not 0 <= request.turn < turns:
        return f"turn: got {request.turn}, want 0 .. {turns - 1}, the turns of its script"
    if request.max_new_tokens < 1:
        return f"max_new_tokens: got {request.max_new_tokens}, want >= 1"
    if request.export_from < 0:
        return f"export_from: got {request.export_from}, want >= 0"
    if request.min_version > version:
        return f"min_version: got {request.min_version}, want <= {version}; load weights first"
    return None


def end_of(request: TurnRequest, end: EndReason, error: str | None = None) -> Chunk:
    """The one chunk of a request that nothing was generated for."""
    return Chunk(
        request=request.id,
        start=len(request.context),
        token_ids=request.context[:0],
        logprobs=Zeros(),
        versions=NO_VERSIONS,
        end=end,
        error=error,
    )
