"""Predictions of one decision, each made once.

A decision asks for the same shapes several times: what serves, what is best without and with borrowed workers, with fewer GPUs.
A predictor takes far longer per call than per shape, so whoever knows what will be asked for asks for all of it at first.
"""

from __future__ import annotations

import numpy as np

from pearl.core.makespan import SERVING_ROLES, Candidates, Forecast, Ints, Predictions

_Row = tuple[float, float, int]


class Remembered:
    """A forecast that is asked for each candidate once."""

    def __init__(self, forecast: Forecast) -> None:
        self._forecast = forecast
        self._known: dict[bytes, _Row] = {}

    def __call__(self, candidates: Candidates) -> Predictions:
        """Of all candidates at once."""
        keys = _keys(candidates)
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        if new:
            asked = self._forecast(_some(candidates, np.array(list(new.values()))))
            rows = zip(asked.close_s.tolist(), asked.error_s.tolist(), asked.infeasible.tolist(), strict=True)
            self._known.update(zip(new, rows, strict=True))
        known = [self._known[key] for key in keys]
        return Predictions(
            close_s=np.array([row[0] for row in known]),
            error_s=np.array([row[1] for row in known]),
            infeasible=np.array([row[2] for row in known], dtype=np.int64),
        )


def _keys(candidates: Candidates) -> list[bytes]:
    columns = [side[role] for side in (candidates.workers, candidates.tp) for role in SERVING_ROLES]
    columns += [candidates.append_tokens, candidates.second, candidates.second_tp]
    rows, size = np.stack(columns, axis=1).tobytes(), 8 * len(columns)
    return [rows[at : at + size] for at in range(0, len(rows), size)]


def _some(candidates: Candidates, places: Ints) -> Candidates:
    return Candidates(
        workers={role: count[places] for role, count in candidates.workers.items()},
        tp={role: tp[places] for role, tp in candidates.tp.items()},
        append_tokens=candidates.append_tokens[places],
        second=candidates.second[places],
        second_tp=candidates.second_tp[places],
    )
