"""The reward role: gives every raw group its rewards, under the same number in the scored log.

The record of a raw record's rewards has the raw record's own number, so two reward processes cannot double it.
"""

from dataclasses import dataclass, field

import pyarrow as pa

from data_contracts import trajectory
from data_contracts.errors import ContractError, ObjectMissing
from data_contracts.protocol import followed
from data_contracts.records import GroupRef, Raw, Scored
from infra.crash import point
from infra.log import Log
from infra.objects import get_batch, put_batch
from tasks.envs.registry import build_envs
from tasks.ledger import Ledger
from tasks.model_files import read_model_files
from tasks.prompts import encode_prompt, make_decoder, tokenizer_from_files
from tasks.quarantine import quarantine
from tasks.role import Role
from tasks.scoring import make_pool, score

MAX_TOKENS = 1 << 30
"""No limit of this role's own: the rollout role has refused what does not fit its engine."""


def run(role: Role) -> None:
    """Score until every step of the run is committed."""
    ledger = Ledger(role.store, role.config)
    while ledger.newest is None:
        role.wait("the first version", on=("start",))
        ledger.sync()
    judge = Judge(role, ledger)
    with judge:
        while not (ledger.state.is_finished or role.is_over):
            if not judge.turn():
                role.wait("raw groups", on=("rollout", "train"))
            ledger.sync()


@dataclass
class Usable:
    """What of a raw batch keeps its contract."""

    table: pa.Table | None
    groups: list[GroupRef]
    refused: dict[str, str] = field(default_factory=dict)
    evidence: dict[str, dict[str, object]] = field(default_factory=dict)
    """Ticket (as text) to what every bad row of its group was refused for."""


class Judge:
    """Follows the raw logs of all workers with work in flight."""

    def __init__(self, role: Role, ledger: Ledger) -> None:
        self._role = role
        self._ledger = ledger
        tokenizer = tokenizer_from_files(read_model_files(role.store))
        envs = build_envs(role.config.envs, role.config.seed)
        self._vocab_size = len(tokenizer)
        self._envs = envs
        self._decode = make_decoder(tokenizer)
        self._pool = make_pool(envs, role.config.reward)
        self._encode = lambda prompt: encode_prompt(prompt, tokenizer, MAX_TOKENS)
        self._next: dict[str, int] = {}

    def __enter__(self) -> "Judge":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()

    def turn(self) -> bool:
        """Score what is new in the raw logs; return whether there was anything."""
        found = False
        for writer, covered in followed(self._ledger.state).items():
            scored = Log(self._role.store, f"log/scored/{writer}", Scored)
            if writer not in self._next:
                self._next[writer] = max(covered, scored.tail())
            raw = Log(self._role.store, f"log/raw/{writer}", Raw)
            for record in raw.read_from(self._next[writer]):
                self._role.progressed(f"scoring {len(record.groups)} groups of {writer}")
                point("reward.before_scored")
                scored.append(self._next[writer], self._score(writer, record))  # a twin's record serves as well
                point("reward.scored")
                self._next[writer] += 1
                found = True
                self._role.check()
        return found

    def _score(self, writer: str, record: Raw) -> Scored:
        usable = self._sift(record)
        for ticket, why in usable.refused.items():
            quarantine(self._role.store, "reward", [int(ticket)], why, usable.evidence.get(ticket, {}), record.batch)
        batch = None
        metrics: dict[str, float] = {}
        if usable.table is not None and usable.groups:
            result = score(
                usable.table,
                self._envs,
                self._decode,
                self._role.config.reward,
                pool=self._pool,
                encode=self._encode,
                max_tokens=self._role.config.rollout.sampling.max_new_tokens,
            )
            metrics = dict(result.metrics)
            point("reward.before_batch")
            batch = put_batch(self._role.store, trajectory.check(result.table, "scored"))
        return Scored(
            writer=self._role.writer,
            rollout=writer,
            batch=batch,
            groups=tuple(usable.groups) if batch else (),
            refused=usable.refused,
            metrics=metrics | self._role.take_times(),
        )

    def _sift(self, record: Raw) -> Usable:
        """Read a raw batch and keep the groups of which every row keeps the contract."""
        try:
            table = get_batch(self._role.store, record.batch, "raw")
        except (ContractError, ObjectMissing) as cause:
            return Usable(None, [], {str(group.ticket): f"unreadable: {cause}" for group in record.groups})
        newest = self._ledger.state.version
        invalid = dict(trajectory.find_invalid_rows(table, "raw", vocab_size=self._vocab_size, newest_version=newest))
        if not invalid:
            return Usable(table, list(record.groups))
        kept: list[GroupRef] = []
        refused: dict[str, str] = {}
        evidence: dict[str, dict[str, object]] = {}
        rows: list[int] = []
        for group in record.groups:
            own = range(group.first_row, group.first_row + group.num_rows)
            why = next((invalid[row] for row in own if row in invalid), "")
            if why:
                refused[str(group.ticket)] = f"contract: {why}"
                evidence[str(group.ticket)] = {"rows": {str(row): invalid[row] for row in own if row in invalid}}
            else:
                kept.append(group.model_copy(update={"first_row": len(rows)}))
                rows.extend(own)
        return Usable(table.take(pa.array(rows, pa.int64())), kept, refused, evidence)
