"""The one mutable holder of the fleet state; everyone else reads snapshots."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict

from pearl.core.state import FleetState, StateEvent, StateRefusal, fold
from pearl.core.state_hash import StateHash
from pearl.ports import JournalSink
from pearl.records.journal import Json, StateEntry

_log = logging.getLogger(__name__)


class StateHolder:
    """Folds events in one after the other and journals each with the state's hash."""

    def __init__(self, journal: JournalSink, start_s: float) -> None:
        self._journal = journal
        self._start_s = start_s
        self._state = FleetState()
        self._hash = StateHash()

    @property
    def snapshot(self) -> FleetState:
        """The newest version."""
        return self._state

    def submit(self, event: StateEvent) -> StateRefusal | None:
        """Fold an event in; a refusal leaves the state as it was."""
        result = fold(self._state, event)
        refusal = result if isinstance(result, StateRefusal) else None
        if not isinstance(result, StateRefusal):
            self._state = result
        else:
            _log.warning("fleet state: %s refused: %s", type(event).__name__, result.detail)
        self._journal.write(
            StateEntry(
                at_s=asyncio.get_running_loop().time() - self._start_s,
                event=type(event).__name__,
                inputs=_plain(asdict(event)),
                state_version=self._state.version,
                state_hash=self._hash.of(self._state),
                refused=refusal.reason.value if refusal else None,
            )
        )
        return refusal


def _plain(fields: dict[str, object]) -> dict[str, Json]:
    return {name: _json(value) for name, value in fields.items()}


def _json(value: object) -> Json:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case tuple() | list():
            return [_json(item) for item in value]
        case dict():
            return {str(key): _json(item) for key, item in value.items()}
        case _:
            return str(getattr(value, "value", value))
