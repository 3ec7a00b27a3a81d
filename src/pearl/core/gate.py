"""Gates: whether a change that looks good is worth making.

Each is a pure function of numbers and returns a verdict with its reason and the figures behind it. Laws:

- *hysteresis*: a change must win more than the threshold of its kind, as a share of what is left, and more seconds than it
  costs (rent or buy). Forced changes are never blocked.
- *borrowing*: of all numbers of workers that could be borrowed, the one with the least time to the end, its own cost
  included; none on a tie.
- *expansion*: the seconds that GPUs are expected to serve must win more than starting on them costs.
- *return*: borrowed GPUs go back in time for the trainer, and at once when its batch is there.

No gate passes on a number that is none: NaN, and what cannot be (a negative time), is refused as `BAD_NUMBER`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

from pearl.core.shape import Shape
from pearl.core.state import Role
from pearl.errors import ProfileError

Z_95 = 1.645
"""Standard deviations that a normal error exceeds once in twenty times, to one side."""

Numbers = tuple[tuple[str, float], ...]


class ChangeKind(enum.Enum):
    """How far a change of shape goes."""

    NONE = "none"
    SIZE = "size"
    """Workers only come, or only go."""
    RATIO = "ratio"
    """Workers change roles within a mode."""
    MODE = "mode"
    """Colocated workers give way to prefill and decode, or the other way round, some or all of them."""
    TP = "tp"
    """Workers of one tensor parallelism end, and others of another start."""


class GateReason(enum.Enum):
    """Why a gate let something pass, or did not."""

    GAIN = "gain"
    """It passed: it wins more than it must."""
    FORCED = "forced"
    """It passed: what there was cannot stay."""
    CURRENT_INFEASIBLE = "current_infeasible"
    """It passed: the batch would never close without it."""
    DUE = "due"
    """It passed: later, the trainer might wait."""
    BATCH_CLOSED = "batch_closed"
    """It passed: the trainer waits."""
    NO_CHANGE = "no_change"
    """There is nothing to do."""
    BELOW_THRESHOLD = "below_threshold"
    BELOW_COST = "below_cost"
    TARGET_INFEASIBLE = "target_infeasible"
    """The batch would never close with it."""
    LEASE_TOO_SHORT = "lease_too_short"
    """The GPUs are expected to be gone before they serve."""
    GAIN_TOO_SMALL = "gain_too_small"
    DUE_AT_ONCE = "due_at_once"
    """What would be borrowed would have to go back at once."""
    NOT_YET = "not_yet"
    BAD_NUMBER = "bad_number"
    BAD_OPTIONS = "bad_options"
    """Options that do not begin with no worker, or whose workers do not rise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a gate says."""

    passed: bool
    reason: GateReason
    numbers: Numbers = ()
    """Name, with its unit, and value: what went in and what came of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """What a change must win, as a share of the predicted time that is left, each 0 <= share < 1."""

    size: float = 0.0
    """Any gain: GPUs that came or went are weighed by the gates of expansion and borrowing, and else by cost alone."""
    ratio: float = 0.05
    mode: float = 0.10
    tp: float = 0.10

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not 0 <= value < 1:
                raise ProfileError(f"thresholds: {each.name}: got {value}, want 0 <= share < 1")

    def of(self, kind: ChangeKind) -> float:
        """Of a kind of change."""
        match kind:
            case ChangeKind.RATIO:
                return self.ratio
            case ChangeKind.MODE:
                return self.mode
            case ChangeKind.TP:
                return self.tp
            case _:
                return self.size


def change_kind(old: Shape, new: Shape) -> ChangeKind:
    """How far it is from one shape to another, or back: the first that holds of none, tp, mode, ratio; else size."""
    before = {(pool.role, pool.tp): pool.workers for pool in old.pools}
    after = {(pool.role, pool.tp): pool.workers for pool in new.pools}
    if before == after:
        return ChangeKind.NONE
    if not before or not after:
        return ChangeKind.SIZE
    changes = {pool: after.get(pool, 0) - before.get(pool, 0) for pool in before | after}
    by_tp = dict.fromkeys((tp for _, tp in changes), 0)
    for (_, tp), change in changes.items():
        by_tp[tp] += change
    if min(by_tp.values()) < 0 < max(by_tp.values()):
        return ChangeKind.TP
    if _mode(before) != _mode(after):
        return ChangeKind.MODE
    return ChangeKind.RATIO if min(changes.values()) < 0 < max(changes.values()) else ChangeKind.SIZE


def _mode(pools: dict[tuple[Role, int], int]) -> tuple[bool, bool]:
    """Whether there are colocated workers, and whether there are others."""
    return any(role is Role.COLOCATED for role, _ in pools), any(role is not Role.COLOCATED for role, _ in pools)


def hysteresis(
    kind: ChangeKind,
    *,
    old_s: float,
    new_s: float,
    cost_s: float,
    thresholds: Thresholds = Thresholds(),
    forced: bool = False,
) -> Verdict:
    """Whether to move from the current shape to another.

    `old_s`, `new_s`: until the batch closes under each, >= 0, inf where infeasible. `cost_s`: what the move takes, finite
    and >= 0. `forced`: the current shape cannot stay (workers left, a role has none). A gain that equals its threshold, or
    the cost, does not pass.
    """
    numbers: Numbers = (("old_s", old_s), ("new_s", new_s), ("cost_s", cost_s))
    if kind is ChangeKind.NONE:
        return Verdict(passed=False, reason=GateReason.NO_CHANGE, numbers=numbers)
    if forced:
        return Verdict(passed=True, reason=GateReason.FORCED, numbers=numbers)
    if not (_times(old_s, new_s) and _finite(cost_s)):
        return Verdict(passed=False, reason=GateReason.BAD_NUMBER, numbers=numbers)
    if math.isinf(new_s):
        return Verdict(passed=False, reason=GateReason.TARGET_INFEASIBLE, numbers=numbers)
    if math.isinf(old_s):
        return Verdict(passed=True, reason=GateReason.CURRENT_INFEASIBLE, numbers=numbers)
    gain_s, threshold = old_s - new_s, thresholds.of(kind)
    share = gain_s / old_s if old_s > 0 else 0.0
    reason = GateReason.GAIN
    if share <= threshold:
        reason = GateReason.BELOW_THRESHOLD
    elif gain_s <= cost_s:
        reason = GateReason.BELOW_COST
    numbers = (*numbers, ("gain_s", gain_s), ("gain_share", share), ("threshold_share", threshold))
    return Verdict(passed=reason is GateReason.GAIN, reason=reason, numbers=numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowOption:
    """Borrowing so many workers."""

    workers: int
    close_s: float
    """Until the batch closes with them, the rest of it; inf where infeasible."""
    toggle_s: float = 0.0
    """What borrowing them costs, finite and >= 0; of no meaning without workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BorrowVerdict(Verdict):
    """What the borrow gate says."""

    workers: int = 0
    """To borrow; 0 unless passed."""


def paper_gain_s(remaining: int, batch: int, dedicated_s: float, full_s: float) -> float:
    """Seconds that borrowing wins when `remaining` of `batch` trajectories are unfinished.

    `dedicated_s`, `full_s`: makespan of a whole batch without and with all borrowed workers. NaN where the numbers cannot be.
    `close_s` of the options of `borrow` are predictions of the rest, so (R / B) T each gives the paper's gate.
    Source: the paper, §4.6: (R / B) (T_ded - T_full).
    """
    if not (0 <= remaining <= batch and batch > 0 and _times(dedicated_s, full_s)):
        return math.nan
    return remaining / batch * (dedicated_s - full_s) if remaining else 0.0


def borrow(options: Sequence[BorrowOption]) -> BorrowVerdict:
    """How many workers to borrow: those with the least time to the end, borrowing included; the fewest on a tie.

    The options begin with no worker, and their workers rise. The gain is that over not borrowing; it passes when that is
    more than what it costs. Where another number than the best is the fastest, and too dear, the numbers tell it too.
    """
    workers = [option.workers for option in options]
    if not workers or workers[0] != 0 or any(b <= a for a, b in pairwise(workers)):
        return BorrowVerdict(passed=False, reason=GateReason.BAD_OPTIONS)
    if not all(_times(option.close_s) and _finite(option.toggle_s) for option in options):
        return BorrowVerdict(passed=False, reason=GateReason.BAD_NUMBER)
    without, *others = options
    numbers: Numbers = (("dedicated_s", without.close_s),)
    if not others:
        return BorrowVerdict(passed=False, reason=GateReason.NO_CHANGE, numbers=numbers)
    best = min(others, key=lambda option: option.close_s + option.toggle_s)
    if math.isinf(best.close_s):
        return BorrowVerdict(passed=False, reason=GateReason.TARGET_INFEASIBLE, numbers=numbers)
    gain_s = without.close_s - best.close_s
    numbers = (*numbers, ("borrowed_s", best.close_s), ("gain_s", gain_s), ("toggle_s", best.toggle_s))
    fastest = min(others, key=lambda option: option.close_s)
    if fastest.close_s < best.close_s:
        numbers = (*numbers, ("fastest_s", fastest.close_s), ("fastest_toggle_s", fastest.toggle_s))
    if best.close_s + best.toggle_s >= without.close_s:
        return BorrowVerdict(passed=False, reason=GateReason.BELOW_COST, numbers=numbers)
    reason = GateReason.CURRENT_INFEASIBLE if math.isinf(gain_s) else GateReason.GAIN
    return BorrowVerdict(passed=True, reason=reason, numbers=numbers, workers=best.workers)


def expansion(
    *, expected_use_s: float, start_s: float, old_s: float, new_s: float, finalise_s: float, role_changes_s: float = 0.0
) -> Verdict:
    """Whether to start workers on GPUs of a lease.

    `expected_use_s`: how long it lasts, mean, its known end included (`core.survival`). `start_s`: until a worker there
    could be admitted, in the background. `old_s`, `new_s`: until the batch closes without and with them, `new_s` > 0. What
    it costs: pausing admission, and changes of roles, each finite and >= 0.

    In u seconds of service the larger fleet does what the old one does in u old_s / new_s: it wins u (old_s / new_s - 1).
    """
    useful_s, cost_s = expected_use_s - start_s, finalise_s + role_changes_s
    numbers: Numbers = (("useful_s", useful_s), ("old_s", old_s), ("new_s", new_s), ("cost_s", cost_s))
    if not (_finite(expected_use_s, start_s, finalise_s, role_changes_s) and _times(old_s, new_s)) or new_s == 0:
        return Verdict(passed=False, reason=GateReason.BAD_NUMBER, numbers=numbers)
    if useful_s <= 0:
        return Verdict(passed=False, reason=GateReason.LEASE_TOO_SHORT, numbers=numbers)
    if math.isinf(new_s):
        return Verdict(passed=False, reason=GateReason.TARGET_INFEASIBLE, numbers=numbers)
    if math.isinf(old_s):
        return Verdict(passed=True, reason=GateReason.CURRENT_INFEASIBLE, numbers=numbers)
    gain_s = useful_s * (old_s / new_s - 1)
    passed = gain_s > cost_s
    reason = GateReason.GAIN if passed else GateReason.GAIN_TOO_SMALL
    return Verdict(passed=passed, reason=reason, numbers=(*numbers, ("gain_s", gain_s)))


def return_by_s(now_s: float, close_s: float, error_s: float, return_s: float, z: float = Z_95) -> float:
    """The latest time to begin giving borrowed GPUs back so that the trainer need not wait, with the confidence of z.

    `close_s`: seconds from now until the batch closes, with a standard deviation of `error_s`; `return_s`: what giving back
    takes. Never before now; inf where the batch never closes; NaN where a number cannot be.
    """
    if not (_times(close_s) and _finite(now_s, return_s, z)):
        return math.nan
    if math.isinf(close_s):
        return math.inf
    if not _finite(error_s):
        return math.nan
    return now_s + max(0.0, close_s - z * error_s - return_s)


def return_due(
    *,
    now_s: float,
    close_s: float,
    error_s: float,
    return_s: float,
    z: float = Z_95,
    batch_closed: bool = False,
) -> Verdict:
    """Whether borrowed GPUs must go back now.

    `batch_closed`: the trainer's batch is complete, earlier than was predicted: due at once, whatever the numbers.
    """
    by_s = return_by_s(now_s, close_s, error_s, return_s, z)
    numbers: Numbers = (("now_s", now_s), ("close_s", close_s), ("error_s", error_s), ("return_by_s", by_s))
    if batch_closed:
        return Verdict(passed=True, reason=GateReason.BATCH_CLOSED, numbers=numbers)
    if math.isnan(by_s):
        return Verdict(passed=False, reason=GateReason.BAD_NUMBER, numbers=numbers)
    due = by_s <= now_s
    return Verdict(passed=due, reason=GateReason.DUE if due else GateReason.NOT_YET, numbers=numbers)


def _times(*values: float) -> bool:
    """Whether all are times, inf included."""
    return all(value >= 0 for value in values)


def _finite(*values: float) -> bool:
    """Whether all are finite and >= 0."""
    return all(math.isfinite(value) and value >= 0 for value in values)
