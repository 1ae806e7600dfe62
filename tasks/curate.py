"""The curate role: one verdict on every ticket, accepted or refused, and the reason.

It settles; what it has settled is never undone. A group is judged by a chain of pure functions (tasks/curation).
"""

import re
from collections.abc import Mapping

import pyarrow as pa

from data_contracts import trajectory
from data_contracts.config import RunConfig
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.protocol import Judged, decide_verdicts, followed
from data_contracts.records import BatchRef, Curated, GroupRef, Raw, Scored, Verdict
from infra.crash import point
from infra.log import Log
from infra.objects import get_batch
from tasks.curation import chain
from tasks.curation.duplicates import Recent
from tasks.curation.given import Judge
from tasks.curation.group import Group, Rows
from tasks.curation.lookback import Lookback
from tasks.curation.uses import UseLimit
from tasks.curriculum import CurriculumReader
from tasks.ledger import Ledger
from tasks.quarantine import quarantine
from tasks.role import Role


def run(role: Role) -> None:
    """Settle tickets until every step of the run is committed."""
    ledger = Ledger(role.store, role.config)
    curator = Curator(role, ledger)
    while not (ledger.state.is_finished or role.is_over):
        if curator.read() | curator.settle():
            role.progressed("settling")
        else:
            role.wait("scored groups", on=("rollout", "reward", "train") if ledger.newest else ("start",))
        ledger.sync()


class Curator:
    """Reads scored logs, holds opinions that cannot be settled yet, and appends verdicts."""

    def __init__(self, role: Role, ledger: Ledger) -> None:
        self._role = role
        self._ledger = ledger
        self._next: dict[str, int] = {}
        self._judged: list[Judged] = []
        self._lookback = Lookback(role.store, role.config.curate)
        self._use_limit = UseLimit(role.store, role.config, ledger.commit)
        self._judge_group = Judge(role.store, role.config, CurriculumReader(ledger).given)

    def read(self) -> bool:
        """Judge what is new in the scored logs; return whether there was anything."""
        found = False
        for writer, covered in followed(self._ledger.state).items():
            log = Log(self._role.store, f"log/scored/{writer}", Scored)
            number = max(self._next.get(writer, 0), covered)
            for record in log.read_from(number):
                if any(group.ticket >= self._ledger.state.next_ticket for group in record.groups):
                    self._ledger.sync()  # what the ticket was given stands in its claim, which came first
                self._judged.append(Judged(writer, number, self._judge(record, number)))
                number += 1
                found = True
            self._next[writer] = number
        return found

    def settle(self) -> bool:
        """Append the verdicts that are due; return whether there were any."""
        settled = False
        while record := decide_verdicts(self._ledger.state, self._role.writer, self._judged):
            point("curate.before_verdicts")
            number = self._ledger.state.next["curated"]
            record = self._lookback.check(record, number, refused=self._quarantine)
            record = self._use_limit.check(record, number, refused=self._quarantine)
            record = record.model_copy(update={"metrics": self._role.take_times() | count_reasons(record)})
            settled |= self._ledger.append(record)
            point("curate.verdicts")
        covers = self._ledger.state.covers
        self._judged = [opinion for opinion in self._judged if opinion.number >= covers.get(opinion.rollout, 0)]
        return settled

    def _judge(self, record: Scored, number: int) -> tuple[Verdict, ...]:
        verdicts = [self._refuse(record, number, int(ticket), why) for ticket, why in record.refused.items()]
        if record.batch is None:
            return tuple(verdicts)
        try:
            table = get_batch(self._role.store, record.batch, "scored")
        except (ContractError, ObjectMissing) as cause:
            quarantine(self._role.store, "curate", [g.ticket for g in record.groups], str(cause), {}, record.batch)
            return (*verdicts, *(_refusal(group, f"unreadable: {cause}") for group in record.groups))
        for group, verdict in zip(record.groups, judge_batch(table, record, self._judge_group), strict=True):
            is_part = not verdict.accepted and verdict.batch is not None  # of a group that a later ticket goes on with
            if not is_part and (not verdict.accepted or (verdict.group is not None and verdict.group.left_out)):
                self._quarantine(verdict, group, record.batch)
            verdicts.append(verdict)
        return tuple(verdicts)

    def _quarantine(self, verdict: Verdict, group: GroupRef | None = None, batch: BatchRef | None = None) -> None:
        """Keep the evidence of a refused group, or of the rows that were left out of an accepted one."""
        group = verdict.group or group
        evidence = dict(verdict.metrics) | {"rows": list(group.left_out) if group is not None else []}
        why = verdict.reason or "rows left out"
        quarantine(self._role.store, "curate", [verdict.ticket], why, evidence, batch or verdict.batch)

    def _refuse(self, record: Scored, number: int, ticket: int, why: str) -> Verdict:
        raw = Log(self._role.store, f"log/raw/{record.rollout}", Raw).read(number)
        group = next((g for g in raw.groups if g.ticket == ticket), None) if raw is not None else None
        attempt = group.attempt if group is not None else 0
        return Verdict(ticket=ticket, accepted=False, reason=why, attempt=attempt, group=group)


def judge_batch(table: pa.Table, record: Scored, judge: Judge) -> list[Verdict]:
    """Return a verdict on every group of a scored batch: first the contract, then the chain of rules."""
    if record.batch is None:
        raise ContractError(f"a scored record of {record.rollout} has groups and no batch")
    invalid = dict(trajectory.find_invalid_rows(table, "scored"))
    rows = Rows(table)
    verdicts = []
    for group in record.groups:
        why = next((invalid[row] for row in _rows(group) if row in invalid), "")
        if why:
            verdicts.append(_refusal(group, f"contract: {why}"))
        else:
            verdicts.append(judge.judge(Group.of_ref(group, rows), record.batch))
    return verdicts


def judge_group(table: pa.Table, group: GroupRef, batch: BatchRef, config: RunConfig) -> Verdict:
    """Return the chain's verdict on one group of a scored batch that keeps its contract, judged by itself alone."""
    outcome = chain.judge(Group.of_ref(group, Rows(table)), config.curate, Recent(()))
    return chain.verdict_of(outcome, batch)


def count_reasons(record: Curated) -> dict[str, float]:
    """Return how many groups were refused by reason, and how many rows of accepted groups were left out by rule."""
    counts: dict[str, float] = {}
    for verdict in record.verdicts:
        if not verdict.accepted:
            key = f"curate/refused/{kind_of(verdict.reason)}"
            counts[key] = counts.get(key, 0.0) + 1
            continue
        for rule, value in with_prefix(verdict.metrics, "left_out/").items():
            counts[f"curate/left_out/{rule}"] = counts.get(f"curate/left_out/{rule}", 0.0) + value
    return counts


def kind_of(reason: str) -> str:
    """Return what many reasons have in common, as a name: the words before the first colon.

    >>> kind_of("too_few_good_rows: expected at least 2, got 1")
    'too_few_good_rows'
    """
    return re.sub(r"\W+", "_", reason.partition(":")[0]).strip("_")[:40] or "no_reason"


def with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Return the values whose names begin with `prefix`, without it."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def _rows(group: GroupRef) -> range:
    return range(group.first_row, group.first_row + group.num_rows)


def _refusal(group: GroupRef, why: str) -> Verdict:
    return Verdict(ticket=group.ticket, accepted=False, reason=why, attempt=group.attempt, group=group)
