"""Supervised steps on scripted play, so that the model answers in the right format before version 0.

Scripted games go through exactly the token layout of rollout (first prompt, answer, append, answer, ...), with the same
limits, and the loss is on answers only.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import nn

from pearl.config.train import WarmupConfig
from pearl.errors import TrainingError
from pearl.ports import Codec
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.trajectory import EnvironmentReply
from pearl.train.batching import TokenSequence, micro_batches
from pearl.train.trainer import GrpoTrainer

GRADIENT_CLIP = 1.0


class Game(Protocol):
    """The environment, synchronous."""

    def reset(self, seed: int) -> str:
        """First observation."""

    def step(self, action: str) -> EnvironmentReply:
        """Answer one action."""

    def close(self) -> None:
        """Free what the game holds."""


class Player(Protocol):
    """Plays one game without a model."""

    def act(self, observation: str) -> str:
        """Answer an observation."""


class ScriptCodec(Codec, Protocol):
    """A codec that can also encode answers."""

    def answer(self, text: str) -> Tokens:
        """Token ids of a scripted completion, stop token included."""


GameT = TypeVar("GameT", bound=Game)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayLimits:
    """Those of rollout."""

    max_turns: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """The warm-up, done."""

    steps: int
    loss_first: float
    """Cross-entropy per trained token, in nats, of the first step."""
    loss_last: float
    trained_tokens: int
    seconds: float


def scripted_trajectory(codec: ScriptCodec, game: Game, player: Player, seed: int, limits: PlayLimits) -> TokenSequence:
    """Play one game and lay it out as rollout would; an answer that no longer fits the context is left out."""
    observation = game.reset(seed)
    tokens = codec.first_prompt(observation)
    ranges: list[tuple[int, int]] = []
    for _ in range(limits.max_turns):
        action = player.act(observation)
        answer = codec.answer(action)
        if len(tokens) + len(answer) > limits.max_context_tokens:
            break
        ranges.append((len(tokens), len(tokens) + len(answer)))
        tokens = tokens + answer
        reply = game.step(action)
        if reply.done:
            break
        observation = reply.observation
        tokens = tokens + codec.append(observation, closed=True)
    if not isinstance(tokens, TokenIds):
        raise TypeError(f"scripted_trajectory: got {type(tokens).__name__} from the codec, want TokenIds")
    # Context behind the last answer trains nothing.
    return TokenSequence.of(tokens.array[: ranges[-1][1] if ranges else 0], ranges)


PlayBatch = Callable[[Callable[[], list[TokenSequence]]], list[TokenSequence]]
"""Runs what plays a batch of games, on a thread of its own where the games may hang."""


def _here(play: Callable[[], list[TokenSequence]]) -> list[TokenSequence]:
    return play()


def warm_up(
    trainer: GrpoTrainer,
    config: WarmupConfig,
    codec: ScriptCodec,
    make_game: Callable[[], GameT],
    make_player: Callable[[GameT, random.Random], Player],
    *,
    limits: PlayLimits,
    seed: int,
    play: PlayBatch = _here,
) -> WarmupReport:
    """Train version 0 in place on `config.steps` batches of fresh scripted games; `play` runs what plays a batch.

    Raises:
        TrainingError: the trainer is past version 0, nothing was played, or the loss is not finite.
    """
    if trainer.version > 0:
        raise TrainingError(
            f"warm-up: the trainer is at version {trainer.version}, want 0; a resumed run is warm already"
        )
    started_s = time.perf_counter()
    rng = random.Random(seed)
    model = trainer.model
    before = model.host_copy()
    adam = torch.optim.Adam(list(model.parameters.values()), lr=config.learning_rate)
    losses: list[float] = []
    trained_tokens = 0
    try:
        for step in range(config.steps):
            rate = config.learning_rate * 0.5 * (1 + math.cos(math.pi * step / config.steps))
            games = play(lambda: [_play(codec, make_game, make_player, rng, limits) for _ in range(config.batch_size)])
            losses.append(_step(trainer, adam, games, rate))
            trained_tokens += sum(len(game.trained) for game in games)
    except BaseException:
        model.load(before)
        raise
    finally:
        adam.zero_grad(set_to_none=True)
    return WarmupReport(
        steps=len(losses),
        loss_first=losses[0] if losses else 0.0,
        loss_last=losses[-1] if losses else 0.0,
        trained_tokens=trained_tokens,
        seconds=time.perf_counter() - started_s,
    )


def _play(
    codec: ScriptCodec,
    make_game: Callable[[], GameT],
    make_player: Callable[[GameT, random.Random], Player],
    rng: random.Random,
    limits: PlayLimits,
) -> TokenSequence:
    game = make_game()
    try:
        player = make_player(game, random.Random(rng.getrandbits(63)))
        return scripted_trajectory(codec, game, player, rng.getrandbits(31), limits)
    finally:
        game.close()


def _step(trainer: GrpoTrainer, adam: torch.optim.Optimizer, games: Sequence[TokenSequence], rate: float) -> float:
    played = [index for index, game in enumerate(games) if len(game.trained)]
    if not played:
        raise TrainingError("warm-up: no scripted game has an answer; rollout.max_context_tokens may be too small")
    model = trainer.model
    tokens = sum(len(games[index].trained) for index in played)
    adam.zero_grad(set_to_none=True)
    total = 0.0
    for micro in micro_batches(games, played, trainer.micro_batch_tokens, model.device):
        loss = -model.score(micro, temperature=1.0).logprobs.sum() / tokens
        torch.autograd.backward(loss)
        total += loss.item()
    norm = float(nn.utils.clip_grad_norm_(model.parameters.values(), GRADIENT_CLIP))
    if not (math.isfinite(total) and math.isfinite(norm)):
        raise TrainingError(f"warm-up: the loss is {total}, the gradient norm {norm}; try a lower warmup.learning_rate")
    for group in adam.param_groups:
        group["lr"] = rate
    adam.step()
    return total
