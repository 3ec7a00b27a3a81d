"""Measure the platform profile of a model on this machine: everything that `pearl profile` does but its display.

Only the hand-off and the start of engines need Ray; where it is not there, or does not work, they are left out with a note
and the rest is measured all the same.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from pearl.cluster.weights import shared_memory_root
from pearl.config.engine import EngineConfig
from pearl.core.profile import HandOff, PlatformProfile
from pearl.engine.embedded.architecture import Architecture, read_architecture
from pearl.engine.embedded.measure import (
    device_name,
    free_model,
    grid_spec,
    kv_budget_bytes,
    kv_bytes_per_token,
    measure_iterations,
    measure_states,
    read_model,
)
from pearl.engine.embedded.model import Model
from pearl.engine.embedded.weights import read_checkpoint
from pearl.errors import ConfigError, ModelError, PearlError
from pearl.records.ids import WeightVersion
from pearl.records.training import Manifest
from pearl.train.export import manifest_of, write_safetensors
from pearl.units import GIB, format_bytes

DEFAULT_CONTEXT_TOKENS = 2048
"""Longest context of the grid where none is asked for and the model has the positions."""
HOST_KV_BYTES = 1 * GIB
"""KV budget on a CPU where none is asked for."""

Tell = Callable[[str, str], None]
"""Hears of what is measured, and how far it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileRequest:
    """What to measure."""

    model: Path
    """Folder of a Hugging Face checkpoint."""
    device: str = "auto"
    dtype: str = "float32"
    max_context_tokens: int | None = None
    """Longest context of the grid; None: what the model has, at most `DEFAULT_CONTEXT_TOKENS`."""
    max_sequences: int = 64
    """Largest batch of the grid."""
    kv_bytes: int = 0
    """Memory for KV; 0: most of what is free on a GPU, `HOST_KV_BYTES` on a CPU."""
    quick: bool = False


def measure_profile(request: ProfileRequest, tell: Tell) -> PlatformProfile:
    """Measure everything.

    Raises:
        ModelError: the folder does not hold a supported checkpoint.
        ConfigError: no such device or precision; a grid beyond the model's positions or the memory.
    """
    architecture = read_architecture(request.model)
    config = engine_config(request, architecture)
    tell("model", f"reading {request.model}")
    try:
        model = read_model(request.model, config)
    except ConfigError as error:
        raise ConfigError(str(error).replace("engine.device", "--device")) from None
    budget_bytes = kv_budget_bytes(model, request.kv_bytes) or HOST_KV_BYTES
    spec = grid_spec(config.max_context_tokens, config.max_sequences, quick=request.quick)
    times = measure_iterations(model, spec, tell=lambda text: tell("iterations", text))
    repeats = 3 if request.quick else 9
    with tempfile.TemporaryDirectory(prefix="pearl-profile-", dir=shared_memory_root()) as folder:
        tell("states", "loading weights, sleeping, waking")
        manifest = export_checkpoint(request.model, architecture, Path(folder) / "weights.safetensors")
        states = measure_states(model, config, manifest, repeats)
    token_bytes, name = kv_bytes_per_token(model), device_name(model, f"cpu {platform.machine()}")
    free_model(model)
    engine_start_s, hand_off = _between_processes(request.model, config, model, repeats, tell)
    return PlatformProfile(
        model=request.model.resolve().name,
        model_hash=model.hash,
        device=name,
        dtype=config.dtype,
        tp=1,
        iterations=times,
        kv_capacity_tokens=max(1, budget_bytes // token_bytes),
        kv_bytes_per_token=token_bytes,
        hand_off=hand_off,
        weight_load_s=states.weight_load_s,
        sleep_s=states.sleep_s,
        wake_s=states.wake_s,
        engine_start_s=engine_start_s,
    )


def engine_config(request: ProfileRequest, architecture: Architecture) -> EngineConfig:
    """The engine to measure.

    Raises:
        ConfigError: an option has a value that no engine takes, or the model has too few positions.
    """
    positions = architecture.max_positions
    context = request.max_context_tokens or min(positions, DEFAULT_CONTEXT_TOKENS)
    if context > positions:
        raise ConfigError(
            f"--max-context: got {context}, want <= {positions} (max_position_embeddings of {request.model})"
        )
    try:
        return EngineConfig.model_validate(
            {
                "device": request.device,
                "dtype": request.dtype,
                "max_context_tokens": context,
                "max_sequences": request.max_sequences,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(f"--{first['loc'][0]}: got {first['input']!r}: {first['msg']}") from None


def export_checkpoint(folder: Path, architecture: Architecture, path: Path) -> Manifest:
    """Publish the weights of a model folder as version 0, as a trainer would.

    Raises:
        ModelError: the folder's weights cannot be read, or there is no room for a copy of them.
    """
    checkpoint = read_checkpoint(folder, architecture)
    try:
        write_safetensors(checkpoint.tensors, path, {"format": "pt"})
    except OSError as error:
        size = format_bytes(sum(tensor.nbytes for tensor in checkpoint.tensors.values()))
        raise ModelError(f"{path.parent}: {size} of weights cannot be written here: {error}") from error
    dtypes = {name: kind.dtype for name, kind in checkpoint.kinds.items()}
    return manifest_of(checkpoint.tensors, dtypes, path, WeightVersion(0), checkpoint.hash)


def _between_processes(
    folder: Path, config: EngineConfig, model: Model, repeats: int, tell: Tell
) -> tuple[float | None, HandOff | None]:
    if find_spec("ray") is None:
        tell("processes", "left out: Ray is not installed, so there is no hand-off and no engine start in the profile")
        return None, None
    from pearl.cluster.hand_off import measure_processes

    tell("processes", "starting two engines in Ray")
    # Two slots, for a turn and the one that is being released; prefill in one iteration.
    small = config.model_copy(
        update={"max_sequences": 2, "prefill_chunk_tokens": config.max_context_tokens, "progress_interval_s": 3600.0}
    )
    try:
        times = measure_processes(
            folder,
            small,
            vocabulary=model.architecture.vocabulary,
            kv_bytes_per_token=kv_bytes_per_token(model),
            repeats=repeats,
            tell=lambda text: tell("processes", text),
        )
    except PearlError as error:
        tell("processes", f"left out, no hand-off and no engine start in the profile: {error}")
        return None, None
    return times.engine_start_s, times.hand_off
