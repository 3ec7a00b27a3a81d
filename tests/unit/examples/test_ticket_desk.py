"""The example environment: its rules, by hand, and that a run can use it as it is."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from examples.ticket_desk import COMPLAINTS, ROUTES, TICKETS, TicketDesk, TicketDeskPlayer
from pearl.config.load import load_recipe
from pearl.env.registry import build_environment, evaluation_params, player_factory
from pearl.errors import ConfigError
from pearl.records.trajectory import EnvironmentReply

RECIPE = Path(__file__).resolve().parents[3] / "examples" / "ticket_desk.toml"
KIND = "examples.ticket_desk:TicketDesk"


def test_asking_and_routing() -> None:
    desk = TicketDesk(ticket=1)

    assert desk.reset(seed=0) == "no access"
    assert desk.step("?") == EnvironmentReply(observation="wrong code", reward=0.0, done=False)
    end = desk.step(" l ")
    assert (end.reward, end.done, end.success) == (pytest.approx(0.9), True, True)


@pytest.mark.parametrize(
    ("actions", "reward", "success"),
    [
        (["b"], 1.0, True),
        (["l"], 0.0, False),
        (["?", "b"], 0.75, True),
        (["?", "?", "b"], 0.5, True),
        (["?", "?", "?"], 0.0, False),
        (["?", "n"], 0.0, False),
        (["billing"], 0.0, False),
        ([""], 0.0, False),
    ],
)
def test_every_way_to_end(actions: list[str], reward: float, success: bool) -> None:
    desk = TicketDesk(patience=3, ask_cost=0.25, ticket=0)
    desk.reset(seed=0)

    replies = [desk.step(action) for action in actions]

    assert [reply.done for reply in replies] == [False] * (len(actions) - 1) + [True]
    assert sum(reply.reward for reply in replies) == pytest.approx(reward)
    assert replies[-1].success is success
    with pytest.raises(RuntimeError, match="reset first"):
        desk.step("b")


def test_the_seed_is_the_task_and_draws_every_ticket() -> None:
    seen: Counter[str] = Counter()
    for seed in range(300):
        one, other = TicketDesk(), TicketDesk()
        complaint = one.reset(seed)
        assert other.reset(seed) == complaint
        detail = one.step("?").observation
        assert other.step("?").observation == detail
        seen[f"{complaint}/{detail}"] += 1

    assert set(seen) == {f"{ticket.complaint}/{ticket.detail}" for ticket in TICKETS}


def test_a_complaint_alone_never_tells_and_a_detail_always_does() -> None:
    queues: dict[str, set[str]] = {}
    for ticket in TICKETS:
        queues.setdefault(ticket.complaint, set()).add(ticket.queue)

    assert all(len(found) == 2 for found in queues.values())
    assert len({ticket.detail for ticket in TICKETS}) == len(TICKETS)
    assert len(set(ROUTES)) == 4


def test_it_leaves_the_global_generator_alone() -> None:
    random.seed(1)
    want = random.Random(1).random()

    TicketDesk().reset(seed=5)

    assert random.random() == want


@pytest.mark.parametrize("params", [{"patience": 0}, {"ask_cost": -0.1}, {"ask_cost": 0.6}, {"ticket": 6}])
def test_nonsense_is_refused(params: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"environment.params.*got {next(iter(params))} = .*want"):
        build_environment(KIND, params)


def test_the_player_plays_validly_and_is_no_solution() -> None:
    wins = 0
    for seed in range(400):
        desk = TicketDesk()
        player = TicketDeskPlayer(random.Random(seed))
        observation, action, reply = desk.reset(seed), "", None
        while reply is None or not reply.done:
            action = player.act(observation)
            assert action in ("?", *ROUTES)
            reply = desk.step(action)
            observation = reply.observation
        assert reply.success is (reply.reward > 0)
        wins += bool(reply.success)

    # Half routes blindly (1/4), half asks and then understands every second answer: 1/8 + (1/2 + 1/8) / 2 = 0.44.
    assert 0.36 < wins / 400 < 0.52
    assert TicketDeskPlayer(random.Random(0)).act("never heard of") in ROUTES
    assert "never heard of" not in COMPLAINTS


def test_a_run_finds_everything_that_its_recipe_asks_for() -> None:
    recipe = load_recipe(RECIPE).recipe
    kind, params = recipe.environment.kind, recipe.environment.params

    environment = build_environment(kind, params)
    assert environment.reset(0) in COMPLAINTS
    assert environment.step("?").done is False
    environment.close()
    assert [task["ticket"] for task in evaluation_params(kind, params)] == list(range(len(TICKETS)))
    assert player_factory(kind)(environment, random.Random(0)).act("no access") in ("?", *ROUTES)


def test_the_longest_game_fits_the_recipes_context() -> None:
    """With a character tokenizer: texts, one end and one cue token each."""
    recipe = load_recipe(RECIPE).recipe
    longest = max(len(ticket.complaint) + 1 + 2 * (2 + len(ticket.detail) + 1) + 2 for ticket in TICKETS)

    assert longest <= recipe.rollout.max_context_tokens
