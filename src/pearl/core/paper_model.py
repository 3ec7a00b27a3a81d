"""The paper's makespan model, exactly: the predictor to beat.

Law (symbols as in the paper, §4.2; N, A, b and t_prefill are of workers, whatever their tensor parallelism):

    T_coloc   = S [ (B dL / N) t_prefill + r (A + b B / N) + T_over ] + T_env                     (1)
    T_decode  = S r (A + b B / (N_D (1 + theta))) (1 + theta)                                     (2)
    T_prefill = S ( (B dL / N_P) t_prefill + B dL K / BW )                                        (3)
    T_dis     = max(T_prefill, T_decode) + T_env

The batch closes in (R / B) T, as the paper's borrow gate has it (§4.3). A disaggregated shape is feasible where decode workers
hold the KV of the batch, B K_seq <= N_D H_max; a colocated one always is: it is what the paper falls back to.

The paper's other condition, that prefill keeps up with lambda_P = B S dL tokens per step, asks N_P / t_prefill tokens/s for a
step's length. It binds only for a step shorter than T_dis; but no step that this shape feeds is, since T_dis >= T_prefill.
So there is nothing to check: what cannot keep up shows as a longer step.

What the paper does not have, this does not have: shapes with colocated workers beside others are `UNSUPPORTED`,
`append_tokens` changes nothing, iterations know no bound on sequences, turns no queue, the batch no tail beyond its slowest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from pearl.core.distribution import Distribution, Floats
from pearl.core.makespan import SERVING_ROLES, Candidates, Forecast, Infeasible, Ints, Predictions, Profile
from pearl.core.platform import Platform
from pearl.core.profile import IterationTimes
from pearl.core.progress import Progress
from pearl.core.state import Role
from pearl.core.workload import WorkloadProfile

ERROR = 0.16
"""One standard deviation over the prediction, a prior. Source: tabulated iteration times are 10 % off measured ones with a
scalar fitted online and 16 % at best without; equations that drop queueing and the tail deserve the larger one."""

Number = TypeVar("Number", float, Floats)


# -- the equations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a batch asks for: the symbols that are the same for all shapes."""

    trajectories: float
    """B."""
    turns: float
    """S: of the slowest trajectory."""
    new_tokens: float
    """dL: new prompt tokens per turn."""
    generated_tokens: float
    """r: per turn."""
    overhead_s: float
    """T_over: per turn."""
    env_s: float
    """T_env: total of the slowest trajectory."""
    theta: float
    """Bubble ratio."""
    context_tokens: float
    """Mean over a mean trajectory's iterations: where A, b and t_prefill are read."""
    final_tokens: float
    """Final context of a mean trajectory: K_seq over K."""


def coloc_s(batch: Batch, *, workers: Number, token_s: Number, fixed_s: Number, per_sequence_s: Number) -> Number:
    """T_coloc of N `workers`, from t_prefill, A and b. Source: the paper, equation (1)."""
    share = batch.trajectories / workers
    prefill = share * batch.new_tokens * token_s
    decode = batch.generated_tokens * (fixed_s + per_sequence_s * share)
    return batch.turns * (prefill + decode + batch.overhead_s) + batch.env_s


def decode_s(batch: Batch, *, workers: Number, fixed_s: Number, per_sequence_s: Number) -> Number:
    """T_decode of N_D `workers`, from A and b. Source: the paper, equation (2)."""
    stretch = 1 + batch.theta
    decoding = batch.trajectories / (workers * stretch)
    return batch.turns * batch.generated_tokens * (fixed_s + per_sequence_s * decoding) * stretch


def prefill_s(batch: Batch, *, workers: Number, token_s: Number, transfer_s: Number) -> Number:
    """T_prefill of N_P `workers`, from t_prefill and K / BW, both per token. Source: the paper, equation (3)."""
    tokens = batch.trajectories * batch.new_tokens
    return batch.turns * (tokens / workers * token_s + tokens * transfer_s)


# -- their terms ----------------------------------------------------------------------------------------------------


def slowest_turns(turns: Distribution, trajectories: int) -> float:
    """S, turns of the slowest of so many: the quantile 1 - 1 / (2 B), the largest one's middle share of a batch."""
    return turns.quantile(1 - 1 / (2 * trajectories))


def batch_of(workload: WorkloadProfile, trajectories: int) -> Batch:
    """The symbols that a workload gives.

    dL is the mean over all turns of a mean trajectory, its first prompt included; T_env holds one wait per turn.
    """
    turns, mean_turns = slowest_turns(workload.turns, trajectories), workload.turns.mean
    generated = workload.generated_tokens.mean
    return Batch(
        trajectories=trajectories,
        turns=turns,
        new_tokens=(workload.prompt_tokens.mean + (mean_turns - 1) * workload.new_tokens.mean) / mean_turns,
        generated_tokens=generated,
        overhead_s=workload.turn_overhead_s,
        env_s=turns * workload.env_s.mean,
        theta=workload.theta,
        context_tokens=workload.context_tokens((mean_turns - 1) / 2) + generated / 2,
        final_tokens=workload.context_tokens(mean_turns - 1) + generated,
    )


def decode_line(times: IterationTimes, context_tokens: float) -> tuple[float, float]:
    """A and b: least squares of iterations without prefill over the decoding axis, neither below 0.

    1 and 2 sequences are added to the axis: short ones have a line too, and 0 sequences, which take no time, no say.
    """
    sequences = sorted({1, 2, *times.decoding[1:]})
    seconds = [times.seconds(0, n, context_tokens) for n in sequences]
    slope, intercept = np.polyfit(sequences, seconds, 1).tolist()
    return max(0.0, intercept), max(0.0, slope)


def prefill_token_s(times: IterationTimes, new_tokens: float, context_tokens: float) -> float:
    """t_prefill: per token of an iteration that prefills dL tokens, at least one, and decodes nothing."""
    tokens = max(1.0, new_tokens)
    return times.seconds(tokens, 0, context_tokens) / tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts(Generic[Number]):
    """What workers of a tensor parallelism cost; or those of one role under each candidate, arrays of shape `[N]`."""

    fixed_s: Number
    """A."""
    per_sequence_s: Number
    """b."""
    token_s: Number
    """t_prefill."""
    transfer_s: Number
    """K / BW, per token; 0 where hand-offs were not measured. The fixed time of a hand-off is not in the paper."""
    capacity_tokens: Number
    """H_max over K."""


def costs_by_tp(platform: Platform, batch: Batch) -> dict[int, WorkerCosts[float]]:
    """Of all tensor parallelisms that the platform has, scaled by what iterations were seen to take."""
    known: dict[int, WorkerCosts[float]] = {}
    for tp, profile in platform.by_tp.items():
        scale, hand_off = platform.scale(tp), profile.hand_off
        fixed_s, per_sequence_s = decode_line(profile.iterations, batch.context_tokens)
        known[tp] = WorkerCosts(
            fixed_s=scale * fixed_s,
            per_sequence_s=scale * per_sequence_s,
            token_s=scale * prefill_token_s(profile.iterations, batch.new_tokens, batch.context_tokens),
            transfer_s=profile.kv_bytes_per_token * hand_off.s_per_byte if hand_off else 0.0,
            capacity_tokens=float(profile.kv_capacity_tokens),
        )
    return known


def costs_along(known: Mapping[int, WorkerCosts[float]], tps: Ints) -> WorkerCosts[Floats]:
    """Of workers of these tensor parallelisms, shape `[N]`; 0 where one is not known."""
    columns = {field.name: np.zeros(len(tps)) for field in fields(WorkerCosts)}
    for tp, costs in known.items():
        for name, column in columns.items():
            column[tps == tp] = getattr(costs, name)
    return WorkerCosts(**columns)


# -- the predictor --------------------------------------------------------------------------------------------------


class PaperPredictor:
    """Equations (1)-(3) over all candidates at once."""

    name = "paper"
    appends = False

    def forecast(self, profile: Profile, progress: Progress) -> Forecast:
        """Of one profile and progress; of that, B and R count, and nothing else that is in flight."""
        batch = batch_of(profile.workload, progress.batch_trajectories)
        known = costs_by_tp(profile.platform, batch)

        def predict(candidates: Candidates) -> Predictions:
            infeasible = _refusals(candidates, profile.platform, batch, known)
            close_s = np.where(
                infeasible == Infeasible.NO, progress.fraction * _whole_s(candidates, batch, known), np.inf
            )
            return Predictions(close_s=close_s, error_s=ERROR * close_s, infeasible=infeasible)

        return predict


def _whole_s(candidates: Candidates, batch: Batch, known: Mapping[int, WorkerCosts[float]]) -> Floats:
    """T of each; KV travels as the prefill worker's profile has it."""
    prefill, decode, colocated = (costs_along(known, candidates.tp[role]) for role in SERVING_ROLES)
    # At least 1, so that pools that are not there divide nothing by 0; what they would take is not looked at.
    x, y, n = (np.maximum(1.0, candidates.workers[role]) for role in SERVING_ROLES)
    together_s = coloc_s(
        batch,
        workers=n,
        token_s=colocated.token_s,
        fixed_s=colocated.fixed_s,
        per_sequence_s=colocated.per_sequence_s,
    )
    apart_s = batch.env_s + np.maximum(
        prefill_s(batch, workers=x, token_s=prefill.token_s, transfer_s=prefill.transfer_s),
        decode_s(batch, workers=y, fixed_s=decode.fixed_s, per_sequence_s=decode.per_sequence_s),
    )
    return np.where(candidates.workers[Role.COLOCATED] > 0, together_s, apart_s)


def _refusals(
    candidates: Candidates, platform: Platform, batch: Batch, known: Mapping[int, WorkerCosts[float]]
) -> Ints:
    """`Infeasible` of each; the first reason counts."""
    x, y, n = (candidates.workers[role] for role in SERVING_ROLES)
    apart = y > 0
    prefill, decode, colocated = (np.isin(candidates.tp[role], platform.tps) for role in SERVING_ROLES)
    pairs = np.column_stack((candidates.tp[Role.PREFILL], candidates.tp[Role.DECODE])).tolist()
    allowed = np.array([platform.allows(*pair) for pair in pairs], dtype=bool)
    usable = np.where(apart, prefill & decode & allowed, colocated)
    # In tokens: H_max and K_seq are the same bytes per token of the decode worker's cache.
    capacity_tokens = y * costs_along(known, candidates.tp[Role.DECODE]).capacity_tokens
    full = apart & (batch.trajectories * batch.final_tokens > capacity_tokens)
    reasons = [
        (((x > 0) != (y > 0)) | (y + n == 0), Infeasible.NO_WORKERS),
        ((apart & (n > 0)) | (candidates.second > 0), Infeasible.UNSUPPORTED),
        (~usable, Infeasible.UNKNOWN_TP),
        (full, Infeasible.KV_CAPACITY),
    ]
    return np.select([where for where, _ in reasons], [int(reason) for _, reason in reasons], int(Infeasible.NO))
