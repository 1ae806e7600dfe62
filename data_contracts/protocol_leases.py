"""Leases and timeouts: bookkeeping over an observer's own monotonic clock, which the caller reads.

Clocks of different machines are never compared: an observer remembers when it saw a counter move, by its
own clock, and calls a lease lost when it has not moved for too long.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from data_contracts.protocol_state import RunState
from data_contracts.protocol_ticket import Ticket
from data_contracts.records import DELIVERED, Heartbeat


class Lease(NamedTuple):
    """The right of an attempt to its ticket."""

    ticket: int
    attempt: int


@dataclass
class Leases:
    """Tells whose lease is lost.

    A lease is lost when the ticket's counter in its owner's heartbeat has not moved for `lease_s` (a
    heartbeat that never came, or does not name the ticket, counts as one that does not move), at once when
    the supervisor has declared the owner dead, and at once when the owner has ended. A ticket with counter 0
    waits for its turn: it lives while any of its owner's counters move. One that was delivered waits for
    reward and curation, and cannot be lost.
    """

    lease_s: float
    _seen: dict[Lease, tuple[object, float]] = field(default_factory=dict)

    def observe(
        self, now_s: float, state: RunState, heartbeats: Mapping[str, Heartbeat], dead: Collection[str] = ()
    ) -> list[Lease]:
        """Return the leases lost by now, in ticket order.

        Args:
            now_s: the observer's monotonic clock.
            state: the observer's view.
            heartbeats: newest heartbeat by writer, as far as there is one.
            dead: writers named by a `dead` record in log/control.
        """
        seen: dict[Lease, tuple[object, float]] = {}
        lost = []
        for ticket in state.in_flight():
            if not ticket.is_pending or ticket.given_up:
                continue
            lease = Lease(ticket.number, ticket.attempt)
            heartbeat = heartbeats.get(ticket.owner)
            sign = _sign_of_life(ticket, heartbeat)
            last, since_s = self._seen.get(lease, (sign, now_s))
            seen[lease] = (sign, since_s if sign == last else now_s)
            if sign == DELIVERED:
                continue
            has_ended = ticket.owner in dead or (heartbeat is not None and heartbeat.done)
            if has_ended or now_s - seen[lease][1] >= self.lease_s:
                lost.append(lease)
        self._seen = seen
        return lost


def _sign_of_life(ticket: Ticket, heartbeat: Heartbeat | None) -> object:
    counter = None if heartbeat is None else heartbeat.held.get(str(ticket.number))
    if counter == 0 and heartbeat is not None:
        return (0, sorted(heartbeat.held.items()))
    return counter


@dataclass
class Timeouts:
    """Tells which tickets have been out too long, by the trainer's clock since it first saw them."""

    timeout_s: float | None
    _since: dict[int, float] = field(default_factory=dict)

    def observe(self, now_s: float, state: RunState) -> list[int]:
        """Return the pending tickets that have been out for `timeout_s` by now, in ticket order."""
        if self.timeout_s is None:
            return []
        pending = [t.number for t in state.in_flight() if t.is_pending]
        self._since = {n: self._since.get(n, now_s) for n in pending}
        return [n for n in pending if now_s - self._since[n] >= self.timeout_s]
