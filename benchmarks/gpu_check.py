"""Does the embedded engine do on a GPU what it does on a CPU, and how fast? One GPU, at most 8 minutes.

    python -m benchmarks.gpu_check --out gpu.json        needs torch, transformers, safetensors; no Ray, no hub
    python -m benchmarks.gpu_check --device cpu --quick  the same code at small size, where there is no GPU

*contract*: the engine's contract suite (`pearl.testing`) in float32. *pd*: prefill on one engine and decode on another draw
what one engine draws. *load*, *sleep*: new weights, and what sleeping frees. *iterations*: times of a random model of the
shape of Qwen3-8B in bfloat16. *train*: one training step of a small model, on the device.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks._report import Check, report
from pearl.config.engine import EngineConfig
from pearl.config.train import TrainConfig
from pearl.core.profile import IterationTimes
from pearl.engine.embedded.architecture import Architecture, read_architecture
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.measure import GridSpec, grid_spec, measure_iterations
from pearl.engine.embedded.model import Model
from pearl.engine.embedded.rotary import Rotary
from pearl.engine.embedded.threaded import ThreadedEngine
from pearl.engine.embedded.weights import LayerWeights, Place, Weights
from pearl.records.ids import GroupId, RequestId, TrajectoryId, WeightVersion, WorkerId
from pearl.records.tokens import Floats, TokenIds
from pearl.records.training import LoadMode, Manifest, TrainingBatch, TrainingSample
from pearl.records.turn import Chunk, KvHandle, Mode, Sampling, TurnRequest, Versions
from pearl.train.trainer import GrpoTrainer

ROOT = Path(__file__).parent.parent
QWEN3_8B = Architecture(
    vocabulary=151_936,
    hidden=4096,
    intermediate=12_288,
    layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=40_960,
    rotary=Rotary(base=1e6),
    norm_epsilon=1e-6,
    tied=False,
    head_norms=True,
)
"""Sizes of the published configuration; the weights are random."""
SMALL = replace(
    QWEN3_8B,
    vocabulary=512,
    hidden=128,
    intermediate=256,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    max_positions=2048,
)
SLACK = 1e-3
"""Log-probabilities of two ways to the same tokens, in float32 on a GPU."""


@dataclass(slots=True)
class Bench:
    """What every part needs."""

    device: str
    quick: bool
    folder: Path
    """A tiny checkpoint."""
    scratch: Path
    checks: list[Check]

    def engine_config(self, **settings: Any) -> EngineConfig:
        defaults = {"device": self.device, "max_sequences": 16, "max_context_tokens": 512, "progress_interval_s": 0.001}
        return EngineConfig.model_validate({**defaults, **settings})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status, 2 without the device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="a small model in the place of the large one")
    parser.add_argument("--out", type=Path, help="file for the result with its provenance")
    options = parser.parse_args(arguments)
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch finds no GPU here; want one, or --device cpu --quick", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="pearl-gpu-") as scratch:
        bench = Bench(options.device, options.quick, _tiny(Path(scratch)), Path(scratch), [])
        for part in (_contract, _pd, _load_and_sleep, _train):
            _timed_part(part.__name__.strip("_"), partial(part, bench), bench.checks)
        times = _timed_part("iterations", lambda: _iterations(bench), bench.checks)
    if options.out is not None and times is not None:
        options.out.write_text(json.dumps(_document(bench, times), indent=2) + "\n")
    return report("gpu_check", bench.checks, {"device": _device_name(bench), "quick": bench.quick})


def _timed_part(name: str, part: Callable[[], Any], checks: list[Check]) -> Any:
    began_s = time.perf_counter()
    result = part()
    seconds = time.perf_counter() - began_s
    print(f"{name}: {seconds:.1f} s", flush=True)
    checks.append(Check(name=f"{name}_part_s", value=seconds))
    return result


# -- contract ---------------------------------------------------------------------------------------------------------


def _contract(bench: Bench) -> None:
    """Every test of the contract suite, without pytest's runner; the suite itself needs pytest to be installed."""
    if importlib.util.find_spec("pytest") is None:
        print("contract: pytest is not installed, and the contract suites need it")
        bench.checks.append(Check(name="contract_failures", value=None, target="== 0"))
        return
    failures = 0
    passed = 0
    for name, run in _contract_tests(bench):
        try:
            run()
            passed += 1
        except Exception as error:
            failures += 1
            print(f"contract: {name}: {type(error).__name__}: {error}")
    bench.checks += [
        Check(name="contract_failures", value=failures, target="== 0"),
        Check(name="contract_tests", value=passed, target=">= 20"),
    ]


def _contract_tests(bench: Bench) -> Iterator[tuple[str, Callable[[], None]]]:
    from pearl.testing.contracts.engine import EngineContract, EngineSubject

    class OnDevice(EngineContract):
        long_tokens = 300
        logprob_tolerance = SLACK

        @contextlib.asynccontextmanager
        async def engines(self, count: int) -> AsyncIterator[list[EngineSubject]]:
            made = [
                await ThreadedEngine.create(bench.folder, bench.engine_config(), worker=WorkerId(n))
                for n in range(count)
            ]
            try:
                yield [_subject(bench, engine) for engine in made]
            finally:
                for engine in made:
                    with contextlib.suppress(Exception):
                        await engine.close()

    suite = OnDevice()
    for name in sorted(dir(OnDevice)):
        if not name.startswith("test_"):
            continue
        method = getattr(suite, name)
        marks = [mark for mark in getattr(method, "pytestmark", ()) if mark.name == "parametrize"]
        if not marks:
            yield name, method
        for mark in marks:
            for value in mark.args[1]:
                yield f"{name}[{value}]", partial(method, **{mark.args[0]: value})


def _subject(bench: Bench, engine: ThreadedEngine) -> Any:
    from pearl.testing.contracts.engine import EngineSubject

    async def manifest(version: int) -> Manifest:
        return _published(bench, version)

    async def foreign(version: int) -> Manifest:
        return replace(_published(bench, version), model_hash="0123456789abcdef")

    return EngineSubject(
        engine=engine, vocab=read_architecture(bench.folder).vocabulary, manifest=manifest, foreign_manifest=foreign
    )


# -- prefill and decode apart ---------------------------------------------------------------------------------------------


def _pd(bench: Bench) -> None:
    prefill, decode, whole = (
        EmbeddedEngine(bench.folder, bench.engine_config(), worker=WorkerId(number)) for number in range(3)
    )
    moved, same, context = 0.0, True, list(range(2, 66))
    for turn in range(5):
        want, _ = _turn(whole, f"w{turn}", context, 24)
        first, kv = _turn(prefill, f"p{turn}", context, 24, mode=Mode.PREFILL)
        rest, _ = _turn(decode, f"d{turn}", [*context, *first[0]], 23, mode=Mode.DECODE, kv=kv)
        same = same and first[0] + rest[0] == want[0]
        moved = max(moved, float(np.abs(np.subtract(first[1] + rest[1], want[1])).max()))
        context += [*want[0], *range(5, 25)]
    bench.checks += [
        Check(name="pd_equal_tokens", value=float(same), target="== 1"),
        Check(name="pd_logprob_difference_max", value=moved, target=f"<= {SLACK}"),
    ]


def _turn(
    engine: EmbeddedEngine,
    name: str,
    context: Sequence[int],
    new: int,
    mode: Mode = Mode.COLOCATED,
    kv: KvHandle | None = None,
) -> tuple[tuple[list[int], list[float]], KvHandle | None]:
    request = TurnRequest(
        id=RequestId(name),
        trajectory=TrajectoryId("t"),
        turn=0,
        context=TokenIds(context),
        sampling=Sampling(seed=3),
        max_new_tokens=new,
        min_version=WeightVersion(0),
        mode=mode,
        kv=kv,
    )
    engine.submit([request])
    chunks: list[Chunk] = []
    while engine.step():
        chunks += engine.take_chunks(0.0)
    chunks += engine.take_chunks(0.0, force=True)
    if chunks[-1].error is not None:
        raise RuntimeError(chunks[-1].error)
    ids = [token for chunk in chunks for token in chunk.token_ids.tolist()]  # type: ignore[attr-defined]
    return (ids, [logprob for chunk in chunks for logprob in chunk.logprobs.tolist()]), chunks[-1].kv


# -- weights and sleep --------------------------------------------------------------------------------------------------


def _load_and_sleep(bench: Bench) -> None:
    engine = EmbeddedEngine(bench.folder, bench.engine_config(max_sequences=256, max_context_tokens=512))
    before, _ = _turn(engine, "a", range(2, 40), 16)
    took_s = [engine.load(_published(bench, version), LoadMode.RECOMPUTE).load_s for version in range(1, 6)]
    after, _ = _turn(engine, "b", range(2, 40), 16)
    used = _allocated_bytes(bench)
    engine.sleep()
    freed = used - _allocated_bytes(bench)
    engine.wake()
    engine.load(_published(bench, 6), LoadMode.RECOMPUTE)
    woken, _ = _turn(engine, "c", range(2, 40), 16)
    held = engine.info().kv_capacity_tokens * 4 * read_architecture(bench.folder).kv_elements
    bench.checks += [
        Check(name="load_equal_tokens", value=float(before[0] == after[0] == woken[0]), target="== 1"),
        Check(name="load_small_model_s", value=sorted(took_s)[2]),
        Check(
            name="sleep_freed_of_kv_frac",
            value=freed / held,
            target=">= 0.9" if bench.device.startswith("cuda") else None,
        ),
    ]


def _allocated_bytes(bench: Bench) -> int:
    return torch.cuda.memory_reserved() if bench.device.startswith("cuda") else 0


def _published(bench: Bench, version: int) -> Manifest:
    """The tiny checkpoint's own weights under a version."""
    trainer = GrpoTrainer(bench.folder, TrainConfig(), seed=0, total_steps=1)
    return replace(
        trainer.export(bench.scratch / "published.safetensors", WeightVersion(0)), version=WeightVersion(version)
    )


# -- training -----------------------------------------------------------------------------------------------------------


def _train(bench: Bench) -> None:
    trainer = GrpoTrainer(bench.folder, TrainConfig(learning_rate=1e-3), seed=0, total_steps=4, device=bench.device)
    rng = np.random.default_rng(0)
    samples = tuple(
        TrainingSample(
            trajectory=TrajectoryId(f"g{number // 8}.{number}"),
            group=GroupId(f"g{number // 8}"),
            token_ids=TokenIds(rng.integers(2, 90, 128)),
            trained=((64, 128),),
            logprobs=Floats(rng.uniform(-5, -4, 64)),
            versions=Versions.of([(0, 64)]),
            reward=float(number % 2),
        )
        for number in range(64)
    )
    result = trainer.train(TrainingBatch(version=WeightVersion(0), samples=samples))
    bench.checks += [
        Check(name="train_step_s", value=result.train_s),
        Check(name="train_grad_norm", value=float(result.metrics["grad_norm"]), target="> 0"),
    ]


# -- iteration times ------------------------------------------------------------------------------------------------------


def _iterations(bench: Bench) -> IterationTimes:
    architecture = SMALL if bench.quick else QWEN3_8B
    place = Place.of(bench.device, "float32" if bench.device == "cpu" else "bfloat16")
    model = Model(architecture, _random_weights(architecture, place), {}, place=place)
    spec = (
        grid_spec(256, 4, quick=True)
        if bench.quick
        else GridSpec(prefill_tokens=(0, 128, 512, 2048), decoding=(0, 1, 16, 64), context_tokens=(512, 4096), passes=5)
    )
    times = measure_iterations(model, spec, tell=lambda line: print(f"iterations: {line}", flush=True))
    for decoding in spec.decoding[1:]:
        for context in spec.context_tokens:
            bench.checks.append(
                Check(name=f"decode_{decoding}x{context}_ms", value=1e3 * times.seconds(0, decoding, context))
            )
    bench.checks.append(
        Check(
            name=f"prefill_{spec.prefill_tokens[-1]}_ms",
            value=1e3 * times.seconds(spec.prefill_tokens[-1], 0, spec.context_tokens[-1]),
        )
    )
    return times


def _random_weights(a: Architecture, place: Place) -> Weights:
    """Fused weights of an architecture without experts, small enough to stay finite."""
    generator = torch.Generator(place.device).manual_seed(0)

    def made(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=place.device, dtype=place.dtype).normal_(0, 0.02, generator=generator)

    width = (a.heads + 2 * a.kv_heads) * a.head_dim
    layers = tuple(
        LayerWeights(
            qkv=made(a.hidden, width),
            head_norms=torch.ones(a.heads + a.kv_heads, a.head_dim, device=place.device, dtype=place.dtype),
            out=made(a.heads * a.head_dim, a.hidden),
            gate_up=made(a.hidden, 2 * a.intermediate),
            down=made(a.intermediate, a.hidden),
            router=None,
        )
        for _ in range(a.layers)
    )
    norm = torch.ones(a.hidden, device=place.device, dtype=place.dtype)
    return Weights(embedding=made(a.vocabulary, a.hidden), layers=layers, norm=norm, head=made(a.vocabulary, a.hidden))


# -- provenance -----------------------------------------------------------------------------------------------------------


def _tiny(scratch: Path) -> Path:
    folder = scratch / "tiny"
    command = [sys.executable, str(ROOT / "scripts" / "make_tiny_qwen3.py"), "--out", str(folder), "--init-std", "0.2"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def _device_name(bench: Bench) -> str:
    return torch.cuda.get_device_name() if bench.device.startswith("cuda") else f"CPU ({platform.machine()})"


def _document(bench: Bench, times: IterationTimes) -> dict[str, object]:
    return {
        "device": _device_name(bench),
        "packages": {name: importlib.metadata.version(name) for name in ("torch", "transformers", "safetensors")},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "command": " ".join(["python -m benchmarks.gpu_check", *sys.argv[1:]]),
        "checks": {check.name: check.value for check in bench.checks},
        "iterations": {
            "model": "random weights of the shape of Qwen3-8B" if not bench.quick else "a small random model",
            "prefill_tokens": times.prefill_tokens,
            "decoding": times.decoding,
            "context_tokens": times.context_tokens,
            "cells_s": times.cells_s,
        },
    }


if __name__ == "__main__":
    sys.exit(main())
