"""Requests to a tiny model, and a driver that collects what an engine generates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from pearl.config.engine import EngineConfig
from pearl.engine.embedded.engine import EmbeddedEngine
from pearl.engine.embedded.model import Model
from pearl.records.ids import RequestId, TrajectoryId, WeightVersion
from pearl.records.tokens import TokenIds
from pearl.records.turn import Chunk, EndReason, Sampling, TurnRequest
from tests.models import VOCABULARY, load_script, make_family, make_folder, publish, tokens


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("models") / "tiny", seed=1)


@pytest.fixture(scope="session")
def reference(folder: Path) -> Any:
    """The same checkpoint in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()


@pytest.fixture
def make_engine(folder: Path) -> Callable[..., EmbeddedEngine]:
    def make(model: Path | Model | None = None, **settings: Any) -> EmbeddedEngine:
        defaults = {"max_sequences": 8, "max_context_tokens": 96, "progress_interval_s": 0.0}
        return EmbeddedEngine(model or folder, EngineConfig(**{**defaults, **settings}))

    return make


def request(
    name: str,
    context: Sequence[int],
    *,
    trajectory: str | None = None,
    seed: int = 0,
    temperature: float = 1.0,
    stops: tuple[int, ...] = (),
    new: int = 12,
    **fields: Any,
) -> TurnRequest:
    values: dict[str, Any] = {
        "id": RequestId(name),
        "trajectory": TrajectoryId(trajectory or f"trajectory of {name}"),
        "turn": 0,
        "context": TokenIds(context),
        "sampling": Sampling(seed=seed, temperature=temperature, stop_token_ids=stops),
        "max_new_tokens": new,
        "min_version": WeightVersion(0),
    }
    return TurnRequest(**{**values, **fields})


@dataclass
class Result:
    """Everything that chunks said about one request."""

    start: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    end: EndReason | None = None
    error: str | None = None
    computed: int = 0
    chunks: int = 0


def collect(chunks: Iterable[Chunk], into: dict[str, Result] | None = None) -> dict[str, Result]:
    """Join chunks, insisting that they join without gap or overlap and end once."""
    results = {} if into is None else into
    for chunk in chunks:
        result = results.setdefault(chunk.request, Result(start=chunk.start))
        assert result.end is None, f"{chunk.request}: a chunk after the end"
        assert chunk.start == result.start + len(result.ids), f"{chunk.request}: gap or overlap"
        assert len(chunk.token_ids) == len(chunk.logprobs) == len(chunk.versions)
        result.ids += chunk.token_ids.tolist()
        result.logprobs += chunk.logprobs.tolist()
        for run in chunk.versions.runs:
            result.versions += [run.version] * run.tokens
        result.end, result.error, result.computed = chunk.end, chunk.error, chunk.computed_prompt_tokens
        result.chunks += 1
    return results


def drain(engine: EmbeddedEngine, into: dict[str, Result] | None = None) -> dict[str, Result]:
    """Run an engine until it is idle."""
    results = {} if into is None else into
    while engine.step():
        collect(engine.take_chunks(0.0), results)
    return collect(engine.take_chunks(0.0, force=True), results)


def generate(engine: EmbeddedEngine, *requests: TurnRequest) -> dict[str, Result]:
    engine.submit(requests)
    return drain(engine)


class Kit:
    """The functions above for test modules (which cannot import a conftest)."""

    tokens = staticmethod(tokens)
    request = staticmethod(request)
    collect = staticmethod(collect)
    drain = staticmethod(drain)
    generate = staticmethod(generate)
    publish = staticmethod(publish)
    make_folder = staticmethod(make_folder)
    make_family = staticmethod(make_family)
    load_script = staticmethod(load_script)
    vocabulary = VOCABULARY


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
