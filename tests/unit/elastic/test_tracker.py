"""What the tracker makes of a step's turns and trajectories, by hand."""

from __future__ import annotations

import asyncio

import pytest

from pearl.core.makespan import Profile
from pearl.core.priors import platform_prior, workload_prior
from pearl.core.workload import WorkloadSample, refit_workload
from pearl.elastic.tracker import Tracker
from pearl.records.journal import StepEntry, TrajectoryEntry, TurnEntry
from pearl.testing.journal import ListSink

PROFILE = Profile(workload=workload_prior("webshop"), platform=platform_prior("qwen3-8b-h100"))
SHARE = 0.25


def turn_entry(turn: int, prompt: int, generated: int, *, generate_s: float = 6.0, env_s: float = 2.0) -> TurnEntry:
    return TurnEntry(
        at_s=1.0,
        trajectory="g0.0",
        turn=turn,
        prompt=prompt,
        generated=generated,
        computed=0,
        end="stop",
        versions=[],
        workers=[],
        generate_s=generate_s,
        env_s=env_s,
    )


def end_entry(status: str, turns: int) -> TrajectoryEntry:
    return TrajectoryEntry(
        at_s=1.0,
        trajectory="g0.0",
        group="g0",
        status=status,
        turns=turns,
        generated=0,
        reward=0.0,
        success=None,
        started_s=0.0,
    )


def tracker() -> Tracker:
    return Tracker(sink=ListSink(), profile=PROFILE, share=SHARE)


def test_a_step_is_refitted_as_its_sample_says() -> None:
    one = tracker()
    for entry in (
        turn_entry(0, 500, 40),
        turn_entry(1, 70, 50, generate_s=2.0, env_s=6.0),
        turn_entry(0, 600, 30),
        end_entry("done", 2),
        end_entry("truncated_turns", 9),
        end_entry("cancelled", 1),  # says nothing of how long they are
        end_entry("env_lost", 1),
    ):
        one.write(entry)
    sample = WorkloadSample(
        turns=[2.0, 9.0],
        prompt_tokens=[500.0, 600.0],
        new_tokens=[70.0],
        generated_tokens=[40.0, 50.0, 30.0],
        env_s=[2.0, 6.0, 2.0],
        decoding_share=14 / 24,
    )
    one.refit()
    assert one.profile.workload == refit_workload(PROFILE.workload, sample, SHARE).profile
    assert one.profile.platform is PROFILE.platform
    before, after = PROFILE.workload, one.profile.workload
    assert after.prompt_tokens.mean == pytest.approx(0.75 * before.prompt_tokens.mean + 0.25 * 550)


def test_the_profile_stays_between_refits_and_without_anything_new() -> None:
    one = tracker()
    one.write(turn_entry(0, 5000, 4000))
    assert one.profile is PROFILE
    one.refit()
    refitted = one.profile
    one.refit()
    assert one.profile.workload == refitted.workload  # what was seen counts once


def test_everything_is_passed_on_in_order() -> None:
    sink = ListSink()
    one = Tracker(sink=sink, profile=PROFILE, share=SHARE)
    step = StepEntry(
        at_s=2.0,
        version=1,
        groups=[],
        samples=0,
        trained_tokens=0,
        staleness_tokens={},
        wait_s=0,
        train_s=0,
        publish_s=0,
        reward_mean=0,
        success_mean=None,
    )
    entries = [turn_entry(0, 1, 1), end_entry("done", 1), step]
    for entry in entries:
        one.write(entry)
    asyncio.run(one.flush())
    assert (sink.entries, sink.flushes) == (entries, 1)


def test_numbers_that_are_no_use_are_counted() -> None:
    one = tracker()
    one.write(turn_entry(0, 500, 40, env_s=float("nan")))
    one.refit()
    assert one.ignored > 0
