"""Decisions of a run as journal entries, and back from its lines."""

from __future__ import annotations

import math
from pathlib import Path

from pearl.core.actions import GroupKind
from pearl.elastic.executor import GroupOutcome, PlanOutcome
from pearl.elastic.journalled import outcome_entry
from pearl.records.journal import ChangeEntry, ChoiceEntry, StateEntry
from pearl.report.journal import JournalWriter, read_entries
from tests.unit.elastic._scheduling import Scheduling, scheduling
from tests.unit.elastic._stage import LOAD_S, START_S


def test_a_decision_says_what_it_saw_and_what_it_plans() -> None:
    async def test(one: Scheduling) -> None:
        await one.begin()
        first, second = one.choices()
        state = next(e for e in one.stage.journal.of(StateEntry) if e.state_version == first.state_version)
        assert first.state_hash == state.state_hash
        assert (first.number, first.moment, first.reason, first.serving, first.chosen) == (
            0,
            "started",
            "forced",
            "",
            "2C",
        )
        assert (first.serving_close_s, first.close_s, first.borrowed) == (math.inf, 2000.0, 0)
        assert first.plan == [
            [
                "expand",
                ["Start 3 r0 colocated", "Start 4 r1 colocated", "LoadWeights 3", "LoadWeights 4", "Admit 3,4"],
            ]
        ]
        assert {
            name: first.inputs[name] for name in ("unfinished", "live_groups", "needed_groups", "running", "ahead")
        } == {
            "unfinished": 4,
            "live_groups": 2,
            "needed_groups": 2,
            "running": {"0": 4},
            "ahead": [],
        }
        assert (second.serving, second.chosen, second.plan) == ("2C", "2C", [])

    scheduling(test)


def test_an_outcome_says_what_became_of_each_group() -> None:
    groups = (
        GroupOutcome(kind=GroupKind.EXPAND, done=False, why_not="no driver"),
        GroupOutcome(kind=GroupKind.SURPLUS, done=False),
        GroupOutcome(kind=GroupKind.ROLES, done=True),
    )
    entry = outcome_entry(7, 12.5, PlanOutcome(groups=groups, seconds=3.0))
    assert (entry.number, entry.at_s, entry.seconds, entry.done) == (7, 12.5, 3.0, False)
    assert entry.groups == [["expand", False, "no driver"], ["surplus", False, ""], ["roles", True, ""]]


def test_what_is_written_can_be_read_again(tmp_path: Path) -> None:
    async def test(one: Scheduling) -> list[ChoiceEntry | ChangeEntry]:
        await one.begin()
        return [*one.choices(), *one.stage.journal.of(ChangeEntry)]

    entries = scheduling(test)
    assert entries[-2].at_s + 1 > START_S + LOAD_S
    writer = JournalWriter(tmp_path)
    for entry in entries:
        writer.write(entry)
    writer.close()
    assert [*read_entries(tmp_path, ChoiceEntry), *read_entries(tmp_path, ChangeEntry)] == entries
