"""Environments that go wrong on purpose and keep a log of their own, for tests with real processes."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from pathlib import Path

from pearl.records.trajectory import EnvironmentReply

_attempts: Counter[int] = Counter()
_lock = threading.Lock()
_serial = 0


def _number() -> int:
    global _serial
    with _lock:
        _serial += 1
        return _serial


class Echo:
    """Three turns; every observation is unique, so that a trained sample can be told from any other."""

    def __init__(
        self,
        folder: str = "",
        turns: int = 3,
        faults: str = "",
        step_s: float = 0.0,
        named: bool = True,
        always: bool = False,
        build_s: float = 0.0,
    ) -> None:
        time.sleep(build_s)
        self._folder, self._turns, self._faults, self._step_s = folder, turns, faults.split(), step_s
        self._turn = 0
        self._fault = ""
        self._name = ""
        self._named, self._always = named, always
        self._seed = 0

    def reset(self, seed: int) -> str:
        self._name = f"{os.getpid()}-{_number()}"
        with _lock:
            attempt = _attempts[seed]
            _attempts[seed] += 1
        # Only the first attempt at a task goes wrong, so replacements succeed.
        self._fault = self._faults[seed % len(self._faults)] if self._faults and (attempt == 0 or self._always) else ""
        self._turn = 0
        self._seed = seed
        self._log("reset", observation=self._name)
        return self._name if self._named else f"seed {seed}"

    def step(self, action: str) -> EnvironmentReply:
        self._turn += 1
        time.sleep(self._step_s)
        if self._turn == 2:
            self._go_wrong()
        done = self._turn >= self._turns
        observation = f"{self._turn}"
        self._log("step", action=action, observation=observation, done=done)
        return EnvironmentReply(observation=observation, reward=float(len(action) % 3), done=done, success=done)

    def close(self) -> None:
        self._log("close")

    def _go_wrong(self) -> None:
        match self._fault:
            case "raise":
                raise ValueError("made to fail")
            case "hang":
                time.sleep(3600)
            case "die":
                # Once per task: the replacement runs in another process, which does not know of the first attempt.
                marker = Path(self._folder) / f"died-{self._seed}"
                if self._always or not marker.exists():
                    marker.touch()
                    os._exit(1)

    def _log(self, event: str, **fields: object) -> None:
        if self._folder and self._name:
            line = json.dumps({"name": self._name, "event": event, **fields})
            with _lock, (Path(self._folder) / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(line + "\n")


class Nonsense(Echo):
    """Answers its second step with something that is no reply, by the seed."""

    def step(self, action: str) -> EnvironmentReply:
        reply = super().step(action)
        bad: dict[str, object] = {
            "nan": EnvironmentReply(observation="x", reward=float("nan"), done=False),
            "type": "no reply at all",
            "bytes": EnvironmentReply(observation=b"x", reward=0.0, done=False),  # type: ignore[arg-type]
        }
        return bad.get(self._fault, reply) if self._turn == 2 else reply  # type: ignore[return-value]
