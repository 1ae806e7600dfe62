"""What a run looks like now: one plain value, read from its records alone.

`RunReader` follows a run: every refresh reads only the records that are new, and the heartbeats. It copes with
whatever is missing (a run that just began, one that died, old heartbeats), and it never writes.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from dashboards.checks import Check, balance
from dashboards.fold import Activity, Event, Fold, Stage, State, Tally, Version, Worked
from dashboards.quality import Quality
from data_contracts.errors import StoreError
from data_contracts.records import (
    Audit,
    Claim,
    Commit,
    Control,
    Curated,
    Evaluation,
    Heartbeat,
    Raw,
    Record,
    Refused,
    Scored,
)
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.store import Store

ROLES = ("rollout", "reward", "curate", "train", "evaluate")
"""Roles in the order in which data pass them."""

EVAL_HEADLINES = ("eval/accuracy", "eval/reward")
"""Metrics of an evaluation that stand for it where there is room for one number, best first."""


@dataclass(frozen=True)
class RoleUse:
    """What one role has done, over all its processes.

    Attributes:
        writers: processes that have beaten or written so far.
        alive: processes whose heartbeat is recent and not `done`.
        busy_s, waiting_s: seconds, summed over processes.
        processor_s: processor time by the heartbeats, all threads of all processes.
        tokens: response tokens sampled (rollout) or trained on (train).
        tokens_per_s: now: over the last seconds of records; None when the role does not tell tokens.
        state: what the newest heartbeat says it does; empty without one.
    """

    role: str
    writers: int = 0
    alive: int = 0
    busy_s: float = 0.0
    waiting_s: float = 0.0
    processor_s: float = 0.0
    tokens: float = 0.0
    tokens_per_s: float | None = None
    state: str = ""

    @property
    def busy_share(self) -> float | None:
        """Share of its time that the role worked, 0 to 1; None when no time is known."""
        total = self.busy_s + self.waiting_s
        return self.busy_s / total if total > 0 else None


@dataclass(frozen=True)
class Queues:
    """Unsettled tickets by where they are."""

    claimed: int = 0
    """Claimed, not finished by a rollout worker."""
    raw: int = 0
    """Finished, not scored."""
    scored: int = 0
    """Scored, without a verdict."""
    accepted: int = 0
    """Accepted, not trained."""

    @property
    def total(self) -> int:
        """All unsettled tickets."""
        return self.claimed + self.raw + self.scored + self.accepted


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment. Sequences are shared with the reader: read them, do not change them.

    Attributes:
        run: id, the last part of the run's URL.
        url: of the run's prefix in the store.
        config: run.json's config; empty when there is none yet.
        packages: name to version, as run.json tells.
        state: `empty` before the first record; `silent` when it should be running but nothing has given a sign of
            life for longer than the heartbeat limit.
        error: the failed role's own error, with the role in front.
        step: newest version; -1 before commit 0. `steps`: how many are asked for.
        issued, trained, refused_curation, refused_trainer: tickets; `queues.total` are in flight.
        staleness: age in versions to sampled tokens, over all commits.
        refusals, errors: by kind.
        checks: the books, balanced.
        quality: what the audit found.
        eta_s: seconds to the last step at the recent pace; None when unknown or not running.
        age_s: seconds since the last sign of life, by the reader's clock.
    """

    run: str
    url: str
    config: dict[str, Any]
    packages: dict[str, str]
    created_at: float | None
    state: State
    error: str
    step: int
    steps: int | None
    max_staleness: int | None
    versions: Sequence[Version]
    evaluations: Sequence[Evaluation]
    staleness: Counter[int]
    roles: dict[str, RoleUse]
    queues: Queues
    issued: int
    trained: int
    refused_curation: int
    refused_trainer: int
    late: int
    reclaimed: int
    refusals: dict[str, Tally]
    errors: dict[str, Tally]
    checks: Sequence[Check]
    events: Sequence[Event]
    activity: Sequence[Activity]
    first_at: float | None
    last_at: float | None
    age_s: float | None
    eta_s: float | None
    quality: Quality

    @property
    def reward(self) -> float | None:
        """Mean reward of the newest commit that tells one."""
        return next((v.reward for v in reversed(self.versions) if v.reward is not None), None)

    @property
    def num_tokens(self) -> int:
        """Response tokens trained on so far."""
        return sum(v.num_tokens for v in self.versions)

    @property
    def duration_s(self) -> float | None:
        """Seconds between the first and the last sign of life."""
        return None if self.first_at is None or self.last_at is None else self.last_at - self.first_at


def headline(evaluation: Evaluation) -> tuple[str, float] | None:
    """Return the name and value of the metric that stands for an evaluation; None when it has none."""
    for name in (*EVAL_HEADLINES, *evaluation.metrics):
        if name in evaluation.metrics:
            return name, evaluation.metrics[name]
    return None


def snapshot(store: Store) -> Snapshot:
    """Read a run from the beginning. `store` is a view below the run's prefix."""
    return RunReader(store).refresh()


@dataclass
class _Tail:
    """A log and how much of it has been read."""

    log: Log
    position: int = 0

    damage: str = ""
    """Why nothing behind `position` can be read; empty while all is well."""

    def read(self) -> list[Any]:
        """Return the new records, up to one that is no record: the report of a damaged run must still be written."""
        if self.damage:
            return []
        try:
            records = self.log.read_from(self.position)
        except StoreError:
            records = self._read_up_to_damage()
        self.position += len(records)
        return records

    def _read_up_to_damage(self) -> list[Any]:
        records = []
        while True:
            try:
                record = self.log.read(self.position + len(records))
            except StoreError as cause:
                if not isinstance(cause.__cause__, ValidationError):
                    raise  # the store does not answer: that says nothing about the record
                self.damage = str(cause)
                return records
            if record is None:
                return records
            records.append(record)


class RunReader:
    """Follows one run. Each `refresh` costs one read per new record, one miss per log, and the heartbeats."""

    def __init__(self, store: Store, *, now: Callable[[], float] = time.time) -> None:
        """`store` is a view below the run's prefix; `now` gives seconds since the epoch."""
        self._store = store
        self._now = now
        self._fold = Fold()
        self._run: dict[str, Any] = {}
        self._claims = self._tail("log/claim", Claim)
        self._curated = self._tail("log/curated", Curated)
        self._refused = self._tail("log/refused", Refused)
        self._commits = self._tail("log/commit", Commit)
        self._evaluations = self._tail("log/eval", Evaluation)
        self._control = self._tail("log/control", Control)
        self._audits = self._tail("log/audit", Audit)
        self._quality = Quality()
        self._raw: dict[str, _Tail] = {}
        self._scored: dict[str, _Tail] = {}

    def refresh(self) -> Snapshot:
        """Read what is new and return the run as it is now.

        Raises:
            StoreError: the store does not answer; the next refresh goes on from where this one came to.
        """
        self._read_run()
        self._read_records()
        return self._build(read_heartbeats(self._store))

    def _tail(self, path: str, kind: type[Record]) -> _Tail:
        return _Tail(Log(self._store, path, kind))

    def _read_run(self) -> None:
        if not self._run and self._store.exists("run.json"):
            self._run = json.loads(self._store.get("run.json"))

    def _read_records(self) -> None:
        """Read from the trainer back to the claims, fold from the claims on: no effect is folded before its cause.

        Everything is read before anything is folded, so a store that fails in between leaves no record half counted.
        """
        fold, tails = self._fold, self._tails()
        before = [tail.position for tail in tails]
        try:
            read = [tail.read() for tail in tails]
        except StoreError:
            for tail, position in zip(tails, before, strict=True):
                tail.position = position
            raise
        audits, control, evaluations, commits, refused, curated, *rest = read
        num_writers = len(self._scored)
        folding: list[tuple[Callable[[Any], None], list[Any]]] = [(fold.claim, rest[-1])]
        folding += [(fold.raw, records) for records in rest[num_writers:-1]]
        folding += [(fold.scored, records) for records in rest[:num_writers]]
        folding += [(fold.curated, curated), (fold.refused, refused), (fold.commit, commits)]
        folding += [(fold.evaluation, evaluations), (fold.control, control), (self._quality.audit, audits)]
        for step, records in folding:
            for record in records:
                step(record)
        self._follow_new_writers()

    def _tails(self) -> list[_Tail]:
        """Every log, from effects to causes."""
        first = [self._audits, self._control, self._evaluations, self._commits, self._refused, self._curated]
        return [*first, *self._scored.values(), *self._raw.values(), self._claims]

    def _follow_new_writers(self) -> None:
        """Rollout logs are found through claims; what they hold is ahead of nothing that was folded already."""
        new = [writer for writer in self._fold.writers if writer not in self._raw]
        for writer in new:
            self._raw[writer] = self._tail(f"log/raw/{writer}", Raw)
            self._scored[writer] = self._tail(f"log/scored/{writer}", Scored)
        if new:
            self._read_records()

    def _build(self, beats: list[Heartbeat]) -> Snapshot:
        fold, config = self._fold, self._run.get("config", {})
        last_at = max((at for at in (fold.last_at, *(b.at for b in beats)) if at is not None), default=None)
        age_s = None if last_at is None else max(self._now() - last_at, 0.0)
        limit_s = _get(config, "orchestration", "heartbeat_limit_s") or 60.0
        state = fold.state
        if state == "running" and age_s is not None and age_s > limit_s:
            state = "silent"
        stages = Counter(fold.open.values())
        max_staleness = _get(config, "staleness", "max_staleness")
        return Snapshot(
            run=self._run.get("id") or self._store.url.rstrip("/").rsplit("/", 1)[-1],
            url=self._store.url,
            config=config,
            packages=self._run.get("packages", {}),
            created_at=self._run.get("created_at"),
            state=state,
            error=fold.error,
            step=fold.last_commit.version if fold.last_commit else -1,
            steps=config.get("steps"),
            max_staleness=max_staleness,
            versions=fold.versions,
            evaluations=fold.evaluations,
            staleness=fold.staleness,
            roles=_use_of_roles(fold, beats, last_at or 0.0, self._now(), limit_s),
            queues=Queues(*(stages[stage] for stage in Stage)),
            issued=fold.issued,
            trained=fold.trained,
            refused_curation=fold.refused_curation,
            refused_trainer=fold.refused_trainer,
            late=fold.late,
            reclaimed=fold.reclaimed,
            refusals=fold.refusals,
            errors=fold.errors,
            checks=[
                *(Check(f"{tail.log.path} can be read", False, tail.damage) for tail in self._tails() if tail.damage),
                # a replay with a stricter curation has fewer groups in a step
                *balance(fold, max_staleness, None if self._run.get("replay_of") else config.get("groups_per_step")),
            ],
            events=fold.events,
            activity=fold.activity,
            first_at=fold.first_at,
            last_at=last_at,
            age_s=age_s,
            eta_s=_time_left(fold, config.get("steps")) if state == "running" else None,
            quality=self._quality,
        )


def _use_of_roles(fold: Fold, beats: list[Heartbeat], last_at: float, now: float, limit_s: float) -> dict[str, RoleUse]:
    """Sum records and heartbeats by role; of the two, the one that saw more of a role's time tells its time."""
    uses = {}
    for role in dict.fromkeys([*ROLES, *fold.worked, *(b.role for b in beats)]):
        mine = sorted((b for b in beats if b.role == role), key=lambda b: b.at)
        told = fold.worked.get(role, Worked())
        if not mine and not told.writers:
            continue
        from_beats = (sum(b.busy_s for b in mine), sum(b.waiting_s for b in mine))
        busy_s, waiting_s = max(from_beats, (told.busy_s, told.waiting_s), key=sum)
        uses[role] = RoleUse(
            role=role,
            writers=len({b.writer for b in mine} | told.writers),
            alive=sum(not b.done and now - b.at <= limit_s for b in mine),
            busy_s=busy_s,
            waiting_s=waiting_s,
            processor_s=sum(b.processor_s for b in mine),
            tokens=max(told.tokens, float(sum(b.tokens for b in mine))),
            tokens_per_s=fold.rate(role, last_at),
            state=mine[-1].state if mine else "",
        )
    return uses


def _time_left(fold: Fold, steps: int | None) -> float | None:
    """Remaining steps times the median interval of the last commits: a pause in between does not move it."""
    times = [v.at for v in fold.versions[-21:]]
    if steps is None or len(times) < 3:
        return None
    intervals = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    return max(steps - fold.versions[-1].version, 0) * max(intervals[len(intervals) // 2], 0.0)


def _get(config: dict[str, Any], *path: str) -> Any:
    """Return a nested value of run.json's config, or None when it is not there."""
    value: Any = config
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value
