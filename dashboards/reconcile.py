"""Proves from a run's records alone that every ticket is accounted for, and that what they name is there.

Independent of the fold that the roles decide by: it counts every ticket of every record, keeps nothing out as
settled, and says which two records cannot both be true. One pass over the records, one listing of the batches;
`deep` reads every batch once more and compares bytes, rows and tickets.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa

from dashboards.fold import Stage, kind_of
from data_contracts import trajectory
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Curated,
    GroupRef,
    Raw,
    Refused,
    Scored,
    Verdict,
)
from infra.log import Log
from infra.objects import get_object
from infra.store import Store


@dataclass
class Books:
    """What the records add up to.

    Attributes:
        issued, trained: tickets.
        refused: stage and kind of reason to tickets, each ticket once.
        in_flight: how far unsettled tickets have come, to tickets.
        late: results of tickets that other attempts had settled.
        both: tickets that a new trainer refused and the one it replaced had trained; they count as trained.
        num_records: records read, by log.
        num_batches, num_bytes: batches that records name, and their lengths together.
        num_rows_read: trajectories read; 0 unless deep.
        contradictions: sentences; none in a sound run.
    """

    issued: int = 0
    trained: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)
    late: int = 0
    both: int = 0
    num_records: Counter[str] = field(default_factory=Counter)
    num_batches: int = 0
    num_bytes: int = 0
    num_rows_read: int = 0
    contradictions: list[str] = field(default_factory=list)

    @property
    def equation(self) -> str:
        """The books in one line."""
        parts = f"{self.trained} trained + {self.refused.total()} refused + {self.in_flight.total()} in flight"
        return f"{self.issued} issued = {parts}"


def reconcile(store: Store, *, deep: bool = False) -> Books:
    """Read a run, also one that goes on, and return its books.

    Args:
        store: view below the run's prefix.
        deep: read the bytes of every batch that a record names.

    Raises:
        StoreError: a record cannot be read, or the store does not answer.
    """
    logs = _Logs.read(store)
    books = Books(num_records=logs.count())
    audit = _Audit(logs, books)
    audit.claims()
    audit.results()
    audit.verdicts()
    audit.refusals()
    audit.commits()
    audit.close()
    _check_batches(store, logs, books, deep=deep)
    return books


@dataclass
class _Logs:
    """Every record of a run, read from effects to causes: what a record refers to has been read after it."""

    commits: list[Commit]
    refused: list[Refused]
    curated: list[Curated]
    scored: dict[str, list[Scored]]
    raw: dict[str, list[Raw]]
    claims: list[Claim]
    has_raw: bool

    @classmethod
    def read(cls, store: Store) -> "_Logs":
        commits = Log(store, "log/commit", Commit).read_from(0)
        refused = Log(store, "log/refused", Refused).read_from(0)
        curated = Log(store, "log/curated", Curated).read_from(0)
        writers = store.at("log/scored").list_folders()
        scored = {writer: Log(store, f"log/scored/{writer}", Scored).read_from(0) for writer in writers}
        writers = sorted({*writers, *store.at("log/raw").list_folders()})
        raw = {writer: Log(store, f"log/raw/{writer}", Raw).read_from(0) for writer in writers}
        claims = Log(store, "log/claim", Claim).read_from(0)
        return cls(commits, refused, curated, scored, raw, claims, any(raw.values()))

    def count(self) -> Counter[str]:
        counts = Counter(
            claim=len(self.claims), curated=len(self.curated), refused=len(self.refused), commit=len(self.commits)
        )
        counts["raw"] = sum(map(len, self.raw.values()))
        counts["scored"] = sum(map(len, self.scored.values()))
        return counts

    def batches(self) -> Iterator[tuple[str, trajectory.Stage, BatchRef, tuple[GroupRef, ...]]]:
        """Yield (record, stage, batch, groups that the record says lie in it)."""
        for writer, records in self.raw.items():
            for number, record in enumerate(records):
                yield f"raw/{writer}/{number}", "raw", record.batch, record.groups
        for writer, scored in self.scored.items():
            for number, record in enumerate(scored):
                if record.batch is not None:
                    yield f"scored/{writer}/{number}", "scored", record.batch, record.groups
        for number, record in enumerate(self.curated):
            for verdict in record.verdicts:
                if verdict.batch is not None and verdict.group is not None:
                    yield f"curated/{number}", "scored", verdict.batch, (verdict.group,)
        for commit in self.commits:
            for group in commit.consumed:
                yield f"commit/{commit.version}", "scored", group.batch, (group.group,)


class _Audit:
    """Follows every ticket from its claim to its end."""

    def __init__(self, logs: _Logs, books: Books) -> None:
        self._logs, self._books = logs, books
        self._stage: dict[int, Stage] = {}
        self._verdicts: dict[int, tuple[int, Verdict]] = {}
        self._refused: dict[int, str] = {}
        self._trained: dict[int, int] = {}

    def _object(self, sentence: str) -> None:
        self._books.contradictions.append(sentence)

    def claims(self) -> None:
        """Tickets are issued in order, each once; later claims speak of issued ones."""
        following = 0
        for number, claim in enumerate(self._logs.claims):
            if claim.kind == "claim":
                expected = tuple(range(following, following + len(claim.tickets)))
                if claim.tickets != expected:
                    self._object(f"claim/{number} issues tickets {_some(claim.tickets)}, expected {_some(expected)}")
                following = max((following, *(n + 1 for n in claim.tickets)))
                self._stage.update(dict.fromkeys(claim.tickets, Stage.CLAIMED))
            elif any(n not in self._stage for n in claim.tickets):
                self._object(f"claim/{number} ({claim.kind}) speaks of tickets that were never issued")
            if claim.next_ticket != following:
                self._object(f"claim/{number} says that ticket {claim.next_ticket} is next, it is {following}")
        self._books.issued = len(self._stage)

    def results(self) -> None:
        """Every group of a raw record is scored or refused under the same number, and nothing else is."""
        for writer, records in self._logs.raw.items():
            for number, record in enumerate(records):
                self._advance((g.ticket for g in record.groups), Stage.RAW, f"raw/{writer}/{number}")
        for writer, records in self._logs.scored.items():
            for number, record in enumerate(records):
                name = f"scored/{writer}/{number}"
                tickets = sorted([g.ticket for g in record.groups] + [int(ticket) for ticket in record.refused])
                self._advance(tickets, Stage.SCORED, name)
                if not self._logs.has_raw:
                    continue  # a replay: nobody rolled out for it
                raw = self._logs.raw.get(writer, [])
                if number >= len(raw):
                    self._object(f"{name} exists, raw/{writer}/{number} does not")
                elif (given := sorted(g.ticket for g in raw[number].groups)) != tickets:
                    self._object(f"{name} speaks of tickets {_some(tickets)}, raw/{writer}/{number} of {_some(given)}")

    def _advance(self, tickets: Iterable[int], stage: Stage, name: str) -> None:
        for ticket in tickets:
            if ticket not in self._stage:
                self._object(f"{name} has ticket {ticket}, which was never issued")
            else:
                self._stage[ticket] = max(self._stage[ticket], stage)

    def verdicts(self) -> None:
        """Every ticket has at most one verdict; the totals count them; whatever is covered has one."""
        totals: Counter[bool] = Counter()
        for number, record in enumerate(self._logs.curated):
            self._books.late += len(record.late)
            for verdict in record.verdicts:
                totals[verdict.accepted] += 1
                if verdict.ticket in self._verdicts:
                    first = self._verdicts[verdict.ticket][0]
                    self._object(f"ticket {verdict.ticket} has a verdict in curated/{first} and in curated/{number}")
                    continue
                self._verdicts[verdict.ticket] = (number, verdict)
                stage = Stage.ACCEPTED if verdict.accepted else Stage.SCORED
                self._advance([verdict.ticket], stage, f"curated/{number}")
            told = (record.num_accepted, record.num_refused)
            if told != (totals[True], totals[False]):
                self._object(f"curated/{number} tells {told} accepted and refused, it is {totals[True], totals[False]}")
            for writer, covered in record.covers.items():
                if covered > len(self._logs.scored.get(writer, [])):
                    self._object(f"curated/{number} covers {covered} records of {writer}, there are fewer")
        self._check_covered()

    def _check_covered(self) -> None:
        covers: dict[str, int] = {}
        for record in self._logs.curated:
            covers |= record.covers
        for writer, covered in covers.items():
            for number, record in enumerate(self._logs.scored.get(writer, [])[:covered]):
                tickets = [g.ticket for g in record.groups] + [int(ticket) for ticket in record.refused]
                for ticket in tickets:
                    if ticket not in self._verdicts:
                        self._object(f"ticket {ticket} of scored/{writer}/{number} is dealt with and has no verdict")

    def refusals(self) -> None:
        """Trainers refuse a ticket at most once; the totals count them."""
        total = 0
        for number, record in enumerate(self._logs.refused):
            total += len(record.tickets)
            for ticket in record.tickets:
                if ticket in self._refused:
                    self._object(f"ticket {ticket} is refused by a trainer again in refused/{number}")
                elif ticket not in self._stage:
                    self._object(f"refused/{number} has ticket {ticket}, which was never issued")
                else:
                    self._refused[ticket] = record.reason
            if record.num_refused != total:
                self._object(f"refused/{number} tells {record.num_refused} refused so far, it is {total}")

    def commits(self) -> None:
        """A commit consumes accepted groups as their verdicts named them, each once over all commits."""
        for number, commit in enumerate(self._logs.commits):
            name = f"commit/{number}"
            if commit.version != number:
                self._object(f"{name} says that it is version {commit.version}")
            for group in commit.consumed:
                if group.ticket in self._trained:
                    self._object(f"ticket {group.ticket} is trained by commit/{self._trained[group.ticket]} and {name}")
                    continue
                self._trained[group.ticket] = number
                self._check_consumed(name, group)
            if commit.num_trained != len(self._trained):
                self._object(f"{name} tells {commit.num_trained} trained so far, it is {len(self._trained)}")

    def _check_consumed(self, name: str, group: Consumed) -> None:
        number, verdict = self._verdicts.get(group.ticket, (-1, None))
        if group.ticket not in self._stage:
            self._object(f"{name} trained ticket {group.ticket}, which was never issued")
        elif verdict is None:
            self._object(f"{name} trained ticket {group.ticket}, which has no verdict")
        elif not verdict.accepted:
            self._object(f"{name} trained ticket {group.ticket}, which curated/{number} refused")
        elif (verdict.batch, verdict.group, verdict.attempt) != (group.batch, group.group, group.attempt):
            self._object(f"{name} trained another result of ticket {group.ticket} than curated/{number} accepted")

    def close(self) -> None:
        """Count where each issued ticket is."""
        books = self._books
        for ticket, stage in self._stage.items():
            _, verdict = self._verdicts.get(ticket, (-1, None))
            if ticket in self._trained:
                books.trained += 1
                books.both += ticket in self._refused
            elif ticket in self._refused:
                books.refused[f"train: {self._refused[ticket]}"] += 1
            elif verdict is not None and not verdict.accepted:
                books.refused[f"curate: {kind_of(verdict.reason)}"] += 1
            else:
                books.in_flight[stage.name.lower()] += 1
        if books.issued != books.trained + books.refused.total() + books.in_flight.total():
            self._object(f"the books do not balance: {books.equation}")


def _check_batches(store: Store, logs: _Logs, books: Books, *, deep: bool) -> None:
    """Every batch that a record names is there, once named always the same, and groups lie inside it."""
    there = set(store.list("batch"))
    named: dict[str, BatchRef] = {}
    groups: dict[str, dict[tuple[int, int, int, int], str]] = {}
    stages: dict[str, trajectory.Stage] = {}
    for name, stage, batch, in_it in logs.batches():
        before = named.setdefault(batch.key, batch)
        if before is batch and batch.key not in there:
            books.contradictions.append(f"{name} names {batch.key}, which does not exist")
        if before != batch:
            books.contradictions.append(f"{name} names {batch.key} with other length, rows or SHA-256 than before")
        stages[batch.key] = stage
        for group in in_it:
            if group.first_row + group.num_rows > batch.num_rows:
                books.contradictions.append(f"{name}: ticket {group.ticket} lies outside of {batch.key}")
            place = (group.ticket, group.attempt, group.first_row, group.num_rows)
            groups.setdefault(batch.key, {}).setdefault(place, name)
    books.num_batches = len(named)
    books.num_bytes = sum(batch.num_bytes for batch in named.values())
    for key, batch in named.items() if deep else ():
        if key in there:
            _read_batch(store, batch, stages[key], groups[key], books)


def _read_batch(
    store: Store,
    batch: BatchRef,
    stage: trajectory.Stage,
    groups: dict[tuple[int, int, int, int], str],
    books: Books,
) -> None:
    try:
        table = trajectory.decode(get_object(store, batch), name=batch.key)
        trajectory.check_schema(table.schema, stage)
    except (ContractError, ObjectMissing) as cause:
        books.contradictions.append(str(cause))
        return
    books.num_rows_read += table.num_rows
    if table.num_rows != batch.num_rows:
        books.contradictions.append(f"{batch.key}: expected {batch.num_rows} rows, got {table.num_rows}")
    columns: pa.Table = table.select(["ticket", "attempt"])
    tickets, attempts = (column.to_pylist() for column in columns.columns)
    for (ticket, attempt, first, num), name in groups.items():
        rows = range(first, min(first + num, table.num_rows))
        if any((tickets[row], attempts[row]) != (ticket, attempt) for row in rows):
            books.contradictions.append(
                f"{name}: rows {first} to {first + num - 1} of {batch.key} are not those of ticket {ticket}, "
                f"attempt {attempt}"
            )


def _some(tickets: Iterable[int]) -> str:
    told = list(tickets)
    shown = ", ".join(map(str, told[:5]))
    return f"[{shown}, ... {len(told)} in all]" if len(told) > 5 else f"[{shown}]"
