"""The train role: takes accepted groups, makes an optimizer step, publishes the weights, commits.

The commit is the single moment at which a step becomes true. Everything before it is written under names that
nobody refers to yet, so a crash at any place leaves either the old version or the new one.

train waits for: B accepted groups, such that those left behind can still make it.   unblocked by: curate
"""

import contextlib
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from data_contracts import trajectory
from data_contracts.config import RunConfig
from data_contracts.drawing import commits_named, next_state
from data_contracts.errors import ContractError, DigestMismatch, ObjectMissing, ProtocolError, TrainingDiverged
from data_contracts.protocol import (
    Finished,
    Recover,
    Refuse,
    Replaced,
    Timeouts,
    Train,
    choose_groups,
    decide_refuse,
    decide_start,
    ready_groups,
)
from data_contracts.records import BatchRef, Commit, Consumed, ObjectRef
from data_contracts.reuse import Drawing, measure
from infra.crash import point
from infra.objects import get_batch, put_object
from models.samples import Sample, good_rows, samples_from_table
from models.trainer import StepResult
from tasks.curriculum import CurriculumReader
from tasks.full_weights import answer_requests
from tasks.ledger import Ledger
from tasks.quarantine import quarantine
from tasks.role import Role
from tasks.training import Training
from tasks.weights import PolicyReader

Groups = list[list[Sample]]


class GroupUnusable(ContractError):
    """An accepted group cannot be trained after all."""

    def __init__(self, message: str, ticket: int = -1, reason: str = "contract", ref: ObjectRef | None = None) -> None:
        super().__init__(message)
        self.ticket, self.reason, self.ref = ticket, reason, ref


def run(role: Role) -> None:
    """Train until every step is committed, then end the run."""
    while True:
        ledger = Ledger(role.store, role.config)
        if ledger.newest is not None:
            break
        role.wait("the first version", on=("start",))
    with contextlib.closing(Learner(role, ledger)) as learner:
        if not learner.take_over():
            return
        while learner.turn():
            pass
    role.check(often=True)
    if not role.is_over:
        role.tell("end")


class Learner:
    """One training process: the model with its optimizer, and the right to commit until somebody replaces it."""

    def __init__(self, role: Role, ledger: Ledger) -> None:
        self._role = role
        self._config: RunConfig = role.config
        self._ledger = ledger
        self._curricula = CurriculumReader(ledger)
        self._groups = GroupReader(ledger)
        self._drawing = Drawing.of(role.config)
        self._timeouts = Timeouts(role.config.staleness.ticket_timeout_s)
        self._waited_since = time.monotonic()
        self._curated_seen = -1
        self._last_status = ledger.newest.status if ledger.newest else "initial"
        self._reader = PolicyReader(role.store)
        self._load()

    def _load(self) -> None:
        """Take model and optimizer to the newest commit, from its checkpoint and the batches trained since.

        Commits after the checkpoint are trained again, which gives the same bits where the backend is deterministic.
        """
        newest = self._ledger.newest
        self._training = Training(self._role.store, self._config, self._reader.weights(0)[0])
        self._held = 0
        if newest is not None and self._training.load_checkpoint(
            self._role.store, self._ledger.commit(newest.checkpoint_version)
        ):
            self._held = newest.checkpoint_version
        for version in range(self._held + 1, self._ledger.state.version + 1):
            self._role.progressed(f"training version {version} again after a restart")
            self._repeat(self._ledger.commit(version))
            self._held = version
        self._training.base_on(self._training.weights())

    def _repeat(self, commit: Commit) -> None:
        """Train one commit again. Where the backend is not deterministic the published weights win."""
        self._training.step([self._groups.read(group) for group in commit.consumed], commit.version)
        self._groups.forget()
        digest = self._training.digest()
        if digest != commit.weights.digest:
            self._training.trainer.adopt_weights(self._reader.weights(commit.version)[0])
            note = f"version {commit.version} trained again gave {digest}, committed was {commit.weights.digest}"
            self._role.tell("amend", version=commit.version, error=note)
        self._role.check()

    def close(self) -> None:
        """Let go of the model, and of the processes that it may live in."""
        self._training.close()

    def _reload(self) -> None:
        self.close()
        self._load()

    def take_over(self) -> bool:
        """Announce this trainer; return False when another has announced itself meanwhile."""
        while record := decide_start(self._ledger.state, self._role.writer):
            point("train.before_start")
            self._ledger.append(record)
            self._ledger.sync()
        return self._ledger.state.trainer == self._role.writer

    def turn(self) -> bool:
        """Do the next thing there is to do; return False when there is nothing left."""
        self._role.check()
        self._ledger.sync()
        answer_requests(self._role, self._held, self._training.published)
        overdue = self._timeouts.observe(time.monotonic(), self._ledger.state)
        move = choose_groups(self._ledger.state, self._role.writer, version=self._held, overdue=overdue)
        if isinstance(move, Finished):
            return False
        if isinstance(move, Replaced):
            self._role.progressed(f"replaced by trainer {move.by}")
            return False
        if isinstance(move, Recover):
            self._reload()
        elif isinstance(move, Refuse):
            self._refuse(move.tickets, move.reason, "")
        elif isinstance(move, Train):
            self._train(move)
        elif not self._read_ahead():
            self._role.wait(f"{move.reason} of {len(move.tickets)} tickets", on=("rollout", "reward", "curate"))
        return True

    def _read_ahead(self) -> bool:
        """Open one more batch that the next step is likely to need; return whether there was any."""
        curated = self._ledger.state.next["curated"]
        if curated == self._curated_seen:
            return False
        if self._groups.open_ahead(ready_groups(self._ledger.state)):
            return True
        self._curated_seen = curated
        return False

    def _refuse(self, tickets: list[int] | tuple[int, ...], reason: str, detail: str) -> None:
        record = decide_refuse(self._ledger.state, self._role.writer, tickets, reason, detail)  # pyright: ignore[reportArgumentType]
        if record is not None:
            point("train.before_refused")
            self._ledger.append(record)

    def _train(self, move: Train) -> None:
        waited_s = time.monotonic() - self._waited_since
        try:
            groups = [self._groups.read(group) for group in move.consumed]
        except GroupUnusable as problem:
            quarantine(self._role.store, "train", [problem.ticket], str(problem), {}, problem.ref)
            self._refuse([problem.ticket], problem.reason, str(problem))
            return
        started = time.monotonic()
        self._role.progressed(f"training towards version {move.version}")
        result = self._training.step(groups, move.version)
        commit = self._publish(move, result, started, waited_s)
        point("train.before_commit")
        if not self._ledger.append(commit):
            self._reload()  # another trainer's commit has the number: nothing of this step is used
            return
        self._held = move.version
        self._groups.forget()
        point("train.committed")
        self._role.tokens += result.num_tokens
        self._waited_since = time.monotonic()
        if result.status == "skipped" and self._last_status == "skipped":
            raise TrainingDiverged(
                f"commits {move.version - 1} and {move.version} were both skipped: {result.evidence}"
            )
        self._last_status = result.status

    def _publish(self, move: Train, result: StepResult, started: float, waited_s: float) -> Commit:
        """Write weights, and perhaps a checkpoint and a snapshot; return the commit that names them."""
        version, store, writer = move.version, self._role.store, self._role.writer
        newest = self._ledger.newest
        if newest is None:
            raise ProtocolError("there is no commit 0 to train from")
        reference, sizes = self._training.publish(store, version, writer)
        due = self._training.is_checkpoint_due(version)
        checkpoint = snapshot = None
        if due:
            checkpoint = self._training.save_checkpoint(store, version, writer)
            snapshot = put_object(store, "snapshot", ".json", json.dumps(self._ledger.state.snapshot()).encode())
            point("train.checkpointed")
        curriculum, told = self._advance_curriculum()
        metrics = result.metrics | sizes | told | count_reused(move.consumed)
        metrics |= {"time/wait_s": waited_s, "time/step_s": time.monotonic() - started}
        if self._config.staleness.adaptive is not None:
            metrics["staleness/limit"] = float(self._ledger.state.limit.versions)
        return Commit(
            writer=writer,
            version=version,
            status=result.status,
            consumed=move.consumed,
            weights=reference,
            checkpoint=checkpoint,
            checkpoint_version=version if due else newest.checkpoint_version,
            curriculum=curriculum,
            snapshot=snapshot,
            snapshot_version=version if due else newest.snapshot_version,
            positions=move.positions,
            num_trained=move.num_trained,
            num_tokens=newest.num_tokens + result.num_tokens,
            metrics=metrics,
            histograms=result.histograms,
            evidence=result.evidence,
        )

    def _advance_curriculum(self) -> tuple[ObjectRef | None, dict[str, float]]:
        """Return where the next commit's curriculum state lies, None for a plain one, and what to tell of it."""
        state = self._ledger.state
        states = {version: self._curricula.at(version) for version in sorted(commits_named(state))}
        following = next_state(state, states, self._drawing)
        if following.is_plain and states[state.version].is_plain:
            return None, {}
        told = {} if self._drawing.config.is_plain else measure(following)
        return put_object(self._role.store, "curriculum", ".json", following.model_dump_json().encode()), told


class _Opened:
    """A batch that was read and checked as a whole, once for all of its groups."""

    def __init__(self, table: pa.Table, newest_version: int) -> None:
        self.invalid = dict(trajectory.find_invalid_rows(table, "scored", newest_version=newest_version))
        self.versions: list[list[int]] = table.column("used_versions").to_pylist()
        self.digests: list[list[str]] = table.column("used_digests").to_pylist()
        valid = np.array([row for row in range(table.num_rows) if row not in self.invalid], np.int64)
        usable = table if valid.size == table.num_rows else table.take(pa.array(valid))
        good = valid[good_rows(usable)]
        self.samples = dict(zip(good.tolist(), samples_from_table(usable), strict=True))
        """Good samples by row."""


def count_reused(consumed: Sequence[Consumed]) -> dict[str, float]:
    """Return how many groups of a step are copies of earlier ones, and how many samples earlier tickets have lent."""
    groups = sum(group.group.reused is not None for group in consumed)
    samples = sum(len(joined.rows) for group in consumed for joined in group.group.joined)
    counts = {"reuse/groups": float(groups), "reuse/joined_samples": float(samples)}
    return {name: count for name, count in counts.items() if count}


class GroupReader:
    """Reads accepted groups, verified once more where they are used."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._digests: dict[int, str] = {}
        self._opened: dict[str, _Opened] = {}
        self._looked_at: set[str] = set()
        """Keys of batches that were read ahead, whatever came of it."""

    def open_ahead(self, groups: Iterable[Consumed]) -> bool:
        """Read and check one batch that has not been read yet; return whether there was any.

        What is wrong with it is for `read` to say, when the group is trained.
        """
        for group in groups:
            if group.batch.key in self._looked_at:
                continue
            self._looked_at.add(group.batch.key)
            with contextlib.suppress(GroupUnusable):
                self._open(group.ticket, group.batch)
            return True
        return False

    def forget(self, *, keep: int = 1) -> None:
        """Let go of all but the `keep` batches read last: groups left in one are likely to be next."""
        for key in list(self._opened)[:-keep]:
            del self._opened[key]
        self._looked_at &= self._opened.keys()

    def read(self, group: Consumed) -> list[Sample]:
        """Return the good samples of a group, without those that curation left out, then those it was joined with.

        Raises:
            GroupUnusable: the batch is torn, altered or missing, breaks its contract, or was sampled by weights
                other than those committed.
        """
        own, reused = group.group, group.group.reused
        rows = range(own.first_row, own.first_row + own.num_rows)
        left_out = {rows.start + row for row in own.left_out}
        samples = self._read(group.ticket, group.batch, rows, left_out, reused.max_age if reused else None)
        for joined in own.joined:
            samples += self._read(group.ticket, joined.batch, joined.rows, set(), joined.max_age)
        return samples

    def _read(
        self, ticket: int, batch: BatchRef, rows: Sequence[int], left_out: set[int], max_age: int | None
    ) -> list[Sample]:
        opened = self._open(ticket, batch)
        for row in rows:
            if row in opened.invalid:
                raise GroupUnusable(opened.invalid[row], ticket, "contract", batch)
        try:
            self._check_digests([opened.versions[row] for row in rows], [opened.digests[row] for row in rows])
        except DigestMismatch as cause:
            raise GroupUnusable(str(cause), ticket, "digest", batch) from cause
        samples = [opened.samples[row] for row in rows if row in opened.samples and row not in left_out]
        return samples if max_age is None else [replace(sample, max_age=max_age) for sample in samples]

    def _open(self, ticket: int, batch: BatchRef) -> _Opened:
        if batch.key not in self._opened:
            try:
                table = get_batch(self._ledger.store, batch, "scored")
            except (ContractError, ObjectMissing) as cause:
                raise GroupUnusable(str(cause), ticket, "unreadable", batch) from cause
            self._opened[batch.key] = _Opened(table, self._ledger.state.version)
        return self._opened[batch.key]

    def _check_digests(self, versions: list[list[int]], digests: list[list[str]]) -> None:
        # A set of pairs, not a mapping: rows may contradict each other about one version.
        told = {pair for row in zip(versions, digests, strict=True) for pair in zip(*row, strict=True)}
        for version, digest in sorted(told):
            if version not in self._digests:
                self._digests[version] = self._ledger.commit(version).weights.digest
            if self._digests[version] != digest:
                raise DigestMismatch(
                    f"tokens claim version {version} by weights {digest}, committed was {self._digests[version]}"
                )
