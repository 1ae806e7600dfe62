"""What was refused, why, and where its bytes are: one small object for each refusal, for people to look at.

The verdict itself stands in a log; nothing reads these objects to decide. The bytes stay where they are: a batch
is never altered or removed because a row of it was refused.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_contracts import trajectory
from data_contracts.errors import ConfigError, ContractError, ObjectMissing, StoreError
from data_contracts.records import Commit, Control, Curated, ObjectRef, Refused
from infra.log import Log
from infra.objects import get_object, put_object
from infra.store import Store


def quarantine(
    store: Store, stage: str, tickets: Sequence[int], reason: str, evidence: Mapping[str, object], ref: ObjectRef | None
) -> None:
    """Keep the evidence of a refusal below quarantine/<stage>/.

    Args:
        store: the run's prefix.
        stage: where it was refused: reward, curate or train.
        tickets: whose groups.
        reason: one word or sentence.
        evidence: rule, values seen, rows: whatever a person needs to judge.
        ref: the object that holds the bytes, as far as there is one.
    """
    body = {
        "stage": stage,
        "tickets": list(tickets),
        "reason": reason,
        "evidence": dict(evidence),
        "object": None if ref is None else ref.model_dump(),
    }
    put_object(store, f"quarantine/{stage}", ".json", json.dumps(body, indent=1, sort_keys=True).encode())


@dataclass(frozen=True)
class Entry:
    """One refusal in quarantine.

    Attributes:
        id: SHA-256 of the entry itself.
        stage: where it was refused: reward, curate or train.
        tickets: whose groups.
        reason: the rule, and after a colon what it expected and got.
        evidence: the values seen, and what is known of single rows.
        reference: where the bytes are; None when nothing was stored.
    """

    id: str
    stage: str
    tickets: tuple[int, ...]
    reason: str
    evidence: dict[str, Any]
    reference: ObjectRef | None


def read_quarantine(store: Store) -> list[Entry]:
    """Return every refusal, by stage and first ticket.

    Raises:
        StoreError: an entry was altered.
    """
    keys = store.list("quarantine")
    entries = [_entry(key, body) for key, body in zip(keys, store.get_many(keys), strict=True) if body is not None]
    return sorted(entries, key=lambda entry: (entry.stage, entry.tickets))


def find_entry(store: Store, name: str) -> Entry:
    """Return the refusal whose id begins with `name`.

    Raises:
        ConfigError: none or several do.
    """
    entries = read_quarantine(store)
    found = [entry for entry in entries if entry.id.startswith(name)]
    if len(found) == 1:
        return found[0]
    what = "several entries begin so" if found else f"there is no such entry among {len(entries)}"
    raise ConfigError(f"quarantine {name}: {what}; `rollflow quarantine RUN` lists them")


def _entry(key: str, body: bytes) -> Entry:
    try:
        value = json.loads(body)
        reference = None if value["object"] is None else ObjectRef.model_validate(_without_rows(value["object"]))
        return Entry(
            key.rsplit("/", 1)[1].removesuffix(".json"),
            value["stage"],
            tuple(value["tickets"]),
            value["reason"],
            value["evidence"],
            reference,
        )
    except (ValueError, KeyError, TypeError) as cause:
        raise StoreError(f"{key}: is no quarantine entry; it was torn or altered") from cause


def _without_rows(reference: dict[str, Any]) -> dict[str, Any]:
    return {name: reference[name] for name in ("key", "num_bytes", "sha256")}


def read_rows(store: Store, entry: Entry) -> pa.Table:
    """Return the refused rows, of whichever stage their batch is; the rows themselves may break the contract.

    Raises:
        ConfigError: the entry names no bytes, or they cannot be read, which may be why it is here.
    """
    if entry.reference is None:
        raise ConfigError(f"quarantine {entry.id[:12]}: no bytes were stored")
    try:
        table = trajectory.decode(get_object(store, entry.reference), name=entry.reference.key)
        return table.filter(pc.field("ticket").isin(list(entry.tickets)))
    except (ContractError, ObjectMissing, KeyError, pa.ArrowException) as cause:
        raise ConfigError(f"quarantine {entry.id[:12]}: its bytes cannot be read: {cause}") from cause


def fates(store: Store) -> dict[int, str]:
    """Return what became of every ticket that curation or a trainer refused, in words."""
    told: dict[int, str] = {}
    for record in Log(store, "log/curated", Curated).read_from(0):
        for verdict in record.verdicts:
            told.setdefault(
                verdict.ticket, "accepted" if verdict.accepted else "refused by curation, its place was given away"
            )
    for record in Log(store, "log/refused", Refused).read_from(0):
        told |= dict.fromkeys(record.tickets, f"refused by the trainer ({record.reason}), its place was given away")
    for commit in Log(store, "log/commit", Commit).read_from(0):
        told |= {group.ticket: f"trained by version {commit.version}" for group in commit.consumed}
    for old, new in released(store).items():
        told[old] = f"refused; released as ticket {new}" + (f", {told[new]}" if new in told else "")
    return told


def released(store: Store) -> dict[int, int]:
    """Return ticket to the new ticket under which a person released its group."""
    records = Log(store, "log/control", Control).read_from(0)
    return {int(old): new for record in records for old, new in record.detail.get("released", {}).items()}
