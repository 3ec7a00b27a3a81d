"""Whole runs of the elastic scheduler, on fakes and virtual time, under seeded schedules of all that can go wrong.

Policies with a predictor that is of another mind at each decision, and with their own; GPUs that come and go with notice and
without; workers that die, hang, are unwell, do not start, refuse a role, do not sleep or wake. Of every run:

- *once*: every trajectory ends exactly once, no token is trained twice or staler than allowed (`FakeWorld.check_ledger`);
- *sound*: the fleet state never refuses an event;
- *apart*: no process of rollout is awake on training GPUs while an update runs, no GPU is lent twice or reclaimed while in use;
- *over*: the run ends, in bounded time, with nothing left running, and what became of a plan is told at most once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from pearl.errors import RunFailed
from tests.elastic_runs import Run, random_run

ROOT = Path(__file__).parent.parent.parent
SEEDS, MORE = 60, 4000
AT_ONCE = 20

ALLOWED = ("rollout workers on training GPUs: worker",)
"""A run may fail where a worker on training GPUs does not start: it is said before anything was done."""


def play(seed: int) -> Run:
    run = random_run(seed)
    try:
        run.play()
    except RunFailed as error:
        if not str(error).startswith(ALLOWED):
            raise AssertionError(f"seed {seed}: {error}\n{run.story()}") from error
    except BaseException as error:
        raise AssertionError(f"seed {seed}: {error!r}\n{run.story()}") from error
    return run


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, logger="pearl")


@pytest.mark.parametrize("first", range(0, SEEDS, AT_ONCE))
def test_any_schedule(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        play(seed)


@pytest.mark.chaos
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + MORE, 500))
def test_many_more_schedules(first: int) -> None:
    for seed in range(first, first + 500):
        play(seed)


def test_schedules_do_what_they_are_for() -> None:
    """Else nothing above could fail: borrowing, returning, roles, expansions and shrinks happen, and fail, in a few runs."""
    from pearl.records.journal import ChangeEntry, ChoiceEntry

    steps: set[str] = set()
    ends: set[tuple[str, bool]] = set()
    for seed in range(30):
        journal = play(seed).world.journal
        steps |= {step.split()[0] for entry in journal.of(ChoiceEntry) for _, plan in entry.plan for step in plan}
        ends |= {(kind, done) for entry in journal.of(ChangeEntry) for kind, done, _ in entry.groups}
    assert steps == {"Admit", "Drain", "GiveBack", "LoadWeights", "SetRole", "Sleep", "Start", "Stop", "Wake"}
    assert ends >= {
        ("expand", True),
        ("expand", False),
        ("roles", True),
        ("roles", False),
        ("return", True),
        ("vacate", True),
    }


_PRINT = """
import json, logging, sys
from dataclasses import asdict
from tests.elastic_runs import random_run
logging.disable(logging.CRITICAL)
run = random_run(int(sys.argv[1]))
run.play()
print(json.dumps([asdict(entry) for entry in run.world.journal.entries]))
"""


def test_the_same_seed_gives_the_same_journal_in_any_process() -> None:
    seed = 5
    texts = []
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
        done = subprocess.run(
            [sys.executable, "-c", _PRINT, str(seed)], env=env, capture_output=True, text=True, check=True, timeout=100
        )
        texts.append(done.stdout)
    assert texts[0] == texts[1]
    here = [asdict(entry) for entry in play(seed).world.journal.entries]
    assert json.loads(texts[0]) == json.loads(json.dumps(here))
