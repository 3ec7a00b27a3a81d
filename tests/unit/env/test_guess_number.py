"""The guessing game: rules, rewards, determinism, its evaluation tasks and its scripted player."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pearl.env.base import Evaluable, Scripted, TextEnvironment
from pearl.env.guess_number import GuessNumber
from pearl.records.trajectory import EnvironmentReply


def play(target: int, *actions: str, **params: Any) -> list[EnvironmentReply]:
    game = GuessNumber(target=target, **params)
    game.reset(0)
    return [game.step(action) for action in actions]


def test_first_observation_is_the_range() -> None:
    assert GuessNumber().reset(0) == "1-9"
    assert GuessNumber(low=0, high=30).reset(0) == "0-30"


def test_answers_point_towards_the_target() -> None:
    first, second, third = play(6, "3", "8", "6")
    assert (first.observation, first.reward, first.done) == ("higher", 0.0, False)
    assert (second.observation, second.reward, second.done) == ("lower", 0.0, False)
    assert (third.reward, third.done, third.success) == (1.0, True, True)


def test_terse_answers_are_signs() -> None:
    observations = [reply.observation for reply in play(6, "3", "8", terse=True)]
    assert observations == ["+", "-"]


@pytest.mark.parametrize(
    ("last", "reward"),
    # Range 1..9, target 1: 0.5 * (1 - |last - 1| / 8).
    [("2", 0.4375), ("5", 0.25), ("9", 0.0)],
)
def test_a_lost_game_pays_by_the_distance_of_the_last_guess(last: str, reward: float) -> None:
    reply = play(1, "9", "9", "9", last)[-1]
    assert (reply.reward, reply.done, reply.success, reply.truncated) == (reward, True, False, False)


def test_a_win_with_the_last_guess_is_a_win() -> None:
    assert play(2, "1", "1", "2", turns=3)[-1].reward == 1.0


@pytest.mark.parametrize("action", ["", "x", "0", "10", "-1", "5.0", "5 5", "٥", "0" * 5000 + "5", "<eos>", "05"])
def test_an_invalid_action_ends_the_game_with_nothing(action: str) -> None:
    (reply,) = play(5, action)
    assert (reply.reward, reply.done, reply.success) == (0.0, True, False)


def test_space_around_a_guess_does_not_matter() -> None:
    assert play(5, " 5\n")[0].success is True


def test_equal_seeds_give_equal_targets_and_all_targets_occur() -> None:
    def target(seed: int) -> int:
        game = GuessNumber(turns=9)
        game.reset(seed)
        return next(guess for guess in range(1, 10) if game.step(str(guess)).success)

    targets = [target(seed) for seed in range(200)]
    assert targets == [target(seed) for seed in range(200)]
    assert set(targets) == set(range(1, 10))


def test_games_do_not_touch_the_global_generator() -> None:
    random.seed(7)
    before = random.getstate()
    GuessNumber().reset(3)
    assert random.getstate() == before


def test_step_outside_a_game_is_an_error() -> None:
    game = GuessNumber(target=5)
    with pytest.raises(RuntimeError, match="call reset"):
        game.step("5")
    game.reset(0)
    game.step("5")
    with pytest.raises(RuntimeError, match="call reset"):
        game.step("5")


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"low": 5, "high": 5}, "low = 5, high = 5"),
        ({"low": -3}, "low = -3"),
        ({"turns": 0}, "turns = 0"),
        ({"target": 10}, r"target = 10, want 1\.\.9"),
    ],
)
def test_senseless_parameters_are_refused(params: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GuessNumber(**params)


def test_evaluation_enumerates_every_target_of_the_recipes_range() -> None:
    assert GuessNumber.evaluation_params() == tuple({"target": target} for target in range(1, 10))
    assert GuessNumber.evaluation_params(low=3, high=5, turns=2) == ({"target": 3}, {"target": 4}, {"target": 5})


def test_it_has_all_the_hooks() -> None:
    environment: TextEnvironment = GuessNumber()
    assert isinstance(environment, Scripted)
    assert isinstance(GuessNumber, Evaluable)


def win_rate(player_seed: int, games: int) -> float:
    rng = random.Random(player_seed)
    wins = 0
    for seed in range(games):
        game = GuessNumber()
        player = game.scripted_player(rng)
        observation, reply = game.reset(seed), None
        while reply is None or not reply.done:
            reply = game.step(player.act(observation))
            observation = reply.observation
        wins += reply.success is True
    return wins / games


def test_the_scripted_player_plays_a_little_better_than_blindly() -> None:
    # Blind guessing wins 1 - (8/9)**4 = 0.376; always consistent guessing wins about 0.8.
    assert 0.40 < win_rate(1, 3000) < 0.55


def test_the_scripted_player_sometimes_ignores_the_answer() -> None:
    game = GuessNumber()
    seconds = []
    for seed in range(400):
        player = game.scripted_player(random.Random(seed))
        first = int(player.act("1-9"))
        if first < 9:
            seconds.append((first, int(player.act("higher"))))
    blind = [second <= first for first, second in seconds]
    # 70 % of the guesses are blind, of which first / 9 land at or below the first, of 1..8: on average 0.7 * 0.5.
    assert 0.25 < sum(blind) / len(blind) < 0.42
    assert all(1 <= second <= 9 for _, second in seconds)


def test_equal_generators_give_equal_players_whatever_the_words() -> None:
    games = GuessNumber(target=7), GuessNumber(target=7), GuessNumber(target=7, terse=True)
    players = [game.scripted_player(random.Random(4)) for game in games]
    observations = [game.reset(0) for game in games]
    for _ in range(3):
        guesses = [player.act(observation) for player, observation in zip(players, observations, strict=True)]
        assert len(set(guesses)) == 1
        observations = [game.step(guess).observation for game, guess in zip(games, guesses, strict=True)]
