"""The simulated world beside NVIDIA's AISimulate: makespans of the same closed loops of sessions, cell by cell.

Both take iteration times from the same measurements, and here from the very same functions: AISimulate's own, tabulated, so
that what is compared is what a simulator does with them. `docs/simulator-validation.md` says what differs and what was
excluded for it.

    python -m venv /tmp/peers && /tmp/peers/bin/pip install 'aisimulate==0.13.0.dev202610270000000085'
    python -m benchmarks.peer_aisimulate --peer-python /tmp/peers/bin/python
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks._closed_loop import Played, Routing, alike, simulate
from benchmarks._report import Check, report
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.shape import parse_shape
from pearl.core.state import Role
from pearl.errors import EngineError
from pearl.silicon.tables import silicon_profiles
from pearl.sim.limits import Limits
from pearl.sim.script import ScriptTurn

VERSION = "0.13.0.dev202610270000000085"
BACKEND, BACKEND_VERSION = "vllm", "0.24.0"
MODELS = {"qwen3-8b": "Qwen/Qwen3-8B", "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B"}
SYSTEMS = {"h100": "h100_sxm", "h200": "h200_sxm"}
BLOCK_TOKENS = 16
MAX_BATCHED_TOKENS, MAX_SEQUENCES = 8192, 256
REUSE_SLACK = 0.03
"""Prefixes of whole blocks cost AISimulate up to 16 tokens a turn."""
TIMEOUT_S = 1200
INSTALL = (
    f"AISimulate is not there: pip install 'aisimulate=={VERSION}' (the extra `peers`; 1.5 GB, so better in a Python of its "
    "own), and give its Python as --peer-python"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One closed loop on one fleet."""

    model: str = "qwen3-8b"
    gpu: str = "h200"
    shape: str = "4C"
    at_once: int = 48
    sessions: int = 144
    turns: int = 8
    new_tokens: int = 1024
    output_tokens: int = 256
    wait_s: float = 0.0
    reference_s: float | None = None
    """What the same version gave elsewhere, where that is known."""

    @property
    def platform(self) -> tuple[str, str]:
        """Model and GPU."""
        return self.model, self.gpu

    def __str__(self) -> str:
        return (
            f"{self.model:<13} {self.gpu} {self.shape:<5} N {self.at_once:>3} K {self.sessions:>3} T {self.turns:>2} "
            f"{self.new_tokens:>4}+{self.output_tokens:<4} Z {self.wait_s:<4g}"
        )


REFERENCE: Mapping[tuple[int, int, float], tuple[float, float, float, float]] = {
    (48, 144, 0.0): (61.5, 60.5, 69.1, 96.4),
    (48, 144, 2.0): (103.4, 97.0, 106.4, 130.4),
    (48, 144, 10.0): (271.4, 263.3, 271.9, 293.5),
    (256, 512, 2.0): (132.0, 514.0, 229.0, 269.0),
}
"""(N, K, Z) -> makespans of 4C, 1P3D, 2P2D, 3P1D on H200, blocks of 64 tokens and its own KV capacity."""


def cells(*, quick: bool) -> list[Cell]:
    """What is compared."""
    shapes = ("4C", "1P3D", "2P2D", "3P1D")
    reference = [
        Cell(shape=shape, at_once=n, sessions=k, wait_s=z, reference_s=value)
        for (n, k, z), values in REFERENCE.items()
        for shape, value in zip(shapes, values, strict=True)
    ]
    if quick:
        return [
            reference[0],
            reference[1],
            reference[4],
            Cell(gpu="h100", shape="1P1D", at_once=8, sessions=16, turns=4),
        ]
    more = [
        Cell(model=model, gpu=gpu, shape=shape, at_once=24, sessions=72, turns=turns, wait_s=wait, **tokens)
        for model in MODELS
        for gpu in SYSTEMS
        for shape, turns, wait, tokens in (
            ("2C", 8, 0.0, {"new_tokens": 512, "output_tokens": 256}),
            ("3C", 12, 1.0, {"new_tokens": 700, "output_tokens": 220}),
            ("1P1D", 6, 1.0, {"new_tokens": 1024, "output_tokens": 128}),
            ("1P2D", 8, 0.0, {"new_tokens": 256, "output_tokens": 512}),
            ("1P4D", 4, 3.0, {"new_tokens": 2048, "output_tokens": 256}),
        )
    ]
    sizes = [
        Cell(gpu="h100", shape="8C", at_once=64, sessions=192, turns=8, wait_s=2.0),
        Cell(
            gpu="h100", shape="1P7D", at_once=64, sessions=192, turns=8, new_tokens=256, output_tokens=384, wait_s=2.0
        ),
        Cell(gpu="h200", shape="2C", at_once=128, sessions=256, turns=6, new_tokens=512, output_tokens=256, wait_s=1.0),
        Cell(gpu="h200", shape="4C", at_once=16, sessions=48, turns=20, new_tokens=694, output_tokens=223, wait_s=3.0),
        Cell(gpu="h200", shape="4C", at_once=50, sessions=150, wait_s=1.0),
        Cell(gpu="h200", shape="2P6D", at_once=64, sessions=192, wait_s=2.0),
    ]
    return [*reference, *more, *sizes]


# -- theirs ---------------------------------------------------------------------------------------------------------


def peer_config(cell: Cell, capacity_tokens: int) -> dict[str, Any]:
    """A cell as AISimulate's `CorePredictionConfig`."""
    pools = {pool.role: pool.workers for pool in parse_shape(cell.shape).pools}
    names = {Role.COLOCATED: "aggregated", Role.PREFILL: "prefill", Role.DECODE: "decode"}
    workers = {
        names[role]: {
            "parallelism": {"replicas": count},
            "scheduler": {"max_batched_tokens": MAX_BATCHED_TOKENS, "max_sequences": MAX_SEQUENCES},
            "kv_cache": {
                "block_size": BLOCK_TOKENS,
                "capacity": {"type": "fixed", "blocks": capacity_tokens // BLOCK_TOKENS},
            },
        }
        for role, count in pools.items()
    }
    return {
        "traffic": {
            "source": {
                "type": "synthetic-session",
                "new_input_tokens_per_turn": cell.new_tokens,
                "output_tokens_per_turn": cell.output_tokens,
                "session": {"turns": cell.turns, "inter_turn_delay_ms": cell.wait_s * 1000},
            },
            "load": {"type": "concurrency", "concurrency": cell.at_once},
            "stop": {"sessions": cell.sessions},
        },
        "engine": {
            "mode": "aggregated" if Role.COLOCATED in pools else "disaggregated",
            "model": MODELS[cell.model],
            "hardware": SYSTEMS[cell.gpu],
            "backend": BACKEND,
            "backend_version": BACKEND_VERSION,
            "workers": workers,
        },
    }


def has_peer(python: str) -> bool:
    """Whether a Python can import AISimulate."""
    code = "import importlib.util as u, sys; sys.exit(u.find_spec('aisimulate') is None)"
    try:
        return subprocess.run([python, "-c", code], capture_output=True, timeout=TIMEOUT_S, check=False).returncode == 0
    except OSError:
        return False


def ask(python: str, question: Mapping[str, Any]) -> dict[str, Any]:
    """Run `_aisimulate.py` in a Python that has it.

    Raises:
        RuntimeError: it failed.
    """
    script = Path(__file__).with_name("_aisimulate.py")
    done = subprocess.run(
        [python, str(script)],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{python} {script.name} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


# -- ours -----------------------------------------------------------------------------------------------------------


def profile_from(shipped: PlatformProfile, table: Mapping[str, Any]) -> PlatformProfile:
    """The shipped profile with AISimulate's iteration times, and KV that moves in no time, as there."""
    return replace(
        shipped,
        iterations=IterationTimes(
            prefill_tokens=tuple(table["prefill_tokens"]),
            decoding=tuple(table["decoding"]),
            context_tokens=tuple(table["context_tokens"]),
            cells_s=tuple(tuple(tuple(row) for row in plane) for plane in table["cells_s"]),
        ),
        hand_off=HandOff(fixed_s=0.0, s_per_byte=0.0),
    )


def ours(cell: Cell, profile: PlatformProfile) -> Played:
    """A cell in the simulated world."""
    turns = [ScriptTurn(cell.new_tokens, cell.output_tokens, cell.wait_s)] * cell.turns
    limits = Limits(max_sequences=MAX_SEQUENCES, chunk_tokens=MAX_BATCHED_TOKENS, iteration_tokens=MAX_BATCHED_TOKENS)
    sessions = alike(cell.at_once, cell.sessions, turns)
    return simulate(sessions, cell.shape, profile, limits, Routing(readback=False, append_prefill_tokens=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A cell, in both."""

    cell: Cell
    peer_s: float | None
    peer_reuse: float
    ours_s: float | None
    ours_reuse: float
    shipped_s: float | None = None
    """Ours with the tables that pearl ships."""
    excluded: str = ""
    """Why the cell does not count."""

    @property
    def error(self) -> float | None:
        """Ours over theirs, less 1."""
        return None if self.peer_s is None or self.ours_s is None else self.ours_s / self.peer_s - 1


def reason(cell: Cell, peer_reuse: float, ours_reuse: float) -> str:
    """What differs in a cell but the arithmetic; "" where nothing does."""
    pools = {pool.role: pool.workers for pool in parse_shape(cell.shape).pools}
    if abs(peer_reuse - ours_reuse) <= REUSE_SLACK:
        return ""
    lookers = pools.get(Role.COLOCATED) or pools[Role.PREFILL]
    if ours_reuse < peer_reuse:
        return "contexts of the decode worker exceed its KV: requests give way in another order"
    if lookers > 1:
        return "it sends turns round robin, here they go where their prefix is"
    return "prefixes are evicted in another order"


def compare(cell: Cell, answer: Mapping[str, Any], profile: PlatformProfile, shipped: PlatformProfile) -> Compared:
    """Judge a cell."""
    nothing = Compared(cell=cell, peer_s=None, peer_reuse=0.0, ours_s=None, ours_reuse=0.0)
    if "error" in answer:
        return replace(nothing, excluded=f"it refuses the cell: {answer['error']}")
    peer_s, peer_reuse = float(answer["makespan_s"]), float(answer["reuse"])
    try:
        played, with_shipped = ours(cell, profile), ours(cell, shipped)
    except EngineError as error:
        return replace(nothing, peer_s=peer_s, peer_reuse=peer_reuse, excluded=f"refused here: {error}")
    return Compared(
        cell=cell,
        peer_s=peer_s,
        peer_reuse=peer_reuse,
        ours_s=played.makespan_s,
        ours_reuse=played.reuse,
        shipped_s=with_shipped.makespan_s,
        excluded=reason(cell, peer_reuse, played.reuse),
    )


# -- the report -----------------------------------------------------------------------------------------------------


def line_of(one: Compared) -> str:
    """A line of the table."""
    numbers = [
        f"{value:8.1f}" if value is not None else f"{'-':>8}"
        for value in (one.cell.reference_s, one.peer_s, one.ours_s, one.shipped_s)
    ]
    error = "-" if one.error is None else f"{one.error:+.1%}"
    verdict = f"excluded: {one.excluded}" if one.excluded else ""
    return (
        f"{one.cell!s}  {' '.join(numbers)} {error:>7}  {one.peer_reuse:5.2f} {one.ours_reuse:5.2f}  {verdict}".rstrip()
    )


def checks_of(found: Iterable[Compared]) -> list[Check]:
    """What the table comes to."""
    compared = list(found)
    counted = [one for one in compared if not one.excluded and one.error is not None]
    errors = [abs(one.error) for one in counted if one.error is not None]
    shipped = [abs(one.shipped_s / one.peer_s - 1) for one in counted if one.shipped_s and one.peer_s]
    known = [one for one in compared if one.cell.reference_s is not None and one.peer_s is not None]
    drift = [abs(one.peer_s / one.cell.reference_s - 1) for one in known if one.peer_s and one.cell.reference_s]
    return [
        Check(name="peer_error_max", value=max(errors, default=None), target="<= 0.10"),
        Check(name="peer_error_mean", value=statistics.fmean(errors) if errors else None),
        Check(name="peer_error_max_shipped_tables", value=max(shipped, default=None)),
        Check(name="peer_against_reference_max", value=max(drift, default=None)),
        Check(name="cells", value=len(compared)),
        Check(name="cells_excluded", value=len(compared) - len(counted)),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peer_aisimulate", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four cells")
    parser.add_argument(
        "--peer-python", default=sys.executable, help="a Python that has AISimulate (default: this one)"
    )
    options = parser.parse_args(arguments)
    if not has_peer(options.peer_python):
        print(INSTALL, file=sys.stderr)
        return 2
    chosen = cells(quick=options.quick)
    platforms = list(dict.fromkeys(cell.platform for cell in chosen))
    shipped = {pair: silicon_profiles(*pair, (1,))[1] for pair in platforms}
    answer = ask(
        options.peer_python,
        {
            "profiles": [
                {"model": MODELS[m], "system": SYSTEMS[g], "backend": BACKEND, "version": BACKEND_VERSION}
                for m, g in platforms
            ],
            "cells": [peer_config(cell, shipped[cell.platform].kv_capacity_tokens) for cell in chosen],
        },
    )
    profiles = {
        pair: profile_from(shipped[pair], table) for pair, table in zip(platforms, answer["profiles"], strict=True)
    }
    still = {pair: replace(profile, hand_off=HandOff(fixed_s=0.0, s_per_byte=0.0)) for pair, profile in shipped.items()}
    print("makespan, s: published reference, AISimulate, ours, ours with shipped tables; error; reuse there and here")
    found = []
    for cell, theirs in zip(chosen, answer["cells"], strict=True):
        found.append(compare(cell, theirs, profiles[cell.platform], still[cell.platform]))
        print(line_of(found[-1]), flush=True)
    return report("peer_aisimulate", checks_of(found), {"quick": options.quick, "version": VERSION})


if __name__ == "__main__":
    sys.exit(main())
