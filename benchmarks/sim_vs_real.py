"""The simulated world beside real engines in Ray: makespans of the same closed loop of scripted sessions.

Workers are processes with the embedded engine, their KV travels through Ray, environments wait on the wall clock. Paced ones
act out a table of iteration times, slowed so far that this machine's cores have little to do; the unpaced one is as fast as
the machine is. The simulated world knows the table only: `pearl profile` writes it, in a process of its own, of a model with
other weights, before and after the runs. Agent loop and router are the same code on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from benchmarks._closed_loop import Played, Routing, Sessions, World, play, session_number, simulate, specs
from benchmarks._report import Check, report
from pearl.cluster.engine_actor import POLL_S
from pearl.cluster.fleet import RayFleet
from pearl.cluster.local_ray import ray_session
from pearl.config.cluster import ClusterConfig
from pearl.config.engine import EngineConfig
from pearl.core.profile import IterationTimes, PlatformProfile, parse_profile
from pearl.errors import WorkerLost
from pearl.pipeline.tasks import derive_seed
from pearl.records.ids import WorkerId
from pearl.records.tokens import TokenIds, Tokens
from pearl.records.trajectory import EnvironmentReply, Task
from pearl.sim.limits import Limits
from pearl.sim.script import Script, ScriptTurn, script_of
from scripts.make_tiny_qwen3 import TinyQwen3, make_tiny_qwen3

MAX_SEQUENCES, MAX_CONTEXT_TOKENS, CHUNK_TOKENS = 16, 512, 128
MODEL_SEED, OTHER_SEED, RUN_SEED = 11, 12, 5
TIME_SCALE = 8.0
"""Of the paced engines: their iterations take some 20 to 250 ms, and the tiny model behind them 1 or 2."""
PACED = ("1C", "3C", "1P2D")
UNPACED = "unpaced 1C"
VOCABULARY = 90
START_TIMEOUT_S = 180.0
PROFILE_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 180.0
STRAY_POLL_S = 2 * POLL_S + 0.5
"""A router that is gone may have asked a worker for chunks; the answer would be missed by the next router."""
ROUTING = Routing(append_prefill_tokens=0)
"""Every turn is handed over, so that what is not modelled has nowhere to hide."""

LARGE = TinyQwen3(hidden=256, layers=6, max_positions=MAX_CONTEXT_TOKENS)
"""What tables are measured of, and what the unpaced engine runs: an iteration takes much longer than a call between processes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is played."""

    repeats: int
    sessions: int
    turns: int


FULL = Size(repeats=5, sessions=16, turns=4)
QUICK = Size(repeats=1, sessions=8, turns=2)


def sessions_of(size: Size, seed: int) -> Sessions:
    """Scripts of unequal turns, the same for a seed; nobody waits for the answer to the last turn."""
    return Sessions(at_once=8, scripts=tuple(_script(size.turns, seed, number) for number in range(size.sessions)))


def _script(turns: int, seed: int, number: int) -> Script:
    random = Random(derive_seed("sim_vs_real", seed, number))
    drawn = [
        ScriptTurn(random.randint(16, 80), random.randint(12, 36), round(random.uniform(0.0, 1.0), 3))
        for _ in range(turns)
    ]
    return script_of((*drawn[:-1], replace(drawn[-1], env_s=0.0)))


# -- the real side --------------------------------------------------------------------------------------------------


class ScriptedEnvironment:
    """Waits on the wall clock, and says how many tokens come next."""

    def __init__(self, script: Script, slots: asyncio.Semaphore) -> None:
        self._script, self._slots = script, slots
        self._turn = 0

    async def reset(self, seed: int) -> str:
        del seed
        return str(self._script.turns[0].input_tokens)

    async def step(self, action: str) -> EnvironmentReply:
        del action
        turns = self._script.turns
        await asyncio.sleep(turns[self._turn].env_s)
        self._turn += 1
        done = self._turn == len(turns)
        new_tokens = 0 if done else turns[self._turn].input_tokens
        return EnvironmentReply(observation=str(new_tokens), reward=0.0, done=done)

    async def close(self) -> None:
        self._slots.release()


class ScriptedPool:
    """Environments of sessions, so many at once, first come first served."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._slots = asyncio.Semaphore(sessions.at_once)

    @property
    def slots(self) -> int:
        return self._sessions.at_once

    async def open(self, task: Task) -> ScriptedEnvironment:
        await self._slots.acquire()
        return ScriptedEnvironment(self._sessions.script(session_number(task), 0), self._slots)


class CountingCodec:
    """As many tokens as an observation says; nothing ends a turn but its length."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return ()

    def first_prompt(self, observation: str) -> TokenIds:
        return self.append(observation, closed=True)

    def append(self, observation: str, *, closed: bool) -> TokenIds:
        del closed
        count = int(observation)
        return TokenIds([2 + (7 * count + 3 * n) % VOCABULARY for n in range(count)])

    def action(self, token_ids: Tokens) -> str:
        return str(len(token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Real:
    """What was measured, by repeat."""

    played: dict[str, list[Played]]
    late_frac: float
    """Of the iterations of paced engines: those that took longer than their table says."""


def engine_config(pacing: Path | None) -> EngineConfig:
    """Of a worker."""
    return EngineConfig(
        device="cpu",
        max_sequences=MAX_SEQUENCES,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        prefill_chunk_tokens=CHUNK_TOKENS,
        pacing=pacing,
        time_scale=TIME_SCALE,
    )


async def measure(small: Path, large: Path, table: Path, sessions: Sessions, repeats: int) -> Real:
    """Play everything once per repeat, in turn, after a round that does not count."""
    timeout_s = ClusterConfig().health_timeout_s
    paced, unpaced = RayFleet(small, engine_config(table), timeout_s), RayFleet(large, engine_config(None), timeout_s)
    played: dict[str, list[Played]] = {name: [] for name in (*PACED, UNPACED)}
    workers = specs("3C")
    try:
        await _start(paced, 3)
        await _start(unpaced, 1)
        warm_up = Sessions(at_once=sessions.at_once, scripts=sessions.scripts[:4])
        for repeat in range(-1, repeats):
            for name in played:
                fleet = unpaced if name == UNPACED else paced
                what = sessions if repeat >= 0 else warm_up
                world = World(fleet=fleet, environments=ScriptedPool(what), codec=CountingCodec())
                async with asyncio.timeout(RUN_TIMEOUT_S):
                    one = await play(what, world, specs(name.removeprefix("unpaced ")), ROUTING)
                await asyncio.sleep(STRAY_POLL_S)
                if repeat >= 0:
                    played[name].append(one)
                    print(f"  repeat {repeat + 1}: {name:<10} {one.makespan_s:7.2f} s", flush=True)
        stats = [await paced.engine(spec.worker).stats() for spec in workers]
    finally:
        await paced.stop([spec.worker for spec in workers], 0.0)
        await unpaced.stop([WorkerId(0)], 0.0)
    late = sum(one.late_iterations for one in stats)
    return Real(played=played, late_frac=late / max(1, sum(one.iterations for one in stats)))


async def _start(fleet: RayFleet, count: int) -> None:
    started = await fleet.start(specs(f"{count}C"), START_TIMEOUT_S)
    if started.failed:
        raise WorkerLost(f"workers did not start: {started.failed}")


# -- the table ------------------------------------------------------------------------------------------------------


def measured_profile(model: Path, out: Path, *, quick: bool) -> PlatformProfile:
    """What `pearl profile` measures of a model, in a process of its own.

    Raises:
        RuntimeError: it failed.
    """
    command = [sys.executable, "-m", "pearl.cli.main", "profile", str(model), "--out", str(out), "--device", "cpu"]
    command += ["--max-context", str(MAX_CONTEXT_TOKENS), "--max-sequences", str(MAX_SEQUENCES)]
    done = subprocess.run(
        [*command, "--quick"] if quick else command,
        capture_output=True,
        text=True,
        timeout=PROFILE_TIMEOUT_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)} ended with status {done.returncode}:\n{(done.stdout + done.stderr)[-2000:]}"
        )
    return parse_profile(out.read_text(encoding="utf-8"), str(out))


def mean_times(one: IterationTimes, other: IterationTimes) -> IterationTimes:
    """Of two tables over the same axes, cell by cell.

    Raises:
        ValueError: other axes.
    """
    axes = [(times.prefill_tokens, times.decoding, times.context_tokens) for times in (one, other)]
    if axes[0] != axes[1]:
        raise ValueError(f"mean of tables: got axes {axes[0]} and {axes[1]}, want equal ones")
    return replace(
        one,
        cells_s=tuple(
            tuple(
                tuple((here + there) / 2 for here, there in zip(row, row_2, strict=True))
                for row, row_2 in zip(plane, plane_2, strict=True)
            )
            for plane, plane_2 in zip(one.cells_s, other.cells_s, strict=True)
        ),
    )


# -- the report -----------------------------------------------------------------------------------------------------


def predicted(sessions: Sessions, name: str, profile: PlatformProfile) -> Played:
    """The same in the simulated world."""
    return simulate(
        sessions,
        name.removeprefix("unpaced "),
        profile,
        Limits(max_sequences=MAX_SEQUENCES, chunk_tokens=CHUNK_TOKENS),
        ROUTING,
        time_scale=1.0 if name == UNPACED else TIME_SCALE,
    )


def checks_of(real: Real, simulated: dict[str, Played]) -> list[Check]:
    """Errors by what was played, of makespans and, as information, of turns."""
    errors: dict[str, float] = {}
    turns: list[Check] = []
    print(f"{'':<10} {'real, s':>9} {'from':>8} {'to':>8} {'ours, s':>9} {'error':>7} {'turn, s':>9} {'ours, s':>9}")
    for name, runs in real.played.items():
        spans, ours = [run.makespan_s for run in runs], simulated[name]
        median_s, turn_s = statistics.median(spans), statistics.median(run.turn_mean_s for run in runs)
        errors[name] = ours.makespan_s / median_s - 1
        turns.append(Check(name=f"turn_error_{_key(name)}", value=ours.turn_mean_s / turn_s - 1))
        print(
            f"{name:<10} {median_s:9.2f} {min(spans):8.2f} {max(spans):8.2f} {ours.makespan_s:9.2f} {errors[name]:+7.1%} "
            f"{turn_s:9.3f} {ours.turn_mean_s:9.3f}"
        )
    return [
        Check(name="sim_error_max", value=max(map(abs, errors.values())), target="<= 0.15"),
        *(Check(name=f"sim_error_{_key(name)}", value=error) for name, error in errors.items()),
        *turns,
        Check(name="late_iterations_frac", value=real.late_frac),
    ]


def _key(name: str) -> str:
    return name.replace(" ", "_").lower()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sim_vs_real", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one small repeat, less than a minute")
    quick = parser.parse_args(arguments).quick
    size = QUICK if quick else FULL
    sessions = sessions_of(size, RUN_SEED)
    with tempfile.TemporaryDirectory(prefix="pearl-bench-") as root:
        folder = Path(root)
        small, large, other = folder / "small", folder / "large", folder / "other"
        make_tiny_qwen3(small, TinyQwen3(max_positions=MAX_CONTEXT_TOKENS, seed=MODEL_SEED))
        make_tiny_qwen3(large, replace(LARGE, seed=MODEL_SEED))
        make_tiny_qwen3(other, replace(LARGE, seed=OTHER_SEED))
        before = measured_profile(other, folder / "before.json", quick=quick)
        with ray_session(ClusterConfig()):
            real = asyncio.run(measure(small, large, folder / "before.json", sessions, size.repeats))
        beside = before
        if not quick:
            after = measured_profile(other, folder / "after.json", quick=False)
            beside = replace(before, iterations=mean_times(before.iterations, after.iterations))
    simulated = {name: predicted(sessions, name, beside if name == UNPACED else before) for name in real.played}
    settings = {"quick": quick, "repeats": size.repeats, "sessions": size.sessions, "turns": size.turns}
    return report("sim_vs_real", checks_of(real, simulated), {**settings, "time_scale": TIME_SCALE})


if __name__ == "__main__":
    sys.exit(main())
