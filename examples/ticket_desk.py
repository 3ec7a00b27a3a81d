"""An environment of one's own: a support desk that has to route each ticket to the right queue.

A complaint alone fits two queues; one question to the customer tells them apart and costs a little reward. So the best
desk asks once, then routes: 1 - `ask_cost` per ticket, where guessing at once earns 0.5 on average.

    pearl train examples/ticket_desk.toml
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pearl.records.trajectory import EnvironmentReply, Scalar

ASK = "?"
QUEUES = ("billing", "login", "network", "device")
ROUTES = tuple(queue[0] for queue in QUEUES)
"""Actions are single letters because with the character tokenizer of the tiny model every character is a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """What a customer writes, what they add when asked, and where the ticket belongs."""

    complaint: str
    detail: str
    queue: str


TICKETS = (
    Ticket(complaint="no access", detail="bill unpaid", queue="billing"),
    Ticket(complaint="no access", detail="wrong code", queue="login"),
    Ticket(complaint="too slow", detail="only at home", queue="network"),
    Ticket(complaint="too slow", detail="old laptop", queue="device"),
    Ticket(complaint="not paid", detail="card expired", queue="billing"),
    Ticket(complaint="not paid", detail="page offline", queue="network"),
)
COMPLAINTS = frozenset(ticket.complaint for ticket in TICKETS)


class TicketDesk:
    """One ticket, to be routed within `patience` actions.

    An action is `?`, a question to the customer, or the first letter of a queue. The right queue pays 1, less `ask_cost` for
    every question; everything else pays 0. Any other action ends the ticket.
    """

    def __init__(self, patience: int = 3, ask_cost: float = 0.1, ticket: int | None = None) -> None:
        if patience < 1:
            raise ValueError(f"ticket_desk: got patience = {patience}, want >= 1")
        if not 0 <= ask_cost * (patience - 1) <= 1:
            raise ValueError(f"ticket_desk: got ask_cost = {ask_cost}, want 0..1 over {patience - 1} questions")
        if ticket is not None and not 0 <= ticket < len(TICKETS):
            want = f"0..{len(TICKETS) - 1} or none (drawn from the seed)"
            raise ValueError(f"ticket_desk: got ticket = {ticket}, want {want}")
        self._patience, self._ask_cost, self._fixed = patience, ask_cost, ticket
        self._ticket: Ticket | None = None
        self._left = 0

    def reset(self, seed: int) -> str:
        """Take the next ticket, drawn from the seed unless it is fixed; return the complaint."""
        drawn = random.Random(seed).randrange(len(TICKETS))
        self._ticket = TICKETS[drawn if self._fixed is None else self._fixed]
        self._left = self._patience
        return self._ticket.complaint

    def step(self, action: str) -> EnvironmentReply:
        """Ask the customer, or route the ticket and be done."""
        if self._ticket is None or self._left < 1:
            raise RuntimeError("ticket_desk: step without an open ticket; call reset first")
        questions = self._patience - self._left
        self._left -= 1
        match action.strip():
            case word if word == self._ticket.queue[0]:
                return self._end("solved", 1 - self._ask_cost * questions, success=True)
            case word if word in ROUTES:
                return self._end("wrong queue", 0.0, success=False)
            case word if word == ASK and self._left:
                return EnvironmentReply(observation=self._ticket.detail, reward=0.0, done=False)
            case _:
                return self._end("hung up", 0.0, success=False)

    def close(self) -> None:
        """Hold nothing."""

    @classmethod
    def evaluation_params(cls, **_params: Scalar) -> Sequence[Mapping[str, Scalar]]:
        """Return every ticket once."""
        return tuple({"ticket": number} for number in range(len(TICKETS)))

    def scripted_player(self, rng: random.Random) -> TicketDeskPlayer:
        """Return a poor player, see `TicketDeskPlayer`."""
        return TicketDeskPlayer(rng)

    def _end(self, observation: str, reward: float, *, success: bool) -> EnvironmentReply:
        self._left = 0
        return EnvironmentReply(observation=observation, reward=reward, done=True, success=success)


class TicketDeskPlayer:
    """Asks about half of the complaints, understands half of the answers, and otherwise routes blindly.

    Enough to show the format and that answers matter, and far from a solution: that is left to the training.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def act(self, observation: str) -> str:
        """Ask, or name a queue."""
        careful = self._rng.random() < 0.5
        if careful and observation in COMPLAINTS:
            return ASK
        understood = [ticket.queue[0] for ticket in TICKETS if careful and ticket.detail == observation]
        return self._rng.choice(understood or ROUTES)
