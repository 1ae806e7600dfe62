"""Replay: trains again from a run's stored batches, in the order that its commits recorded.

With the run's own configuration every version must come out as the very bits that were committed. With another
one (loss, optimizer, staleness bound, a stricter curation) it answers what would have happened on the same data:
step v looks at the groups of the recorded step v, those that the other curation refuses left out, so that both
runs can be compared version by version. Groups that the run itself had refused stay out.

A replay that is kept is a run of its own: the records of the run it replays up to the verdicts, and commits of
its own. It names no raw batches, because nobody rolled out for it.
"""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import TypeVar

import pyarrow as pa

from data_contracts.config import RunConfig
from data_contracts.errors import ConfigError
from data_contracts.records import (
    BatchRef,
    Claim,
    Commit,
    Consumed,
    Curated,
    ObjectRef,
    Record,
    Refused,
    Scored,
    Verdict,
)
from infra.log import Log
from infra.objects import get_batch, get_object, put_named
from infra.runs import Run
from infra.store import Store
from models.samples import Sample
from models.trainer import StepResult
from tasks.curate import judge_group
from tasks.curation.lookback import Lookback
from tasks.ledger import Ledger
from tasks.train import GroupReader
from tasks.training import Training
from tasks.weights import PolicyReader

R = TypeVar("R", bound=Record)

FREE = ("algorithm", "train", "curate", "tracking", "staleness.max_staleness", "evaluate", "orchestration", "steps")
"""Fields that may differ from the replayed run's: everything else has decided the data themselves."""

NOTHING_LEFT = "nothing_left: the changed curation refuses every group of this step"


@dataclass(frozen=True)
class Repeated:
    """One step, trained again.

    Attributes:
        commit: the recorded step.
        result: what came of it now.
        digest: of the weights now; those that were committed have commit.weights.digest.
        consumed: groups trained on; fewer than the commit consumed when the curation is another one.
        seconds: wall-clock time of reading and computing.
    """

    commit: Commit
    consumed: tuple[Consumed, ...]
    result: StepResult
    digest: str
    seconds: float

    @property
    def difference(self) -> str:
        """What is not as it was committed, in one sentence; empty when every bit is."""
        version, was = self.commit.version, self.commit
        if self.result.status != was.status:
            return f"version {version}: committed as {was.status}, trained again it was {self.result.status}"
        if self.digest != was.weights.digest:
            return f"version {version}: expected weights {was.weights.digest}, trained again they are {self.digest}"
        return ""


def check_replayable(config: RunConfig, source: RunConfig, num_steps: int) -> None:
    """Refuse a configuration that the stored batches cannot answer for.

    Args:
        config: to train with.
        source: of the run whose batches they are.
        num_steps: commits of that run after the first.

    Raises:
        ConfigError: names the field.
    """
    changed = sorted(changes(config, source))
    for name in changed:
        if not any(name == free or name.startswith(f"{free}.") for free in FREE):
            raise ConfigError(
                f"{name}: cannot be changed in a replay, it has decided the stored batches; "
                f"one can change {', '.join(FREE)}"
            )
    if config.steps > source.steps:
        raise ConfigError(f"steps: the run has {source.steps}, a replay cannot have {config.steps}")
    if num_steps < 1:
        raise ConfigError("there is nothing to replay: the run has no commit after version 0")


def changes(config: RunConfig, source: RunConfig) -> dict[str, object]:
    """Return the dotted names of the fields that differ, with their new values; None for those that are gone."""
    now, before = dict(_leaves("", config.model_dump())), dict(_leaves("", source.model_dump()))
    names = {name for name in now.keys() | before.keys() if now.get(name) != before.get(name)}
    return {name: now.get(name) for name in sorted(names - {"store"})}


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else key, inner)
    else:
        yield prefix, value


@dataclass
class Replay:
    """One pass over the commits of a run, with a configuration."""

    source: Run
    config: RunConfig
    rejudged: Mapping[int, Verdict] = field(default_factory=dict)
    """Ticket to its verdict by the changed curation, for those that the run had accepted (see `fork`)."""

    def __post_init__(self) -> None:
        """Build version 0.

        Raises:
            DigestMismatch: the weights of version 0 are not those committed.
        """
        ledger = Ledger(self.source.store, self.source.config)
        self._groups = GroupReader(ledger)
        self._commits = Log(self.source.store, "log/commit", Commit)
        weights, _ = PolicyReader(self.source.store).weights(0)
        self.training = Training(self.source.store, self.config, weights)

    def steps(self) -> Iterator[Repeated]:
        """Train every recorded step again, oldest first, up to config.steps.

        Raises:
            GroupUnusable: a batch is missing, altered or breaks its contract.
        """
        version = 0
        with closing(self.training):
            while version < self.config.steps and (commit := self._commits.read(version := version + 1)) is not None:
                started = time.monotonic()
                kept = self.kept_groups(commit)
                result = self._step([self._groups.read(group) for group in kept], version)
                self._groups.forget()
                yield Repeated(commit, kept, result, self.training.digest(), time.monotonic() - started)

    def _step(self, groups: Sequence[Sequence[Sample]], version: int) -> StepResult:
        if groups:
            return self.training.step(groups, version)
        return StepResult(status="skipped", metrics={}, histograms={}, evidence=NOTHING_LEFT, num_tokens=0)

    def kept_groups(self, commit: Commit) -> tuple[Consumed, ...]:
        """Return the groups of a recorded step that the replay trains on, with the rows that it leaves out."""
        kept = []
        for group in commit.consumed:
            verdict = self.rejudged.get(group.ticket)
            if verdict is None:
                kept.append(group)
            elif verdict.accepted:
                kept.append(group.model_copy(update={"group": verdict.group}))
        return tuple(kept)


class Recorder:
    """Commits the steps of a replay in a run of its own."""

    def __init__(self, target: Run, replay: Replay, writer: str) -> None:
        """`target` was filled by `fork`; `writer` is the id of this process in records."""
        self._store, self._writer, self._replay = target.store, writer, replay
        self._log = Log(target.store, "log/commit", Commit)
        newest = self._log.last()
        if newest is None:
            raise ConfigError(f"run {target.id}: has no version 0 to replay from")
        self._newest = newest

    def commit(self, step: Repeated) -> Commit:
        """Publish the weights that the replay has come to, and append the commit that names them."""
        training, version = self._replay.training, step.commit.version
        weights, sizes = training.publish(self._store, version, self._writer)
        due = training.is_checkpoint_due(version)
        checkpoint = training.save_checkpoint(self._store, version, self._writer) if due else None
        commit = Commit(
            writer=self._writer,
            version=version,
            status=step.result.status,
            consumed=step.consumed,
            weights=weights,
            checkpoint=checkpoint,
            checkpoint_version=version if due else self._newest.checkpoint_version,
            positions=step.commit.positions,
            num_trained=self._newest.num_trained + len(step.consumed),
            num_tokens=self._newest.num_tokens + step.result.num_tokens,
            metrics=step.result.metrics | sizes | {"time/step_s": step.seconds},
            histograms=step.result.histograms,
            evidence=step.result.evidence,
        )
        self._log.append(version, commit)
        self._newest = commit
        return commit


def fork(source: Run, target: Run) -> dict[int, Verdict]:
    """Fill a new run with what `source` had before training: version 0, claims, scored batches, verdicts.

    Records keep their numbers, writers and nonces; times are those of now, and nobody's work is counted again. Where
    the target's curation is another one, accepted groups are judged again.

    Returns:
        Ticket to its new verdict, for those that were judged again.
    """
    _copy_log(source.store, target.store, "log/claim", Claim)
    for writer in sorted(_rollout_writers(source.store)):
        for record in _copy_log(source.store, target.store, f"log/scored/{writer}", Scored, metrics={}):
            if record.batch is not None:
                _copy_object(source.store, target.store, record.batch)
    rejudged = _copy_verdicts(source, target)
    _copy_log(source.store, target.store, "log/refused", Refused)
    _copy_version_0(source.store, target.store)
    return rejudged


def _copy_version_0(source: Store, target: Store) -> None:
    first = Log(source, "log/commit", Commit).read(0)
    if first is None:
        raise ConfigError(f"{source.url}: has no version 0 to replay from")
    for reference in (*first.weights.objects, *(first.checkpoint or ())):
        _copy_object(source, target, reference)
    first = first.model_copy(update={"at": time.time(), "snapshot": None, "curriculum": None})
    Log(target, "log/commit", Commit).append(0, first)


def _copy_log(source: Store, target: Store, path: str, kind: type[R], **changed: object) -> list[R]:
    records = Log(source, path, kind).read_from(0)
    log = Log(target, path, kind)
    for number, record in enumerate(records):
        log.append(number, record.model_copy(update={"at": time.time(), **changed}))
    return records


def _copy_object(source: Store, target: Store, reference: ObjectRef) -> None:
    if not target.exists(reference.key):
        put_named(target, reference.key, get_object(source, reference))


def _rollout_writers(store: Store) -> set[str]:
    claims = Log(store, "log/claim", Claim).read_from(0)
    return {claim.writer for claim in claims if claim.kind in ("claim", "reclaim")}


def _copy_verdicts(source: Run, target: Run) -> dict[int, Verdict]:
    is_changed = source.config.curate != target.config.curate
    batches, lookback = _Batches(source.store), Lookback(target.store, target.config.curate)
    log = Log(target.store, "log/curated", Curated)
    rejudged: dict[int, Verdict] = {}
    totals: Counter[bool] = Counter()
    for number, record in enumerate(Log(source.store, "log/curated", Curated).read_from(0)):
        if is_changed:
            accepted = {verdict.ticket for verdict in record.verdicts if verdict.accepted}
            verdicts = tuple(_rejudge(verdict, batches, target.config) for verdict in record.verdicts)
            record = record.model_copy(update={"verdicts": verdicts})
            record = lookback.check(record, number, refused=lambda _: None)
            rejudged |= {verdict.ticket: verdict for verdict in record.verdicts if verdict.ticket in accepted}
        totals.update(verdict.accepted for verdict in record.verdicts)
        told = {"num_accepted": totals[True], "num_refused": totals[False], "at": time.time(), "metrics": {}}
        log.append(number, record.model_copy(update=told))
    return rejudged


def _rejudge(verdict: Verdict, batches: "_Batches", config: RunConfig) -> Verdict:
    """Judge an accepted group again, by itself, with the rows that had been left out of it."""
    if not verdict.accepted or verdict.batch is None or verdict.group is None:
        return verdict
    whole = verdict.group.model_copy(update={"left_out": ()})
    return judge_group(batches.read(verdict.batch), whole, verdict.batch, config)


class _Batches:
    """Keeps the batch last read: verdicts of one batch stand next to each other."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._key, self._table = "", pa.table({})

    def read(self, reference: BatchRef) -> pa.Table:
        if reference.key != self._key:
            self._table = get_batch(self._store, reference, "scored")
            self._key = reference.key
        return self._table
