"""The curate role: one verdict on every ticket, accepted or refused, and the reason.

It settles; what it has settled is never undone. A group is judged by pure functions of its rows (`judge_group`).
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from data_contracts import trajectory
from data_contracts.config import CurateConfig, RunConfig
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.protocol import Judged, decide_verdicts, followed
from data_contracts.records import BatchRef, GroupRef, Raw, Scored, Verdict
from infra.crash import point
from infra.log import Log
from infra.objects import get_batch
from tasks.ledger import Ledger
from tasks.quarantine import quarantine
from tasks.role import Role

Rule = Callable[[pa.Table, CurateConfig], str]
"""Looks at a group's rows and returns why it is refused; empty when it is not."""


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
        self._counted = (0.0, 0.0)

    def read(self) -> bool:
        """Judge what is new in the scored logs; return whether there was anything."""
        found = False
        for writer, covered in followed(self._ledger.state).items():
            log = Log(self._role.store, f"log/scored/{writer}", Scored)
            number = max(self._next.get(writer, 0), covered)
            for record in log.read_from(number):
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
            record = record.model_copy(update={"metrics": self._count()})
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
        invalid = dict(trajectory.find_invalid_rows(table, "scored"))
        for group in record.groups:
            why = next((invalid[row] for row in _rows(group) if row in invalid), "")
            verdict = (
                _refusal(group, f"contract: {why}")
                if why
                else judge_group(table, group, record.batch, self._role.config)
            )
            if not verdict.accepted:
                quarantine(self._role.store, "curate", [group.ticket], verdict.reason, verdict.metrics, record.batch)
            verdicts.append(verdict)
        return tuple(verdicts)

    def _refuse(self, record: Scored, number: int, ticket: int, why: str) -> Verdict:
        raw = Log(self._role.store, f"log/raw/{record.rollout}", Raw).read(number)
        group = next((g for g in raw.groups if g.ticket == ticket), None) if raw is not None else None
        attempt = group.attempt if group is not None else 0
        return Verdict(ticket=ticket, accepted=False, reason=why, attempt=attempt, group=group)

    def _count(self) -> dict[str, float]:
        busy_s, waiting_s = self._counted
        self._counted = (self._role.busy_s, self._role.waiting_s)
        return {"busy_s": self._role.busy_s - busy_s, "waiting_s": self._role.waiting_s - waiting_s}


def judge_group(table: pa.Table, group: GroupRef, batch: BatchRef, config: RunConfig) -> Verdict:
    """Return the verdict on one group of a scored batch that keeps its contract."""
    rows = table.slice(group.first_row, group.num_rows)
    good = rows.filter(pa.array(is_good(rows)))
    for rule in RULES:
        why = rule(good, config.curate)
        if why:
            return _refusal(group, why, metrics={"good_rows": float(good.num_rows)})
    rewards = good.column("reward").to_numpy()
    return Verdict(
        ticket=group.ticket,
        accepted=True,
        attempt=group.attempt,
        batch=batch,
        group=group,
        reward_mean=float(rewards.mean()),
        prompt_id=rows.column("prompt_id")[0].as_py(),
        metrics={"good_rows": float(good.num_rows)},
    )


def is_good(rows: pa.Table) -> np.ndarray:
    """Return [N] bool: rows whose rollout and reward both succeeded."""
    finished = rows.column("finish_reason").to_numpy() != "error"
    return finished & (rows.column("reward_error").to_numpy() == "")


def too_few_good_rows(good: pa.Table, config: CurateConfig) -> str:
    """Refuse a group in which too many samples failed for a baseline to mean anything."""
    if good.num_rows >= config.min_samples:
        return ""
    return f"too_few_good_rows: expected at least {config.min_samples}, got {good.num_rows}"


def zero_variance(good: pa.Table, config: CurateConfig) -> str:
    """Refuse a group whose rewards are all equal, when so configured: it has no gradient."""
    rewards = good.column("reward").to_numpy()
    return "zero_variance" if config.drop_zero_variance and np.all(rewards == rewards[0]) else ""


RULES: tuple[Rule, ...] = (too_few_good_rows, zero_variance)
"""In this order; the first that objects decides."""


def _rows(group: GroupRef) -> range:
    return range(group.first_row, group.first_row + group.num_rows)


def _refusal(group: GroupRef, why: str, metrics: dict[str, float] | None = None) -> Verdict:
    return Verdict(
        ticket=group.ticket, accepted=False, reason=why, attempt=group.attempt, group=group, metrics=metrics or {}
    )
