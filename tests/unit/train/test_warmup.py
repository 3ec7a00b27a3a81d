"""Warm-up: the token layout of rollout, and supervised steps that can be repeated."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pearl.config.train import WarmupConfig
from pearl.env.codec import ChatCodec
from pearl.env.guess_number import GuessNumber, GuessNumberPlayer
from pearl.errors import TrainingError
from pearl.records.tokens import TokenIds
from pearl.records.training import TrainingBatch
from pearl.records.trajectory import EnvironmentReply
from pearl.train.batching import TokenSequence
from pearl.train.trainer import GrpoTrainer
from pearl.train.warmup import PlayLimits, WarmupReport, scripted_trajectory, warm_up

MakeBatch = Callable[..., TrainingBatch]
MakeTrainer = Callable[..., GrpoTrainer]
Weights = Callable[[GrpoTrainer], dict[str, torch.Tensor]]

LIMITS = PlayLimits(max_turns=8, max_context_tokens=64)


class Script:
    """Plays given moves and notes what it saw."""

    def __init__(self, *moves: str) -> None:
        self.moves = list(moves)
        self.seen: list[str] = []

    def act(self, observation: str) -> str:
        self.seen.append(observation)
        return self.moves.pop(0)


def play(codec: ChatCodec, target: int, moves: tuple[str, ...], limits: PlayLimits = LIMITS) -> TokenSequence:
    return scripted_trajectory(codec, GuessNumber(target=target), Script(*moves), 0, limits)


@pytest.fixture
def codec(tiny_model: Path) -> ChatCodec:
    return ChatCodec(tiny_model)


def text(codec: ChatCodec, sequence: TokenSequence) -> str:
    # The last token is a stop token, which `action` takes off.
    return codec.action(TokenIds([*sequence.token_ids.tolist(), *codec.stop_token_ids]))


def trained(codec: ChatCodec, sequence: TokenSequence) -> str:
    return codec.action(TokenIds([*sequence.token_ids[sequence.trained].tolist(), *codec.stop_token_ids]))


def test_layout_by_hand(codec: ChatCodec) -> None:
    game = play(codec, 6, ("3", "8", "6"))
    assert text(codec, game) == "1-9>3<eos>higher>8<eos>lower>6<eos>"
    assert trained(codec, game) == "3<eos>8<eos>6<eos>"


def test_an_invalid_answer_ends_the_game_as_in_rollout(codec: ChatCodec) -> None:
    assert text(codec, play(codec, 6, ("3", "what"))) == "1-9>3<eos>higher>what<eos>"


def test_the_player_sees_the_observations(codec: ChatCodec) -> None:
    script = Script("3", "8", "6")
    scripted_trajectory(codec, GuessNumber(target=6), script, 0, LIMITS)
    assert script.seen == ["1-9", "higher", "lower"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (PlayLimits(max_turns=1, max_context_tokens=64), "1-9>3<eos>"),
        (PlayLimits(max_turns=2, max_context_tokens=64), "1-9>3<eos>higher>8<eos>"),
        # "1-9>3<eos>" are 6 tokens, "higher>8<eos>" 9 more.
        (PlayLimits(max_turns=8, max_context_tokens=15), "1-9>3<eos>higher>8<eos>"),
        (PlayLimits(max_turns=8, max_context_tokens=14), "1-9>3<eos>"),
    ],
)
def test_limits(codec: ChatCodec, limits: PlayLimits, expected: str) -> None:
    assert text(codec, play(codec, 6, ("3", "8", "6"), limits)) == expected


def test_no_room_for_any_answer(codec: ChatCodec) -> None:
    assert len(play(codec, 6, ("3",), PlayLimits(max_turns=8, max_context_tokens=5)).trained) == 0


def warm(
    trainer: GrpoTrainer, codec: ChatCodec, *, seed: int = 0, limits: PlayLimits = LIMITS, **config: Any
) -> WarmupReport:
    own = WarmupConfig(**{"steps": 12, "batch_size": 8, "learning_rate": 1e-2, **config})
    return warm_up(
        trainer, own, codec, GuessNumber, lambda game, rng: game.scripted_player(rng), limits=limits, seed=seed
    )


def test_the_model_learns_the_format(make_trainer: MakeTrainer, codec: ChatCodec) -> None:
    trainer = make_trainer()
    report = warm(trainer, codec, steps=40)
    # Untrained: near ln 98 = 4.6. Digit uniform and end of turn certain: (ln 9 + 0) / 2 = 1.1.
    assert report.loss_first > 4
    assert report.loss_last < 1.5
    assert report.steps == 40
    assert report.trained_tokens > 40 * 8 * 2
    assert report.seconds > 0
    assert trainer.version == 0


def test_equal_seeds_give_equal_weights(make_trainer: MakeTrainer, codec: ChatCodec, weights: Weights) -> None:
    trainers = [make_trainer() for _ in range(3)]
    reports = [warm(trainer, codec, seed=seed) for trainer, seed in zip(trainers, (4, 4, 5), strict=True)]
    own = [weights(trainer) for trainer in trainers]
    assert reports[0].loss_last == reports[1].loss_last
    assert all(torch.equal(own[0][name], own[1][name]) for name in own[0])
    assert not all(torch.equal(own[0][name], own[2][name]) for name in own[0])


def test_micro_batches_do_not_matter(make_trainer: MakeTrainer, codec: ChatCodec) -> None:
    losses = [warm(make_trainer(micro_batch_tokens=tokens), codec, steps=3).loss_last for tokens in (40, 10_000)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_no_steps(make_trainer: MakeTrainer, codec: ChatCodec, weights: Weights) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    assert warm(trainer, codec, steps=0).steps == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_only_version_0_can_be_warmed_up(make_trainer: MakeTrainer, make_batch: MakeBatch, codec: ChatCodec) -> None:
    trainer = make_trainer()
    trainer.train(make_batch())
    with pytest.raises(TrainingError, match="at version 1, want 0"):
        warm(trainer, codec)


def test_games_without_answers(make_trainer: MakeTrainer, codec: ChatCodec) -> None:
    with pytest.raises(TrainingError, match=r"rollout\.max_context_tokens may be too small"):
        warm(make_trainer(), codec, limits=PlayLimits(max_turns=4, max_context_tokens=4))


def test_divergence_restores_the_weights(make_trainer: MakeTrainer, codec: ChatCodec, weights: Weights) -> None:
    trainer = make_trainer()
    before = weights(trainer)
    with pytest.raises(TrainingError, match=r"try a lower warmup\.learning_rate"):
        warm(trainer, codec, learning_rate=1e30)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())


def test_games_are_closed_also_when_they_fail(make_trainer: MakeTrainer, codec: ChatCodec) -> None:
    class Fragile(GuessNumber):
        open = 0

        def reset(self, seed: int) -> str:
            Fragile.open += 1
            return super().reset(seed)

        def step(self, action: str) -> EnvironmentReply:
            if action == "7":
                raise RuntimeError("seven")
            return super().step(action)

        def close(self) -> None:
            Fragile.open -= 1

    def player(game: Fragile, rng: random.Random) -> GuessNumberPlayer:
        return game.scripted_player(rng)

    with pytest.raises(RuntimeError, match="seven"):
        warm_up(make_trainer(), WarmupConfig(steps=5), codec, Fragile, player, limits=LIMITS, seed=0)
    assert Fragile.open == 0
