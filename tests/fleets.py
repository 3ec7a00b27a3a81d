"""Situations and predictors for tests of decisions; fleets from text are in `tests.unit.core._fleets`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from pearl.core.decision import Situation
from pearl.core.distribution import constant
from pearl.core.makespan import Candidates, Forecast, Infeasible, Predictions, Profile, Target
from pearl.core.platform import Platform, TransitionCosts
from pearl.core.profile import HandOff, IterationTimes, PlatformProfile
from pearl.core.progress import Progress, fresh_batch
from pearl.core.state import FleetState, Lease, NoticeGiven, fold
from pearl.core.toggle import ToggleEstimate
from pearl.core.workload import WorkloadProfile
from pearl.records.ids import GpuId, LeaseId

COSTS = TransitionCosts(start_s=50, finalise_s=10, activate_s=6, return_s=4, role_change_s=20, stop_s=1)


@dataclass(frozen=True, slots=True)
class Told:
    """A predictor of what a test says: targets as text -> seconds; the others cannot serve."""

    times_s: Mapping[str, float]
    errors_s: Mapping[str, float] = field(default_factory=dict)
    """0 where there is none."""
    asked: list[str] = field(default_factory=list)
    """All targets that were asked for, in order."""
    name: str = "told"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        return self._predict

    def _predict(self, candidates: Candidates) -> Predictions:
        texts = [str(candidates.target(index)) for index in range(len(candidates))]
        self.asked.extend(texts)
        close_s = np.array([self.times_s.get(text, np.inf) for text in texts])
        known = np.isfinite(close_s)
        return Predictions(
            close_s=close_s,
            error_s=np.where(known, [self.errors_s.get(text, 0.0) for text in texts], np.inf),
            infeasible=np.where(known, int(Infeasible.NO), int(Infeasible.KV_CAPACITY)),
        )


@dataclass(frozen=True, slots=True)
class Formula:
    """A predictor by a function of the target: seconds, inf where it cannot serve; errors are a share of them."""

    seconds: Callable[[Target], float]
    error_share: float = 0.0
    name: str = "formula"
    appends: bool = True

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        def predict(candidates: Candidates) -> Predictions:
            close_s = np.array([self.seconds(candidates.target(index)) for index in range(len(candidates))])
            known = np.isfinite(close_s)
            return Predictions(
                close_s=close_s,
                error_s=np.where(known, self.error_share * np.where(known, close_s, 0.0), np.inf),
                infeasible=np.where(known, int(Infeasible.NO), int(Infeasible.KV_CAPACITY)),
            )

        return predict


def platform(*tps: int, costs: TransitionCosts = COSTS, pairs: set[tuple[int, int]] | None = None) -> Platform:
    """A GPU that is the faster the more of them work together."""
    return Platform(
        by_tp=MappingProxyType({tp: _device(tp) for tp in tps}),
        costs=costs,
        tp_pairs=None if pairs is None else frozenset(pairs),
    )


def _device(tp: int) -> PlatformProfile:
    # Seconds of an iteration at 1,024 and 16,384 tokens of context: a weight read, decoding sequences, prompt tokens.
    def cell(prefill: int, decoding: int, context: int) -> float:
        return (0.005 + decoding * (4e-5 + context * 3e-8) + prefill * (2e-5 + context * 1e-9)) / tp**0.8

    prefills, counts, contexts = (0, 512, 2048), (0, 1, 16, 256), (1024, 16384)
    return PlatformProfile(
        model="small",
        model_hash="m",
        device="card",
        dtype="bf16",
        tp=tp,
        iterations=IterationTimes(
            prefill_tokens=prefills,
            decoding=counts,
            context_tokens=contexts,
            cells_s=tuple(tuple(tuple(cell(p, d, c) for c in contexts) for d in counts) for p in prefills),
        ),
        kv_capacity_tokens=400_000 * tp,
        kv_bytes_per_token=100_000,
        hand_off=HandOff(fixed_s=0.005, s_per_byte=2e-11),
        weight_load_s=1.0,
        sleep_s=1.0,
        wake_s=1.0,
        engine_start_s=50.0,
    )


def workload(*, turns: float = 8.0, new_tokens: float = 800.0, generated_tokens: float = 250.0) -> WorkloadProfile:
    """Trajectories that are all alike."""
    return WorkloadProfile(
        turns=constant(turns),
        prompt_tokens=constant(2000.0),
        new_tokens=constant(new_tokens),
        generated_tokens=constant(generated_tokens),
        env_s=constant(2.0),
    )


def situation(
    *tps: int,
    costs: TransitionCosts = COSTS,
    pairs: set[tuple[int, int]] | None = None,
    toggle_s: float = 10.0,
    progress: Progress | None = None,
) -> Situation:
    """What is known; everything else by `replace`."""
    return Situation(
        profile=Profile(workload=workload(), platform=platform(*(tps or (1,)), costs=costs, pairs=pairs)),
        progress=progress or fresh_batch(4, 16),
        toggle=ToggleEstimate(prior_s=toggle_s),
        lease_prior_s=3600.0,
    )


def leased(state: FleetState, lease: str, gpus: str, *, since_s: float = 0.0, end_s: float | None = None) -> FleetState:
    """With some of its external GPUs under a lease."""
    held = Lease(id=LeaseId(lease), gpus=tuple(map(GpuId, gpus.split())), since_s=since_s, end_s=end_s)
    return replace(state, leases=MappingProxyType({**state.leases, held.id: held}))


def noticed(state: FleetState, gpus: str, deadline_s: float) -> FleetState:
    """With some of its external GPUs under notice."""
    after = fold(state, NoticeGiven(gpus=tuple(map(GpuId, gpus.split())), deadline_s=deadline_s, at_s=0.0))
    assert isinstance(after, FleetState), after
    return after
