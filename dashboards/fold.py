"""A run, folded from its records: counts, series and queues. Pure: records in, numbers out, no store and no clock.

Records may be folded while others are still being written. What a later stage says about a ticket wins over
what an earlier one says, so the order between logs does not matter as long as every claim that is referred to
has been folded first (`dashboards.snapshot.RunReader` reads in that order).
"""

import re
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from data_contracts.records import (
    Claim,
    Commit,
    Control,
    Curated,
    Evaluation,
    GroupRef,
    Raw,
    Refused,
    Scored,
)

STALENESS = "staleness/tokens"
"""Name of the commits' histogram of sampled tokens by age in versions."""

State = Literal["empty", "running", "silent", "stopped", "finished", "failed"]
"""How a run is; `silent` is for readers with a clock to say."""

RATE_WINDOW_S = 30.0
"""Span of records from which present rates are computed."""


class Stage(IntEnum):
    """How far an unsettled ticket has come."""

    CLAIMED = 0
    RAW = 1
    SCORED = 2
    ACCEPTED = 3


@dataclass(frozen=True)
class Version:
    """What one commit says, for tables and charts."""

    version: int
    at: float
    status: str
    writer: str
    num_groups: int
    num_tokens: int
    """Response tokens trained on in this commit."""
    reward: float | None
    """Mean reward of the consumed groups; None when no record tells it."""
    staleness: dict[int, float]
    """Age in versions to sampled tokens, those left out of the loss included (to groups without a histogram)."""
    max_staleness: float | None
    """Largest age of a token in the loss."""
    metrics: dict[str, float]
    weights: str
    """full or delta."""
    num_bytes: int
    """Bytes of the published weights."""
    digest: str
    has_checkpoint: bool
    evidence: str = ""


@dataclass(frozen=True)
class Activity:
    """What one record says about its role's time: seconds and tokens since the writer's record before."""

    role: str
    writer: str
    at: float
    tokens: float
    busy_s: float
    waiting_s: float


@dataclass
class Worked:
    """A role's activity, summed over its records."""

    writers: set[str] = field(default_factory=set)
    tokens: float = 0.0
    busy_s: float = 0.0
    waiting_s: float = 0.0


@dataclass(frozen=True)
class Event:
    """One line of the run's history, for people."""

    at: float
    kind: str
    text: str


@dataclass
class Tally:
    """How often something happened, and what it said last."""

    count: int = 0
    example: str = ""


@dataclass
class Fold:
    """Everything that the records folded so far add up to."""

    versions: list[Version] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    activity: list[Activity] = field(default_factory=list)
    worked: dict[str, Worked] = field(default_factory=dict)
    """Role to the sums of its activity."""
    staleness: Counter[int] = field(default_factory=Counter)
    refusals: dict[str, Tally] = field(default_factory=dict)
    """Reason to tickets, each ticket once."""
    errors: dict[str, Tally] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    """Sentences about records that cannot all be true."""
    writers: dict[str, None] = field(default_factory=dict)
    """Rollout writers in order of their first claim."""
    open: dict[int, Stage] = field(default_factory=dict)
    """Unsettled tickets."""
    issued: int = 0
    trained: int = 0
    refused_curation: int = 0
    refused_trainer: int = 0
    verdicts: Counter[bool] = field(default_factory=Counter)
    """Verdicts of curation by accepted."""
    late: int = 0
    reclaimed: int = 0
    given_up: int = 0
    last_curated: Curated | None = None
    last_refused: Refused | None = None
    last_commit: Commit | None = None
    state: State = "empty"
    error: str = ""
    """The failed role's own error."""
    first_at: float | None = None
    last_at: float | None = None
    _reward_of: dict[int, float] = field(default_factory=dict)
    _recent: dict[str, deque[Activity]] = field(default_factory=dict)

    def claim(self, record: Claim) -> None:
        """Fold one entry of log/claim."""
        self._seen(record.at)
        if record.kind == "claim":
            self.writers.setdefault(record.writer)
            self.open.update(dict.fromkeys(record.tickets, Stage.CLAIMED))
        elif record.kind == "reclaim":
            self.writers.setdefault(record.writer)
            self.reclaimed += len(record.tickets)
            self.events.append(Event(record.at, "reclaim", f"{record.writer} took over {_plural(record.tickets)}"))
        elif record.kind == "give_up":
            self.given_up += len(record.tickets)
            for ticket in record.tickets:
                _count(self.errors, "given up after the last attempt", f"ticket {ticket}")
        self.issued = max(self.issued, record.next_ticket)

    def raw(self, record: Raw) -> None:
        """Fold one entry of a raw log."""
        self._advance(record.groups, Stage.RAW)
        self._work("rollout", record.writer, record.at, record.metrics)

    def scored(self, record: Scored) -> None:
        """Fold one entry of a scored log."""
        self._advance(record.groups, Stage.SCORED)
        for ticket, reason in record.refused.items():
            self._raise_to(int(ticket), Stage.SCORED)
            _count(self.errors, f"reward: {kind_of(reason)}", f"ticket {ticket}: {reason}")
        self._work("reward", record.writer, record.at, record.metrics)

    def curated(self, record: Curated) -> None:
        """Fold one entry of log/curated."""
        self.last_curated = record
        self.late += len(record.late)
        for verdict in record.verdicts:
            self.verdicts[verdict.accepted] += 1
            if verdict.accepted:
                self._raise_to(verdict.ticket, Stage.ACCEPTED)
                if verdict.reward_mean is not None and verdict.ticket in self.open:
                    self._reward_of[verdict.ticket] = verdict.reward_mean
            elif self.open.pop(verdict.ticket, None) is not None:
                self.refused_curation += 1
                _count(
                    self.refusals, f"curate: {kind_of(verdict.reason)}", f"ticket {verdict.ticket}: {verdict.reason}"
                )
        self._work("curate", record.writer, record.at, record.metrics)

    def refused(self, record: Refused) -> None:
        """Fold one entry of log/refused."""
        self._seen(record.at)
        self.last_refused = record
        for ticket in record.tickets:
            self._reward_of.pop(ticket, None)
            if self.open.pop(ticket, None) is not None:
                self.refused_trainer += 1
                _count(self.refusals, f"train: {record.reason}", f"ticket {ticket}: {record.detail or record.reason}")
        if record.reason == "start":
            self.events.append(Event(record.at, "start", f"trainer {record.writer} at version {record.commit}"))

    def commit(self, record: Commit) -> None:
        """Fold one entry of log/commit."""
        before, self.last_commit = self.last_commit, record
        rewards = [self._reward_of.pop(c.ticket) for c in record.consumed if c.ticket in self._reward_of]
        for consumed in record.consumed:
            if self.open.pop(consumed.ticket, None) is None:
                self.contradictions.append(f"commit {record.version} consumed ticket {consumed.ticket}, settled before")
            else:
                self.trained += 1
        staleness = _staleness(record)
        self.staleness.update(staleness)
        if record.status == "skipped":
            _count(self.errors, "train: skipped step", f"version {record.version}: {record.evidence}")
        num_tokens = record.num_tokens - (before.num_tokens if before else 0)
        self._work("train", record.writer, record.at, {**_train_time(record.metrics), "tokens": num_tokens})
        self.versions.append(
            Version(
                version=record.version,
                at=record.at,
                status=record.status,
                writer=record.writer,
                num_groups=len(record.consumed),
                num_tokens=num_tokens,
                reward=record.metrics.get("reward/mean", sum(rewards) / len(rewards) if rewards else None),
                staleness=staleness,
                max_staleness=record.metrics.get("staleness/max", max(staleness, default=None)),
                metrics=record.metrics,
                weights=record.weights.kind,
                num_bytes=sum(o.num_bytes for o in record.weights.objects),
                digest=record.weights.digest,
                has_checkpoint=record.checkpoint is not None,
                evidence=record.evidence,
            )
        )

    def evaluation(self, record: Evaluation) -> None:
        """Fold one entry of log/eval."""
        self._seen(record.at)
        self.evaluations.append(record)

    def control(self, record: Control) -> None:
        """Fold one entry of log/control."""
        self._seen(record.at)
        if record.kind in ("stop", "end") and self.state == "running":
            self.state = "stopped" if record.kind == "stop" else "finished"
        if record.kind == "fail":
            self.state = "failed"
            self.error = self.error or f"{record.role}: {record.error}"
            _count(self.errors, f"{record.role}: {kind_of(record.error)}", record.error)
        elif record.kind == "start":
            self.state, self.error = "running", ""
        elif record.kind == "dead":
            _count(self.errors, f"{self._role_of(record.target) or 'some role'}: process died", record.target)
        self.events.append(Event(record.at, record.kind, self._tell(record)))

    def rate(self, role: str, now: float) -> float | None:
        """Tokens per second of `role` over the last `RATE_WINDOW_S` before `now`; None when it never told."""
        recent = self._recent.get(role)
        if not recent or not self.worked[role].tokens:
            return None
        inside = [a for a in recent if a.at > now - RATE_WINDOW_S]
        if not inside:
            return 0.0
        first = inside[0]
        span = max(now - (first.at - first.busy_s - first.waiting_s), 1e-3)
        return sum(a.tokens for a in inside) / min(max(span, 1.0), RATE_WINDOW_S)

    def _tell(self, record: Control) -> str:
        match record.kind:
            case "dead":
                return f"{self._role_of(record.target)} process {record.target}".strip()
            case "full_weights":
                return f"{record.role} asks for version {record.version}"
            case "weights":
                return f"version {record.version} in full"
            case "fail":
                return f"{record.role}: {record.error}"
            case _:
                return record.error

    def _role_of(self, writer: str) -> str:
        if writer in self.writers:
            return "rollout"
        return next((name for name, worked in self.worked.items() if writer in worked.writers), "")

    def _advance(self, groups: tuple[GroupRef, ...], stage: Stage) -> None:
        for group in groups:
            self._raise_to(group.ticket, stage)

    def _raise_to(self, ticket: int, stage: Stage) -> None:
        """Move an unsettled ticket forward; a late result of a settled one, or of an older attempt, changes nothing."""
        if ticket in self.open and self.open[ticket] < stage:
            self.open[ticket] = stage

    def _work(self, role: str, writer: str, at: float, metrics: dict[str, float]) -> None:
        self._seen(at)
        told = [metrics.get(name, 0.0) for name in ("tokens", "busy_s", "waiting_s")]
        if any(told):
            entry = Activity(role, writer, at, *told)
            self.activity.append(entry)
            worked = self.worked.setdefault(role, Worked())
            worked.writers.add(writer)
            worked.tokens += entry.tokens
            worked.busy_s += entry.busy_s
            worked.waiting_s += entry.waiting_s
            recent = self._recent.setdefault(role, deque())
            recent.append(entry)
            while recent[0].at < recent[-1].at - RATE_WINDOW_S:
                recent.popleft()

    def _seen(self, at: float) -> None:
        if self.state == "empty":
            self.state = "running"
        self.first_at = at if self.first_at is None else min(self.first_at, at)
        self.last_at = at if self.last_at is None else max(self.last_at, at)


def kind_of(reason: str) -> str:
    """Return what many reasons have in common: the text before the first colon, numbers left out.

    >>> kind_of("row 3 (ticket 17, sample 0): response_ids: expected at least one token, got 0")
    'row # (ticket #, sample #)'
    >>> kind_of("")
    'no reason given'
    """
    return re.sub(r"\d+", "#", reason.split(":", 1)[0]).strip()[:60] or "no reason given"


def _count(tallies: dict[str, Tally], kind: str, example: str) -> None:
    tally = tallies.setdefault(kind, Tally())
    tally.count += 1
    tally.example = example


def _plural(tickets: tuple[int, ...]) -> str:
    return f"ticket {tickets[0]}" if len(tickets) == 1 else f"{len(tickets)} tickets"


def _train_time(metrics: dict[str, float]) -> dict[str, float]:
    busy_s = metrics.get("time/step_s", metrics.get("train/step_s", 0.0))
    return {"busy_s": busy_s, "waiting_s": metrics.get("time/wait_s", 0.0)}


def _staleness(record: Commit) -> dict[int, float]:
    """Age to tokens as the commit tells it; without a histogram, to groups by their oldest token."""
    if STALENESS in record.histograms:
        return {int(float(lag)): count for lag, count in record.histograms[STALENESS].items()}
    lags = Counter(record.version - 1 - c.group.oldest_version for c in record.consumed if c.group.oldest_version >= 0)
    return {lag: float(count) for lag, count in lags.items()}
