"""What limits leave of a script, by hand and as the agent loop counts it; and profiles of scripts, by hand."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.core.distribution import Distribution, constant
from pearl.errors import ProfileError
from pearl.pipeline.agent_loop import AgentLoop, AgentPorts, Attempt
from pearl.pipeline.turns import TurnJob
from pearl.records.ids import GroupId, TrajectoryId, WeightVersion
from pearl.records.tokens import Floats
from pearl.records.trajectory import EnvironmentReply, Task, Trajectory, TrajectoryStatus
from pearl.records.turn import Completion, EndReason, Versions
from pearl.sim.script import Script, ScriptedTokens, ScriptTurn, script_of
from pearl.sim.workload import profile_of, truncated
from pearl.testing.journal import ListSink
from pearl.testing.virtual_time import run_virtual
from pearl.testing.world import fake_recipe, fake_task

THREE = script_of((ScriptTurn(100, 20, 1.5), ScriptTurn(10, 5, 0.0), ScriptTurn(30, 7, 0.5)))
"""Prompts of 100, 130 and 165 tokens; 172 in the end."""


@dataclass
class Player:
    """Router, codec, environments and environment of one script."""

    script: Script
    played: int = 0
    stop_token_ids: tuple[int, ...] = ()
    journal: ListSink = field(default_factory=ListSink)

    async def generate(self, job: TurnJob) -> Completion:
        left = self.script.output_left(job.turn, len(job.context))
        tokens = ScriptedTokens(min(left, job.max_new_tokens), self.script)
        end = EndReason.STOP if len(tokens) == left else EndReason.LENGTH
        return Completion(token_ids=tokens, logprobs=Floats(), versions=Versions(), end=end)

    def release(self, trajectory: TrajectoryId) -> None:
        pass

    def first_prompt(self, observation: str) -> ScriptedTokens:
        return ScriptedTokens(self.script.turns[0].input_tokens, self.script)

    def append(self, observation: str, *, closed: bool) -> ScriptedTokens:
        return ScriptedTokens(self.script.turns[self.played].input_tokens, self.script)

    def action(self, token_ids: ScriptedTokens) -> str:
        return ""

    async def open(self, task: Task) -> Player:
        return self

    async def reset(self, seed: int) -> str:
        return ""

    async def step(self, action: str) -> EnvironmentReply:
        self.played += 1
        return EnvironmentReply(observation="", reward=0.0, done=self.played == len(self.script.turns))

    async def close(self) -> None:
        pass


def played(script: Script, *, max_turns: int, max_context_tokens: int) -> Trajectory:
    """By the agent loop."""
    player = cast(Any, Player(script))
    limits = {"max_turns": max_turns, "max_context_tokens": max(2, max_context_tokens)}
    ports = AgentPorts(
        router=player,
        environments=player,
        codec=player,
        journal=player.journal,
        limits=fake_recipe(
            rollout=limits, engine={"max_context_tokens": 10**9}, sampling={"max_new_tokens": 1}
        ).rollout,
        max_new_tokens=10**9,
        temperature=1.0,
        start_s=0.0,
    )
    attempt = Attempt(
        id=TrajectoryId("g0.0"), group=GroupId("g0"), task=fake_task(), sampling_seed=0, min_version=WeightVersion(0)
    )
    return run_virtual(AgentLoop(ports=ports, attempt=attempt).run())


def counts(script: Script) -> list[tuple[int, int]]:
    return [(turn.input_tokens, turn.output_tokens) for turn in script.turns]


class TestTruncated:
    @pytest.mark.parametrize(
        ("turns", "tokens", "want"),
        [
            (3, 172, [(100, 20), (10, 5), (30, 7)]),
            (99, 171, [(100, 20), (10, 5), (30, 6)]),
            (3, 166, [(100, 20), (10, 5), (30, 1)]),
            (3, 165, [(100, 20), (10, 5)]),
            (2, 10_000, [(100, 20), (10, 5)]),
            (3, 131, [(100, 20), (10, 1)]),
            (3, 130, [(100, 20)]),
            (1, 110, [(100, 10)]),
            (1, 101, [(100, 1)]),
        ],
    )
    def test_by_hand(self, turns: int, tokens: int, want: list[tuple[int, int]]) -> None:
        found = truncated(THREE, max_turns=turns, max_context_tokens=tokens)
        assert found is not None
        assert counts(found) == want
        assert found.starts == THREE.starts[: len(want)]
        assert [turn.env_s for turn in found.turns] == [1.5, 0.0, 0.5][: len(want)]

    def test_what_fits_stays_itself(self) -> None:
        assert truncated(THREE, max_turns=3, max_context_tokens=172) is THREE

    def test_not_even_a_turn(self) -> None:
        assert truncated(THREE, max_turns=3, max_context_tokens=100) is None

    @pytest.mark.parametrize("name", ["max_turns", "max_context_tokens"])
    def test_a_limit_of_nothing(self, name: str) -> None:
        with pytest.raises(ProfileError, match=rf"^{name}: got 0, want >= 1$"):
            truncated(THREE, **{"max_turns": 1, "max_context_tokens": 1, name: 0})

    @given(
        st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6),
        st.integers(1, 7),
        st.integers(2, 80),
    )
    @settings(max_examples=150, deadline=None)
    def test_the_agent_loop_counts_the_same(self, turns: list[tuple[int, int]], limit: int, tokens: int) -> None:
        script = script_of(tuple(ScriptTurn(new, generated, 0.0) for new, generated in turns))
        want = truncated(script, max_turns=limit, max_context_tokens=tokens)
        trajectory = played(script, max_turns=limit, max_context_tokens=tokens)
        seen = [(len(turn.prompt), len(turn.completion.token_ids)) for turn in trajectory.turns]
        assert seen == (counts(want) if want else [])
        whole = want is not None and len(want.turns) == len(script.turns)
        assert (trajectory.status is TrajectoryStatus.DONE) == whole


class TestProfile:
    def test_by_hand(self) -> None:
        other = script_of((ScriptTurn(300, 20, 0.5),))
        found = profile_of([THREE, other])
        assert found.turns == Distribution((1.0, 3.0), (0.5, 0.5))
        assert found.prompt_tokens == Distribution((100.0, 300.0), (0.5, 0.5))
        assert found.new_tokens == Distribution((10.0, 30.0), (0.5, 0.5))
        assert found.generated_tokens == Distribution((5.0, 7.0, 20.0), (0.25, 0.25, 0.5))
        assert found.env_s == Distribution((0.0, 0.5, 1.5), (0.25, 0.5, 0.25))
        # 13 tokens at 10 ms, then 0.625 s.
        assert found.theta == pytest.approx(0.625 / 0.13)

    def test_nothing_comes_later(self) -> None:
        assert profile_of([script_of((ScriptTurn(3, 2, 0.0),))]).new_tokens == constant(0)

    def test_no_scripts(self) -> None:
        with pytest.raises(ProfileError, match=r"^got no trajectory, want at least one$"):
            profile_of([])
