"""The fold: what a view of the four logs claim, curated, refused and commit says about every ticket.

Each log is applied strictly in number order; between the logs any order will do, because a view may lag in
one and not in another. The state depends only on how many records of each log were applied, never on how
they were interleaved. It forgets a ticket as soon as no record that it has not applied can change what
became of it, so its size is that of the work in flight and not that of the run.

When a ticket may be forgotten follows from the order of a trainer's actions: it announces itself in
`refused` ("start"), it stops at the first sight of a later start, and it looks for one after each of its
commits. So a trainer that was replaced can win at most the one commit it was working on, and
 - a ticket that was refused by trainers in record r is safe from training once a commit says that its
   trainer had applied record r (`Commit.positions`);
 - a ticket trained in commit v is safe from refusal once commit v + 1 exists and the refusals which that
   commit's trainer had applied are applied here.
"""

from collections.abc import Iterable
from typing import Any, Literal

from data_contracts.errors import ProtocolError
from data_contracts.protocol_limit import Limit, following_limit
from data_contracts.protocol_ticket import Account, ClaimRange, Rules, Ticket, ticket_from_json, ticket_to_json
from data_contracts.records import Claim, Commit, Curated, Record, Refused

LogName = Literal["claim", "curated", "refused", "commit"]

LOGS: dict[LogName, type[Record]] = {"claim": Claim, "curated": Curated, "refused": Refused, "commit": Commit}
"""The logs of the fold and the kind of record in each."""

SNAPSHOT_FORMAT = 1
RETURNED = ("dropped", "timeout", "unreadable")
"""Reasons of refusal after which a prompt goes back to the front of the curriculum."""


class RunState:
    """The fold over one view of the logs. Starts empty, or from a snapshot."""

    def __init__(self, rules: Rules) -> None:
        """Start before the first record of every log."""
        self.rules = rules
        self.next: dict[LogName, int] = dict.fromkeys(LOGS, 0)
        """Number of the next record to apply, by log."""
        self.needs: dict[LogName, int] = dict.fromkeys(LOGS, 0)
        """How many records of each log the writers of the applied records had seen."""
        self.next_ticket = 0
        self.named_ticket = 0
        """One more than the highest ticket that any applied record names."""
        self.tickets: dict[int, Ticket] = {}
        """Every ticket that later records can still change; an issued one that is missing here is settled."""
        self.num_trained = 0
        self.num_refused = 0
        """Issued tickets settled without training."""
        self.num_accepted_by_curation = 0
        self.num_refused_by_curation = 0
        self.num_refused_by_trainers = 0
        self.num_both = 0
        """Tickets refused by a new trainer and trained by the one it replaced."""
        self.num_overbooked = 0
        """Tickets refused as overbooked."""
        self.covers: dict[str, int] = {}
        """Rollout writer to the number of its scored records that curation has dealt with."""
        self.trainer = ""
        """Writer of the newest trainer start."""
        self.refused_commit = -1
        """Newest commit that the writer of the last refused record knew."""
        self.seen: dict[LogName, int] = dict.fromkeys(LOGS, 0)
        """`positions` of the newest commit: what its trainer had applied."""
        self.fences: dict[int, int] = {}
        """Commit v to the refused records that the trainer of v + 1 had applied, while tickets of v are kept."""
        self.claim_ranges: list[ClaimRange] = []
        """Claims that the newest commit's trainer had not seen."""
        self.limit = Limit(rules.max_staleness or 0, 0)
        """How far rollouts may run ahead at present, when that adapts; never further than max_staleness."""

    @property
    def version(self) -> int:
        """Newest commit; -1 before commit/0."""
        return self.next["commit"] - 1

    @property
    def is_finished(self) -> bool:
        """Whether every step of the run has been committed."""
        return self.version >= self.rules.steps

    @property
    def effective_staleness(self) -> int | None:
        """How many versions rollouts may run ahead at present; None without a bound."""
        return self.rules.max_staleness if self.rules.adaptive is None else self.limit.versions

    @property
    def num_in_flight(self) -> int:
        """Issued tickets that are neither trained nor refused."""
        return self.next_ticket - self.num_trained - self.num_refused

    def account(self) -> Account:
        """Return where the issued tickets are."""
        return Account(self.next_ticket, self.num_trained, self.num_refused, self.num_in_flight)

    def behind(self) -> list[LogName]:
        """Return the logs in which this view lags behind what the applied records' writers had seen.

        Decisions need an empty list: read these logs further first. One more look to their ends is enough,
        since what a writer had seen is in the store.
        """
        is_behind = {log: self.next[log] < self.needs[log] for log in LOGS}
        is_behind["claim"] |= self.next_ticket < self.named_ticket
        return [log for log in LOGS if is_behind[log]]

    def require_current(self) -> None:
        """Raise ProtocolError while the view lags behind: nothing may be decided."""
        behind = self.behind()
        if behind:
            raise ProtocolError(f"this view lags behind in {behind}: read these logs to their ends before deciding")

    def require_version(self, version: int) -> None:
        """Raise ProtocolError unless commit `version` is known to exist."""
        if not 0 <= version <= self.version:
            raise ProtocolError(f"version {version} is not among the commits 0..{self.version} of this view")

    def in_flight(self) -> list[Ticket]:
        """Return the tickets in flight, in ticket order."""
        return [self.tickets[n] for n in sorted(self.tickets) if self.tickets[n].is_in_flight]

    def deadline(self, ticket: Ticket) -> int | None:
        """Return the newest version that may be trained from with this ticket's group; None without a bound.

        Until curation settles it, that of the oldest attempt (a rebase moves it); then that of the tokens
        it has, those older than the floor being out of the loss.
        """
        floor = ticket.floor
        if ticket.verdict is not None and ticket.verdict.group is not None:
            floor = max(floor, ticket.verdict.group.oldest_version)
        return self.rules.deadline(floor)

    def apply(self, log: LogName, number: int, record: Record) -> None:
        """Apply record `number` of `log`.

        Raises:
            ProtocolError: not the next number, or the record contradicts those before it.
        """
        if number != self.next[log]:
            raise ProtocolError(f"log {log}: expected record {self.next[log]}, got {number}; apply records in order")
        if not isinstance(record, LOGS[log]):
            raise ProtocolError(
                f"log {log}: record {number}: expected {LOGS[log].__name__}, got {type(record).__name__}"
            )
        if isinstance(record, Claim):
            self._apply_claim(number, record)
        elif isinstance(record, Curated):
            self._apply_curated(number, record)
        elif isinstance(record, Refused):
            self._apply_refused(number, record)
        elif isinstance(record, Commit):
            self._apply_commit(number, record)

    # --- one method for each log ---

    def _apply_claim(self, number: int, record: Claim) -> None:
        self.next["claim"] = number + 1
        self.needs["commit"] = max(self.needs["commit"], record.version + 1, record.curriculum + 1)
        if record.kind == "claim":
            self._issue(number, record)
            return
        if record.next_ticket != self.next_ticket or any(n >= self.next_ticket for n in record.tickets):
            raise ProtocolError(
                f"log claim: record {number} ({record.kind}) speaks of tickets {record.tickets} and next ticket "
                f"{record.next_ticket}, but {self.next_ticket} is the next free one"
            )
        for n in record.tickets:
            ticket = self.tickets.get(n)
            if ticket is not None:
                self._continue(number, record, ticket)

    def _issue(self, number: int, record: Claim) -> None:
        first, end = self.next_ticket, self.next_ticket + len(record.tickets)
        is_next = first < end and record.tickets == tuple(range(first, end))
        if not is_next or record.next_ticket != end or record.attempt != 0:
            raise ProtocolError(
                f"log claim: record {number} claims {record.tickets} (attempt {record.attempt}, "
                f"next {record.next_ticket}), but {first} is the next free ticket"
            )
        self.next_ticket = end
        self.named_ticket = max(self.named_ticket, end)
        if number >= self.seen["claim"]:
            self.claim_ranges.append(ClaimRange(number, first, end, record.curriculum))
        for n in record.tickets:
            ticket = self.tickets.setdefault(n, Ticket(n))
            self._count(ticket, -1)
            ticket.attempt, ticket.writers = 0, [record.writer]
            ticket.floor, ticket.curriculum = record.version, record.curriculum
            self._count(ticket, +1)
        self._forget(record.tickets)

    def _continue(self, number: int, record: Claim, ticket: Ticket) -> None:
        """Apply a reclaim, rebase or give_up; whoever came first in the log has the attempt, others are ignored."""
        if record.kind == "reclaim" and record.attempt == ticket.attempt + 1 and not ticket.given_up:
            if record.version < ticket.floor:
                raise ProtocolError(
                    f"log claim: record {number} takes over ticket {ticket.number} with version {record.version}, "
                    f"expected at least {ticket.floor}; older weights would shorten its deadline"
                )
            ticket.attempt = record.attempt
            ticket.writers.append(record.writer)
        elif record.kind == "rebase" and (record.attempt, record.writer) == (ticket.attempt, ticket.owner):
            ticket.floor, ticket.floor_attempt = max(ticket.floor, record.version), record.attempt
        elif record.kind == "give_up" and record.attempt == ticket.attempt:
            ticket.given_up = True

    def _apply_curated(self, number: int, record: Curated) -> None:
        self.next["curated"] = number + 1
        for verdict in record.verdicts:
            ticket = self._known(verdict.ticket)
            if ticket is None or ticket.verdict is not None:
                continue  # settled before: a first verdict is never undone
            if ticket.is_trained and not verdict.accepted:
                raise ProtocolError(
                    f"ticket {ticket.number}: trained by commit {ticket.trained_by}, refused by curation"
                )
            self._count(ticket, -1)
            ticket.verdict, ticket.verdict_at = verdict, number
            self._count(ticket, +1)
        self._forget([verdict.ticket for verdict in record.verdicts])
        for writer, covered in record.covers.items():
            self.covers[writer] = max(covered, self.covers.get(writer, 0))
        self.num_accepted_by_curation = record.num_accepted
        self.num_refused_by_curation = record.num_refused

    def _apply_refused(self, number: int, record: Refused) -> None:
        if record.commit < self.refused_commit:
            raise ProtocolError(
                f"log refused: record {number} knew commit {record.commit}, the one before it {self.refused_commit}"
            )
        self.next["refused"] = number + 1
        self.refused_commit = record.commit
        self.needs["commit"] = max(self.needs["commit"], record.commit + 1)
        if record.reason == "start":
            self.trainer = record.writer
        elif record.writer != self.trainer:
            raise ProtocolError(
                f"log refused: record {number} is by trainer {record.writer}, but {self.trainer} had replaced it; "
                "a trainer must apply the log before it appends"
            )
        if record.reason == "overbooked":
            self.num_overbooked += len(record.tickets)
        for n in record.tickets:
            ticket = self._known(n)
            if ticket is not None and ticket.refused_at is None:
                self._count(ticket, -1)
                ticket.refused_at, ticket.refused_reason = number, record.reason
                self._count(ticket, +1)
        self.num_refused_by_trainers = record.num_refused
        self._forget(list(self.tickets))

    def _apply_commit(self, number: int, record: Commit) -> None:
        consumed = [group.ticket for group in record.consumed]
        self._check_commit(number, record, consumed)
        self.next["commit"] = number + 1
        for log in LOGS:
            position = record.positions.get(log, 0)
            if position < self.seen[log]:
                raise ProtocolError(
                    f"commit {number}: its trainer had applied {position} records of {log}, "
                    f"that of the commit before it {self.seen[log]}"
                )
            self.seen[log] = position
            self.needs[log] = max(self.needs[log], position)
        for n in consumed:
            ticket = self._known(n)
            if ticket is None or ticket.is_trained or (ticket.verdict is not None and not ticket.verdict.accepted):
                raise ProtocolError(f"commit {number}: ticket {n} was settled before; it can be trained at most once")
            self._count(ticket, -1)
            ticket.trained_by = number
            self._count(ticket, +1)
        self.fences[number - 1] = self.seen["refused"]
        rules = self.rules
        if rules.adaptive is not None and rules.max_staleness is not None:
            self.limit = following_limit(
                self.limit, rules.adaptive, maximum=rules.max_staleness, version=number, metrics=record.metrics
            )
        self.claim_ranges = [r for r in self.claim_ranges if r.number >= self.seen["claim"]]
        self._forget(list(self.tickets))

    def _check_commit(self, number: int, record: Commit, consumed: list[int]) -> None:
        if record.version != number or (number == 0) != (record.status == "initial"):
            raise ProtocolError(f"commit {number}: says version {record.version} and status {record.status}")
        want = 0 if number == 0 else self.rules.groups_per_step
        if len(consumed) != want or len(set(consumed)) != want:
            raise ProtocolError(f"commit {number}: expected {want} different tickets, got {consumed}")
        if record.num_trained != number * self.rules.groups_per_step:
            raise ProtocolError(
                f"commit {number}: expected num_trained {number * self.rules.groups_per_step}, got {record.num_trained}"
            )
        if number > self.rules.steps:
            raise ProtocolError(f"commit {number}: the run has {self.rules.steps} steps")

    # --- tickets ---

    def _known(self, number: int) -> Ticket | None:
        """Return the ticket, None if it was settled and forgotten; one whose claim is not known yet is made."""
        if number >= self.next_ticket:
            self.named_ticket = max(self.named_ticket, number + 1)
            return self.tickets.setdefault(number, Ticket(number))
        return self.tickets.get(number)

    def _count(self, ticket: Ticket, sign: int) -> None:
        if ticket.is_trained and ticket.refused_at is not None:
            self.num_both += sign
        if ticket.is_claimed and ticket.is_trained:
            self.num_trained += sign
        elif ticket.is_claimed and ticket.is_refused:
            self.num_refused += sign

    def _is_final(self, ticket: Ticket) -> bool:
        """Whether no record that is still to be applied can change what became of the ticket."""
        if not ticket.is_claimed:
            return False
        if ticket.trained_by is not None:
            fence = self.fences.get(ticket.trained_by)
            return fence is not None and self.next["refused"] >= fence
        if ticket.refused_at is not None and ticket.refused_at < self.seen["refused"]:
            return True
        by_curation = ticket.verdict is not None and not ticket.verdict.accepted
        return by_curation and ticket.verdict_at < self.seen["curated"]

    def _forget(self, numbers: Iterable[int]) -> None:
        for n in numbers:
            if n in self.tickets and self._is_final(self.tickets[n]):
                del self.tickets[n]
        kept = {ticket.trained_by for ticket in self.tickets.values()}
        self.fences = {v: fence for v, fence in self.fences.items() if v in kept}

    # --- snapshots ---

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON value: positions, totals and the tickets that are kept."""
        return {
            "format": SNAPSHOT_FORMAT,
            "rules": self.rules.to_json(),
            **({} if self.rules.adaptive is None else {"limit": list(self.limit)}),
            **{name: _plain(getattr(self, name)) for name in _SCALARS},
            "fences": [[v, fence] for v, fence in sorted(self.fences.items())],
            "claim_ranges": [list(r) for r in self.claim_ranges],
            "tickets": [ticket_to_json(self.tickets[n]) for n in sorted(self.tickets)],
        }

    @classmethod
    def from_snapshot(cls, rules: Rules, value: dict[str, Any]) -> "RunState":
        """Return the state that `snapshot` had written; apply the later records to it.

        Raises:
            ProtocolError: another format, or a run with other rules.
        """
        if value.get("format") != SNAPSHOT_FORMAT or value.get("rules") != rules.to_json():
            raise ProtocolError(
                f"snapshot: expected format {SNAPSHOT_FORMAT} and rules {rules.to_json()}, "
                f"got format {value.get('format')} and rules {value.get('rules')}"
            )
        state = cls(rules)
        for name in _SCALARS:
            setattr(state, name, _plain(value[name]))
        state.fences = {v: fence for v, fence in value["fences"]}
        state.limit = Limit(*value.get("limit", state.limit))
        state.claim_ranges = [ClaimRange(*r) for r in value["claim_ranges"]]
        state.tickets = {t["number"]: ticket_from_json(t) for t in value["tickets"]}
        return state

    def __eq__(self, other: object) -> bool:
        """Whether both states say the same; the order in which their logs were interleaved leaves no trace."""
        return isinstance(other, RunState) and self.snapshot() == other.snapshot()

    __hash__ = None  # type: ignore[assignment]  # it changes


_SCALARS = (
    "next",
    "needs",
    "next_ticket",
    "named_ticket",
    "num_trained",
    "num_refused",
    "num_accepted_by_curation",
    "num_refused_by_curation",
    "num_refused_by_trainers",
    "num_both",
    "num_overbooked",
    "covers",
    "trainer",
    "refused_commit",
    "seen",
)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else value
