"""Two sides that generate from one checkpoint: the embedded engine, and transformers' `generate`.

One thread, float32, temperature 1 over the whole vocabulary, no stop token, so both sides make the same number of tokens.
The engine also gives each token's log-probability; `generate` is not asked for it, which would only slow it down.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import INITIAL_VERSION, EmbeddedEngine
from pearl.records.ids import RequestId, TrajectoryId
from pearl.records.tokens import TokenIds
from pearl.records.turn import Chunk, Sampling, TurnRequest

PAD = 0
PREFILL_CHUNK_TOKENS = 2048
"""Nobody waits for a token here: large chunks let all sequences decode together sooner."""
ATTENTIONS = ("sdpa", "eager")


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the model says, by length, and what it is told then."""

    new_tokens: int
    observation: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One trajectory."""

    prompt: tuple[int, ...]
    turns: tuple[Turn, ...]

    @property
    def new_tokens(self) -> int:
        """Generated over all turns."""
        return sum(turn.new_tokens for turn in self.turns)


class Taken(NamedTuple):
    """Time that some work took."""

    wall_s: float
    cpu_s: float
    """Of the process: what else runs on the machine lengthens it far less."""


class Side(Protocol):
    """Plays conversations."""

    def play(self, conversations: Sequence[Conversation]) -> int:
        """Play them all; returns the generated tokens."""


class EngineSide:
    """The embedded engine: every conversation goes on by itself, its prefix stays in the cache."""

    def __init__(self, folder: Path, *, sequences: int, max_context_tokens: int) -> None:
        self._engine = EmbeddedEngine(
            folder,
            EngineConfig(
                device="cpu",
                max_sequences=sequences,
                max_context_tokens=max_context_tokens,
                prefill_chunk_tokens=PREFILL_CHUNK_TOKENS,
            ),
        )
        self._names = itertools.count()

    def play(self, conversations: Sequence[Conversation]) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks(conversations))

    def chunks(self, conversations: Sequence[Conversation]) -> list[Chunk]:
        """Play them and keep what the engine said, in its order; a request's id ends with its conversation's number."""
        engine, name = self._engine, next(self._names)
        contexts = [TokenIds(conversation.prompt) for conversation in conversations]
        turns = [0] * len(conversations)
        said: list[Chunk] = []
        engine.submit([self._request(name, number, 0, contexts[number], conversations) for number in range(len(turns))])
        while engine.step():
            for chunk in engine.take_chunks(time.monotonic()):
                said.append(chunk)
                number = int(chunk.request.rsplit(".", 1)[1])
                tokens = chunk.token_ids
                assert isinstance(tokens, TokenIds)
                contexts[number] += tokens
                if chunk.end is None:
                    continue
                conversation, turn = conversations[number], turns[number]
                contexts[number] += TokenIds(conversation.turns[turn].observation)
                turns[number] += 1
                if turns[number] < len(conversation.turns):
                    engine.submit([self._request(name, number, turns[number], contexts[number], conversations)])
                else:
                    engine.release(TrajectoryId(f"{name}.{number}"))
        return said

    def _request(
        self, name: int, number: int, turn: int, context: TokenIds, conversations: Sequence[Conversation]
    ) -> TurnRequest:
        return TurnRequest(
            id=RequestId(f"{name}.{turn}.{number}"),
            trajectory=TrajectoryId(f"{name}.{number}"),
            turn=turn,
            context=context,
            sampling=Sampling(seed=(name << 16) + number),
            max_new_tokens=conversations[number].turns[turn].new_tokens,
            min_version=INITIAL_VERSION,
        )


class GenerateSide:
    """transformers: turn by turn, one `generate` over all conversations that go on.

    Contexts of unequal length are padded on the left, all wait for the longest answer of the turn, and each turn computes
    the whole context again, because `generate` keeps no cache between calls.
    """

    def __init__(self, folder: Path, attention: str) -> None:
        from transformers import AutoModelForCausalLM

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype=torch.float32, attn_implementation=attention
        ).eval()
        # The checkpoint's own end token would end sequences early.
        self.model.generation_config.eos_token_id = None

    def play(self, conversations: Sequence[Conversation]) -> int:
        contexts = [list(conversation.prompt) for conversation in conversations]
        generated = 0
        for turn in range(max(len(conversation.turns) for conversation in conversations)):
            going = [number for number, one in enumerate(conversations) if turn < len(one.turns)]
            turns = [conversations[number].turns[turn] for number in going]
            answers = self._generate([contexts[number] for number in going], max(one.new_tokens for one in turns))
            for number, one, answer in zip(going, turns, answers, strict=True):
                contexts[number] += [*answer[: one.new_tokens], *one.observation]
                generated += len(answer[: one.new_tokens])
        return generated

    @torch.inference_mode()
    def _generate(self, contexts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        width = max(map(len, contexts))
        ids = torch.tensor([[PAD] * (width - len(context)) + list(context) for context in contexts])
        mask = torch.tensor([[0] * (width - len(context)) + [1] * len(context) for context in contexts])
        whole = self.model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            do_sample=True,
            top_k=0,  # 50 by default, which costs time and is another distribution than the engine's
            pad_token_id=PAD,
        )
        answers: list[list[int]] = whole[:, width:].tolist()
        return answers


def fastest_generate(folder: Path, conversations: Sequence[Conversation]) -> tuple[GenerateSide, str]:
    """The attention of transformers that is faster here, after a warm-up of both."""
    sides = [(GenerateSide(folder, attention), attention) for attention in ATTENTIONS]
    for side, _ in sides:
        side.play(conversations)
    return min(sides, key=lambda one: min(timed(one[0], conversations).cpu_s for _ in range(2)))


def timed(side: Side, conversations: Sequence[Conversation]) -> Taken:
    """Play conversations.

    Raises:
        RuntimeError: the side did not generate what was asked for.
    """
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    generated = side.play(conversations)
    taken = Taken(time.perf_counter() - began_s, time.process_time() - began_cpu_s)
    want = sum(conversation.new_tokens for conversation in conversations)
    if generated != want:
        raise RuntimeError(f"{type(side).__name__}: got {generated} tokens, want {want}; the sides cannot be compared")
    return taken


@torch.inference_mode()
def logprob_error_and_entropy(
    engine: EngineSide, reference: GenerateSide, conversations: Sequence[Conversation]
) -> tuple[float, float]:
    """Largest difference of the engine's log-probabilities to transformers', and mean entropy in nats, over all tokens."""
    tokens = [list(conversation.prompt) for conversation in conversations]
    logprobs: list[list[float]] = [[] for _ in conversations]
    for chunk in engine.chunks(conversations):
        number = int(chunk.request.rsplit(".", 1)[1])
        assert isinstance(chunk.token_ids, TokenIds)
        tokens[number] += chunk.token_ids.tolist()
        logprobs[number] += chunk.logprobs.tolist()
    errors, entropies = [], []
    for sequence, ours in zip(tokens, logprobs, strict=True):
        logits = reference.model(torch.tensor([sequence])).logits[0, -len(ours) - 1 : -1]
        theirs = torch.log_softmax(logits.double(), -1)
        entropies.append(float(-(theirs.exp() * theirs).sum(-1).mean()))
        drawn = theirs.gather(1, torch.tensor(sequence[-len(ours) :]).unsqueeze(1)).squeeze(1)
        errors.append(float(np.abs(drawn.numpy() - np.array(ours)).max()))
    return max(errors), float(np.mean(entropies))
