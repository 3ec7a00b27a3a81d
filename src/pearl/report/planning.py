"""What a recipe says of fleet, policy, work and engines, as the records that decisions are made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from pearl.config.elastic import ElasticConfig, PlatformConfig
from pearl.config.recipe import Recipe
from pearl.core.decision import Situation
from pearl.core.gate import Thresholds
from pearl.core.makespan import Profile
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.policy import Policy, PolicyOptions, policy_named
from pearl.core.priors import LEASE_MEAN_S, platform_prior, workload_prior
from pearl.core.profile import LONGEST_PROFILE_BYTES, PlatformProfile, parse_profile
from pearl.core.progress import fresh_batch
from pearl.core.shape import parse_shape
from pearl.core.state import (
    Activity,
    FleetState,
    Gpu,
    GpuOwner,
    GpusJoined,
    LeaseBegan,
    Role,
    StateEvent,
    StateRefusal,
    Worker,
    fold,
)
from pearl.core.toggle import toggle_prior
from pearl.core.workload import WorkloadProfile, within_limits
from pearl.errors import ProfileError, StateError
from pearl.records.ids import GpuId, LeaseId, NodeId, WorkerId
from pearl.report.workload_file import read_workload
from pearl.silicon.tables import shipped, silicon_profiles
from pearl.text_file import Unreadable, read_text

_COSTS = ("start_s", "finalise_s", "activate_s", "return_s", "role_change_s", "stop_s")


def policy_of(recipe: Recipe) -> Policy:
    """The policy of `[elastic]`.

    Raises:
        ConfigError: it lacks something that it needs.
    """
    elastic, fleet = recipe.elastic, recipe.fleet
    options = PolicyOptions(
        tps=fleet.tp,
        # Those that know one tensor parallelism have to share it with the workers that they may borrow.
        fixed_tp=fleet.overlap_tp if fleet.training_gpus else fleet.tp[0],
        hybrid=fleet.hybrid,
        thresholds=thresholds_of(elastic),
        return_z=elastic.return_z,
        gpus=elastic.fixed_gpus,
        shape=parse_shape(elastic.shape) if elastic.shape else None,
        seeding_s=elastic.seeding_s,
    )
    return policy_named(elastic.policy, options)


def thresholds_of(elastic: ElasticConfig) -> Thresholds:
    """What a change must win."""
    return Thresholds(ratio=elastic.switch_gain_ratio, mode=elastic.switch_gain_mode, tp=elastic.switch_gain_tp)


def situation_of(recipe: Recipe) -> Situation:
    """The moment when a batch begins, training is idle, and nothing was measured yet.

    Raises:
        ProfileError: a file of profiles or trajectories is missing or damaged, or does not fit the recipe.
    """
    profile = Profile(workload=workload_of(recipe), platform=platform_of(recipe))
    rollout = recipe.rollout
    return Situation(
        profile=profile,
        progress=fresh_batch(rollout.groups_per_batch, rollout.group_size, batches=rollout.max_staleness + 1),
        toggle=toggle_prior(profile.platform.costs, per_worker_s=_per_worker_s(recipe, profile.platform)),
        lease_prior_s=LEASE_MEAN_S,
        since_training_s=0.0,
    )


def _per_worker_s(recipe: Recipe, platform: Platform) -> float:
    """What each borrowed worker adds to the cost of borrowing: those of a node share what their host reads weights with."""
    tp = recipe.fleet.overlap_tp
    return platform.by_tp[tp].weight_load_s / (recipe.fleet.gpus_per_node // tp) if tp in platform.by_tp else 0.0


def workload_of(recipe: Recipe) -> WorkloadProfile:
    """The trajectories of `[workload]` under the limits of `[rollout]`.

    Raises:
        ProfileError: the file of trajectories is missing or damaged, or no turn of them fits the limits.
    """
    config, rollout = recipe.workload, recipe.rollout
    prior = workload_prior(config.prior)
    try:
        work = prior if config.trajectories is None else read_workload(config.trajectories, env_s=prior.env_s)
    except ProfileError as error:
        raise ProfileError(f"workload.trajectories: {error}") from None
    first_tokens = work.prompt_tokens.mean + work.generated_tokens.mean
    if first_tokens > rollout.max_context_tokens:
        source = f"workload.prior {config.prior}" if config.trajectories is None else str(config.trajectories)
        raise ProfileError(
            f"rollout.max_context_tokens: got {rollout.max_context_tokens}, want >= {math.ceil(first_tokens)} "
            f"(the first turn of {source}, mean); plan with trajectories like yours: workload.trajectories"
        )
    return within_limits(work, max_turns=rollout.max_turns, max_context_tokens=rollout.max_context_tokens)


def platform_of(recipe: Recipe) -> Platform:
    """The engines of `[platform]`, at the tensor parallelisms of `[fleet]`.

    Raises:
        ProfileError: a profile is missing, damaged, or not of the same model and device as the others.
    """
    config, fleet = recipe.platform, recipe.fleet
    if config.profiles:
        known, costs = _measured(config.profiles)
    else:
        known, costs = _assumed(config.prior, fleet.tp), platform_prior(config.prior).costs
    missing = [tp for tp in fleet.tp if tp not in known]
    if missing:
        source = "platform.profiles" if config.profiles else f"platform.prior {config.prior}"
        raise ProfileError(
            f"fleet.tp: got {missing[0]}, want one of {', '.join(map(str, sorted(known)))} "
            f"(what {source} knows); measure it with `pearl profile`"
        )
    return Platform(
        by_tp=MappingProxyType({tp: known[tp] for tp in sorted(fleet.tp)}),
        costs=_costs(config, costs),
        max_sequences=config.max_sequences,
        prefill_chunk_tokens=config.prefill_chunk_tokens,
        readback=config.readback,
        tp_pairs=None if fleet.tp_pairs is None else frozenset(fleet.tp_pairs),
        time_scale=MappingProxyType(dict.fromkeys(sorted(fleet.tp), config.time_scale)),
    )


def _assumed(prior: str, tps: Sequence[int]) -> dict[int, PlatformProfile]:
    """The shipped tables of a prior: those of the tensor parallelisms that are wanted, all where one of them is not there."""
    model, _, gpu = prior.rpartition("-")
    there = shipped()[model, gpu]
    return silicon_profiles(model, gpu, tps if set(tps) <= set(there) else there)


def _measured(paths: Iterable[Path]) -> tuple[dict[int, PlatformProfile], TransitionCosts]:
    """Profiles by tensor parallelism, and costs as far as they tell them."""
    known: dict[int, PlatformProfile] = {}
    for path in paths:
        profile = _profile(path)
        times = profile.iterations
        decoding = [row for sequences, row in zip(times.decoding, times.cells_s[0], strict=True) if sequences]
        if min(min(row) for row in decoding) <= 0:
            raise ProfileError(
                f"platform.profiles: {path}: iterations.cells_s: got an iteration that decodes in 0 s, want > 0 s"
            )
        if profile.tp in known:
            raise ProfileError(f"platform.profiles: got two of tp {profile.tp}, want one for each")
        known[profile.tp] = profile
    first = known[min(known)]
    for name in ("model_hash", "device", "dtype"):
        others = sorted({getattr(profile, name) for profile in known.values()} - {getattr(first, name)})
        if others:
            raise ProfileError(f"platform.profiles: {name}: got {getattr(first, name)} and {others[0]}, want one")
    costs = TransitionCosts()
    return known, replace(
        costs,
        start_s=costs.start_s if first.engine_start_s is None else first.engine_start_s,
        activate_s=first.wake_s + first.weight_load_s,
        return_s=first.sleep_s,
    )


def _profile(path: Path) -> PlatformProfile:
    try:
        text = read_text(path, most_bytes=LONGEST_PROFILE_BYTES)
    except Unreadable as error:
        raise ProfileError(f"platform.profiles: {error}; want a file of `pearl profile`") from None
    return parse_profile(text, f"platform.profiles: {path}")


def _costs(config: PlatformConfig, known: TransitionCosts) -> TransitionCosts:
    return replace(known, **{name: value for name in _COSTS if (value := getattr(config, name)) is not None})


def fleet_of(recipe: Recipe) -> FleetState:
    """All GPUs of `[fleet]`, external ones included; overlap workers asleep, no dedicated worker started.

    GPUs of each owner fill nodes of their own.
    """
    fleet = recipe.fleet
    per_node = fleet.gpus_per_node
    training = _gpus(fleet.training_gpus, GpuOwner.TRAINING, "t", per_node)
    external = _gpus(fleet.external_gpus, GpuOwner.EXTERNAL, "e", per_node)
    reserved = _gpus(fleet.reserved_gpus, GpuOwner.RESERVED, "r", per_node)
    state = folded(FleetState(), [GpusJoined(gpus=gpus) for gpus in (reserved, training) if gpus])
    overlap = [
        Worker(id=WorkerId(slot), gpus=gpus, role=Role.COLOCATED, activity=Activity.INACTIVE)
        for slot, gpus in enumerate(_blocks(training, per_node, fleet.overlap_tp))
    ]
    # Not by events: each would check every worker again, thousands of times in a large fleet.
    state = replace(
        state,
        workers=MappingProxyType({worker.id: worker for worker in overlap}),
        slots=MappingProxyType({worker.id: worker.gpus for worker in overlap}),
    )
    return folded(state, [LeaseBegan(lease=LeaseId("external"), gpus=external, at_s=0.0)] if external else [])


def _blocks(gpus: Sequence[Gpu], per_node: int, tp: int) -> Iterator[tuple[GpuId, ...]]:
    """So many at a time, none across nodes."""
    for node in range(0, len(gpus), per_node):
        for first in range(node, min(node + per_node, len(gpus)) - tp + 1, tp):
            yield tuple(gpu.id for gpu in gpus[first : first + tp])


def folded(state: FleetState, events: Iterable[StateEvent]) -> FleetState:
    """A state after events that must all fit.

    Raises:
        StateError: one does not.
    """
    for event in events:
        result = fold(state, event)
        if isinstance(result, StateRefusal):
            raise StateError(f"fleet: {result.detail}")
        state = result
    return state


def _gpus(count: int, owner: GpuOwner, letter: str, per_node: int) -> tuple[Gpu, ...]:
    width = len(str(max(count - 1, 0)))
    return tuple(
        Gpu(id=GpuId(f"{letter}{index:0{width}}"), node=NodeId(f"{letter}-node{index // per_node:04}"), owner=owner)
        for index in range(count)
    )
