"""Whole runs with real processes that are killed, hang, raise and answer nonsense: nothing is lost, nothing is done twice."""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections import Counter
from pathlib import Path

import psutil
import pytest

from pearl.cluster import environment_pool
from pearl.cluster.job import run_job
from pearl.cluster.preflight import preflight
from pearl.config.recipe import Recipe
from pearl.env.codec import ChatCodec
from pearl.records.journal import GroupEntry, StateEntry, StepEntry, TrajectoryEntry, TurnEntry
from pearl.records.tokens import TokenIds
from pearl.report.journal import read_stream
from pearl.report.live import JobSummary, MultiReporter
from pearl.report.run_folder import RunFolder

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("local_ray"), pytest.mark.timeout(300)]

TRAINABLE = {"done", "truncated_turns", "truncated_tokens", "truncated_environment"}


def recipe(model: Path, root: Path, **sections: dict[str, object]) -> Recipe:
    tree: dict[str, dict[str, object]] = {
        "run": {"name": "test", "steps": 4, "root": str(root)},
        "model": {"path": str(model)},
        "environment": {
            "kind": "tests.integration.environments:Echo",
            "slots": 32,
            "params": {"folder": str(root)},
        },
        "rollout": {
            "groups_per_batch": 4,
            "group_size": 4,
            "max_context_tokens": 120,
            "env_step_timeout_s": 3,
            "max_replacements": 8,
        },
        "engine": {"max_sequences": 32, "max_context_tokens": 128},
        "sampling": {"max_new_tokens": 4},
        "train": {"learning_rate": 1e-3},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return Recipe.model_validate(tree)


def play(config: Recipe) -> tuple[JobSummary, RunFolder]:
    preflight(config)
    folder = RunFolder.create(config, {})
    return run_job(config, folder, MultiReporter([]), resume=False), folder


class EngineKiller(threading.Thread):
    """Kills a rollout worker's process once turns are under way."""

    def __init__(self, root: Path) -> None:
        super().__init__(daemon=True)
        self._root = root
        self.killed: list[int] = []

    def run(self) -> None:
        deadline_s = time.monotonic() + 120
        while time.monotonic() < deadline_s:
            if sum(path.stat().st_size for path in self._root.glob("*.jsonl")) > 2000:
                for process in psutil.Process().children(recursive=True):
                    if "EngineActor" in " ".join(process.cmdline()):
                        self.killed.append(process.pid)
                        process.kill()
                        return
            time.sleep(0.02)


def check_ledger(root: Path, folder: RunFolder, model: Path) -> None:
    """Hold the environments' own log against the trainer's own log, and the journal against both."""
    codec = ChatCodec(model)
    played: Counter[str] = Counter()
    episodes: dict[str, list[dict[str, object]]] = {}
    for log in sorted(root.glob("*.jsonl")):
        for line in log.read_text().splitlines():
            event = json.loads(line)
            episodes.setdefault(str(event["name"]), []).append(event)
    for events in episodes.values():
        ids = codec.first_prompt(str(events[0]["observation"])).tolist()
        texts = [event for event in events if event["event"] == "step"]
        if len(texts) == 3:
            played[" ".join(str(event["action"]) for event in texts) + "|" + "".join(map(chr, ids))] += 1
    assert max(played.values()) == 1, "two environments share a name"

    trained = [json.loads(line) for line in (folder.path / "trained.jsonl").read_text().splitlines()]
    consumed = [sample for step in trained for sample in step["samples"]]
    assert len({trajectory for trajectory, _, _ in consumed}) == len(consumed), "a trajectory was trained twice"
    assert len({checksum for _, _, checksum in consumed}) == len(consumed), "the same tokens were trained twice"

    # Every trained sample is, token for token, what one environment saw.
    seen = {zlib.crc32(tokens.array.tobytes()): name for name, tokens in _token_histories(codec, episodes)}
    for trajectory, _, checksum in consumed:
        assert int(checksum, 16) in seen, f"{trajectory} was trained on tokens that no environment saw"

    ends = {entry.trajectory: entry for entry in read_stream(folder.journal, "trajectories")}
    ended = [entry.trajectory for entry in read_stream(folder.journal, "trajectories")]
    assert len(ended) == len(ends), "a trajectory ended twice"
    assert all(
        isinstance(end, TrajectoryEntry) and end.status in TRAINABLE
        for t, end in ends.items()
        if t in {c[0] for c in consumed}
    )
    resets = sum(event["event"] == "reset" for events in episodes.values() for event in events)
    assert len(ended) >= resets, "a trajectory that began has not ended"


def _token_histories(codec: ChatCodec, episodes: dict[str, list[dict[str, object]]]) -> list[tuple[str, TokenIds]]:
    """Both ways that each turn may have ended (by a stop token or by length), over all turns of a whole episode."""
    histories: list[tuple[str, TokenIds]] = []
    for name, events in episodes.items():
        steps = [event for event in events if event["event"] == "step"]
        if len(steps) < 3:
            continue
        partial = [codec.first_prompt(str(events[0]["observation"]))]
        for number, step in enumerate(steps):
            grown: list[TokenIds] = []
            for tokens in partial:
                for closed in (True, False):
                    answer = codec.answer(str(step["action"]))
                    completion = answer if closed else answer[:-1]
                    after = tokens + completion
                    if number < 2:
                        after = after + codec.append(str(step["observation"]), closed=closed)
                    grown.append(after)
            partial = grown
        histories += [(name, tokens) for tokens in partial]
    return histories


def test_a_run_with_every_kind_of_fault_loses_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment_pool, "STUCK_AFTER_S", 0.5)
    killer = EngineKiller(tmp_path)
    killer.start()
    config = recipe(
        tiny_model,
        tmp_path,
        environment={
            "kind": "tests.integration.environments:Echo",
            "slots": 32,
            "processes": 2,
            "params": {"folder": str(tmp_path), "faults": "raise none hang none die none", "step_s": 0.02},
        },
    )
    summary, folder = play(config)
    assert killer.killed, "no engine was killed: the test did not test it"
    assert summary.steps == 4
    assert summary.restarts >= 2  # an engine, and an environment process
    for status in ("env_raised", "env_hung", "env_lost"):
        assert summary.faults.get(status, 0) >= 1, f"{status} did not happen: {summary.faults}"
    assert summary.staleness_max <= 1
    assert "raylet" not in capfd.readouterr().out
    check_ledger(tmp_path, folder, tiny_model)
    steps = [entry for entry in read_stream(folder.journal, "steps") if isinstance(entry, StepEntry)]
    assert [step.version for step in steps] == [1, 2, 3, 4]
    assert all(step.samples == 16 for step in steps)


def test_nonsense_replies_are_typed_and_replaced(tiny_model: Path, tmp_path: Path) -> None:
    config = recipe(
        tiny_model,
        tmp_path,
        run={"steps": 2},
        environment={
            "kind": "tests.integration.environments:Nonsense",
            "params": {"folder": str(tmp_path), "faults": "nan none type none bytes none"},
        },
    )
    summary, folder = play(config)
    assert summary.steps == 2
    assert set(summary.faults) == {"env_nonsense"}
    check_ledger(tmp_path, folder, tiny_model)


def test_a_run_is_resumed_from_its_last_checkpoint(tiny_model: Path, tmp_path: Path) -> None:
    config = recipe(tiny_model, tmp_path, run={"steps": 2}, checkpoint={"every_steps": 1})
    _, folder = play(config)
    assert folder.latest_checkpoint() == folder.checkpoints / "step-000002"
    longer = config.model_copy(update={"run": config.run.model_copy(update={"steps": 4})})
    summary = run_job(longer, folder, MultiReporter([]), resume=True)
    assert summary.steps == 4
    steps = [entry.version for entry in read_stream(folder.journal, "steps") if isinstance(entry, StepEntry)]
    assert steps == [1, 2, 3, 4]
    groups = [
        e.group for e in read_stream(folder.journal, "groups") if isinstance(e, GroupEntry) and e.status == "completed"
    ]
    assert sorted(groups, key=lambda g: int(g[1:])) == [f"g{n}" for n in range(16)]
    check_ledger(tmp_path, folder, tiny_model)


def test_the_journal_rebuilds_the_workload_and_the_fleet_state(tiny_model: Path, tmp_path: Path) -> None:
    summary, folder = play(recipe(tiny_model, tmp_path, run={"steps": 1}))
    turns = [entry for entry in read_stream(folder.journal, "turns") if isinstance(entry, TurnEntry)]
    ends = [entry for entry in read_stream(folder.journal, "trajectories") if isinstance(entry, TrajectoryEntry)]
    assert len(turns) == sum(end.turns for end in ends) >= 3 * 16
    assert sum(turn.generated for turn in turns) == sum(end.generated for end in ends)
    states = [entry for entry in read_stream(folder.journal, "decisions") if isinstance(entry, StateEntry)]
    assert [state.event for state in states] == ["GpusJoined", "WorkerAdded", "ActivityChanged", "WorkerRemoved"]
    assert summary.trained_tokens == sum(
        entry.trained_tokens for entry in read_stream(folder.journal, "steps") if isinstance(entry, StepEntry)
    )
    bytes_per_turn = (folder.journal / "turns.jsonl").stat().st_size / len(turns)
    assert bytes_per_turn < 300


def test_prefill_and_decode_in_processes_of_their_own(tiny_model: Path, tmp_path: Path) -> None:
    # Every turn is handed over, and weights that arrive meanwhile leave its KV valid.
    engine = {"shape": "1P1D", "append_prefill_tokens": 0, "on_load": "keep_kv"}
    settings: dict[str, object] = {"max_sequences": 32, "max_context_tokens": 128, **engine}
    summary, folder = play(recipe(tiny_model, tmp_path, run={"steps": 2}, engine=settings))
    assert (summary.steps, summary.restarts, summary.faults) == (2, 0, {})
    check_ledger(tmp_path, folder, tiny_model)
    turns = [entry for entry in read_stream(folder.journal, "turns") if isinstance(entry, TurnEntry)]
    handed = [turn for turn in turns if turn.workers == [0, 1]]
    assert all(turn.workers in ([0, 1], [0]) for turn in turns)  # a prefill may draw the stop token
    assert len(handed) > len(turns) / 2
    for turn in handed:
        # The new tokens and the last one drawn before them on the prefill worker, the first one drawn on the decode worker.
        assert turn.computed == turn.prompt + (1 if turn.turn == 0 else 2)
