"""What is wrong with a run, found before anything of it is started or written: a mistake costs seconds and leaves nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open

from pearl.cluster import checkpoints
from pearl.cluster.local_ray import import_from_here
from pearl.cluster.weights import KEPT_VERSIONS, shared_memory_root
from pearl.config.recipe import Recipe
from pearl.engine.embedded.architecture import read_architecture
from pearl.engine.embedded.pace import Pace
from pearl.engine.embedded.weights import Place
from pearl.env.codec import codec_of
from pearl.env.trial import try_environment
from pearl.errors import CheckpointError, ConfigError, ModelError
from pearl.report.run_folder import RunFolder
from pearl.train.checkpoint import check_model
from pearl.train.model import stored_hash
from pearl.train.whole_folder import settle_all
from pearl.units import GIB, MIB, format_bytes

SMALLEST_STORE_MIB = 80
"""Where shared memory has not even this, Ray keeps its object store in the temporary folder by itself."""


def preflight(recipe: Recipe) -> None:
    """Find what is wrong with a recipe's model and environment before anything is started or written.

    Classes of the user's own are imported from the current directory, too.

    Raises:
        ModelError: the model folder is missing or has no usable tokenizer.
        ConfigError: the environment cannot be made, or lacks what the recipe asks of it; too little memory for weights or
            Ray's object store; no device as `engine.device` says; `engine.pacing` is no profile.
    """
    import_from_here()
    for name in ("config.json", "model.safetensors"):
        if not (recipe.model.path / name).is_file():
            raise ModelError(
                f"model.path: no {name} in {recipe.model.path}; want a Hugging Face checkpoint folder "
                "(`python scripts/make_tiny_qwen3.py --out models/tiny-qwen3` makes the demo's)"
            )
    _check_weights(recipe.model.path)
    _check_memory(recipe)
    Place.of(recipe.engine.device, recipe.engine.dtype)
    Pace.read(recipe.engine)
    codec_of(recipe)
    try_environment(recipe)


def _check_weights(folder: Path) -> None:
    read_architecture(folder)
    file = folder / "model.safetensors"
    try:
        with safe_open(file, framework="np") as tensors:
            names = tensors.keys()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if not names:
        raise ModelError(f"{file}: holds no tensor")


def _check_memory(recipe: Recipe) -> None:
    needed = KEPT_VERSIONS * (recipe.model.path / "model.safetensors").stat().st_size
    what = f"{KEPT_VERSIONS} versions of {recipe.model.path} are kept in shared memory"
    if needed > recipe.weights.host_budget_gib * GIB:
        raise ConfigError(
            f"weights.host_budget_gib: got {recipe.weights.host_budget_gib:g}, want at least {needed / GIB:.4g}: {what}"
        )
    root = shared_memory_root()
    free = shutil.disk_usage(root).free
    if needed > free:
        raise ConfigError(
            f"model.path: {what}: {format_bytes(needed)}, and {root} has {format_bytes(free)} free; "
            "make room there, or enlarge it (in a container: --shm-size)"
        )
    if not recipe.cluster.address and recipe.cluster.object_store_mib * MIB > free >= SMALLEST_STORE_MIB * MIB:
        raise ConfigError(
            f"cluster.object_store_mib: got {recipe.cluster.object_store_mib}, want at most {free // MIB}, "
            f"what {root} has free"
        )


def preflight_resumption(recipe: Recipe, folder: RunFolder) -> None:
    """`preflight` of a run that was begun before: its model must be the one that it began with.

    What a writer that was killed has left half done among the checkpoints is undone; nothing else is changed.

    Raises:
        ModelError: as `preflight`; or files of the model that weights do not replace are others now.
        ConfigError: as `preflight`.
        CheckpointError: the newest checkpoint is damaged, or of another model.
    """
    try:
        preflight(recipe)
    except ModelError as error:
        raise ModelError(f"{error}; {_edit(folder)}") from error
    changed = folder.changed_model_files(recipe.model.path)
    if changed:
        raise ModelError(
            f"model.path: {recipe.model.path}: {', '.join(changed)} differ from what the run began with, so that its "
            f"results would be wrong; bring the files back, or {_edit(folder)}"
        )
    settle_all(folder.checkpoints)
    checkpoint = folder.latest_checkpoint()
    if checkpoint is None:
        return
    checkpoints.read_progress(checkpoint)
    try:
        tied = read_architecture(recipe.model.path).tied
        check_model(checkpoint / checkpoints.TRAINER, stored_hash(recipe.model.path, tied=tied))
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_edit(folder)}") from error


def _edit(folder: RunFolder) -> str:
    return f"set model.path to the model that the run began with by editing {folder.recipe_file}"
