"""Releases a quarantined group after a person's yes: under a new ticket, because a verdict is never undone.

The releasing writer acts as a rollout worker, a reward process and a curator of one group, by the same decisions as
they, so everything that holds for other tickets holds for this one: it is claimed with the version that sampled its
oldest token, which is admitted only while that is within the staleness bound; it is scored as it was; it has one
verdict; and the trainer checks its contract and digests once more.

Nobody follows the new writer before its claim, so whatever a crash leaves behind before it is never looked at. A crash
between claim and verdict leaves a scored group without one: curation will judge it as it judges any other.
"""

import secrets
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from data_contracts import trajectory
from data_contracts.errors import ConfigError, ContractError, ProtocolError
from data_contracts.protocol import Judged, decide_claim, decide_verdicts
from data_contracts.records import Claim, GroupRef, Raw, Scored, Verdict
from infra.crash import point
from infra.log import Log
from infra.objects import put_batch
from infra.runs import Run
from tasks.ledger import Ledger
from tasks.quarantine import Entry, fates, read_rows, released
from tasks.reuse import renumber
from tasks.role import append_control
from tasks.supervise import find_living


@dataclass(frozen=True)
class Plan:
    """What would be released."""

    entry: Entry
    ticket: int
    """Whose result it is."""
    rows: pa.Table
    """The group, as it was scored."""
    oldest_version: int


def plan(run: Run, entry: Entry) -> Plan:
    """Say whether a quarantined group can still be trained.

    Raises:
        ConfigError: it cannot, and why.
    """
    name = f"quarantine {entry.id[:12]}"
    if run.replay_of:
        raise ConfigError(f"{name}: run {run.id} is a replay and does not go on")
    if entry.stage != "curate":
        raise ConfigError(
            f"{name}: refused by {entry.stage} ({entry.reason}): it broke its contract and can never be trained"
        )
    if len(entry.tickets) != 1:
        raise ConfigError(f"{name}: a whole batch of {len(entry.tickets)} tickets was refused: {entry.reason}")
    (ticket,) = entry.tickets
    if ticket in (known := released(run.store)):
        raise ConfigError(f"{name}: has been released already, as ticket {known[ticket]}")
    fate = fates(run.store).get(ticket, "still in flight")
    if not fate.startswith("refused"):
        raise ConfigError(f"{name}: nothing to release, ticket {ticket} is {fate}")
    rows = read_rows(run.store, entry)
    try:
        trajectory.check(rows, "scored")
    except ContractError as cause:
        raise ConfigError(f"{name}: cannot be released, it breaks its contract: {cause}") from cause
    good = (rows.column("finish_reason").to_numpy() != "error") & (rows.column("reward_error").to_numpy() == "")
    if not good.any():
        raise ConfigError(f"{name}: none of its {rows.num_rows} rows has a reward: there is nothing to train on")
    used = [version for versions in rows.column("used_versions").to_pylist() for version in versions]
    proposed = Plan(entry, ticket, rows, min(used))
    _check_room(run, Ledger(run.store, run.config), proposed)
    return proposed


def _check_room(run: Run, ledger: Ledger, proposed: Plan) -> Claim:
    """Return the claim under which the group would come back; the protocol itself says whether there is one."""
    name, state = f"quarantine {proposed.entry.id[:12]}", ledger.state
    if state.is_finished:
        raise ConfigError(f"{name}: run {run.id} has made all its {run.config.steps} steps: nothing more is trained")
    deadline = state.rules.deadline(proposed.oldest_version)
    if deadline is not None and deadline < state.version:
        raise ConfigError(
            f"{name}: too old: sampled by version {proposed.oldest_version}, the next step trains from version "
            f"{state.version}, and max_staleness is {run.config.staleness.max_staleness}"
        )
    if state.rules.deterministic and any(pending.is_pending for pending in state.in_flight()):
        raise ConfigError(
            f"{name}: this run settles in ticket order and tickets are out: no verdict can go before theirs"
        )
    claim = decide_claim(
        state, secrets.token_hex(6), version=proposed.oldest_version, curriculum=state.version, limit=1
    )
    if claim is None:
        raise ConfigError(
            f"{name}: no room: every step that may use version {proposed.oldest_version} has its groups already"
        )
    return claim


def release(run: Run, proposed: Plan) -> int:
    """Bring the group back under a new ticket, accepted; return the ticket.

    Raises:
        ConfigError: processes of the run are alive, or the group cannot be trained any more.
        ProtocolError: another process settled the new ticket first.
    """
    living = find_living(run.store)
    if living:
        told = ", ".join(f"{beat.role} {beat.pid}" for beat in living)
        raise ConfigError(f"run {run.id}: still running here ({told}); stop it first: rollflow stop {run.id}")
    ledger = Ledger(run.store, run.config)
    while True:
        claim = _check_room(run, ledger, proposed)
        verdict = _publish(run, claim, proposed)
        point("release.before_claim")
        if ledger.append(claim):
            break
        ledger.sync()  # another writer has the number, and the tickets; what was published is known to nobody
    point("release.claimed")
    _settle(ledger, claim.writer, verdict)
    detail = {"released": {str(proposed.ticket): claim.tickets[0]}, "quarantine": proposed.entry.id}
    append_control(run.store, claim.writer, "amend", role="release", detail=detail)
    return claim.tickets[0]


def _publish(run: Run, claim: Claim, proposed: Plan) -> Verdict:
    """Write batch, raw and scored record under a writer whom nobody follows yet; return the verdict to be."""
    (ticket,) = claim.tickets
    scored = trajectory.check(renumber(proposed.rows, ticket, 0), "scored")
    batch = put_batch(run.store, scored)
    raw = put_batch(run.store, scored.select(trajectory.SCHEMAS["raw"].names).cast(trajectory.SCHEMAS["raw"]))
    group = GroupRef(
        ticket=ticket, attempt=0, first_row=0, num_rows=scored.num_rows, oldest_version=proposed.oldest_version
    )
    source = f"ticket {proposed.ticket} in {proposed.entry.reference.key if proposed.entry.reference else ''}"
    record = Raw(writer=claim.writer, batch=raw, groups=(group,), released_from={str(ticket): source})
    Log(run.store, f"log/raw/{claim.writer}", Raw).append(0, record)
    Log(run.store, f"log/scored/{claim.writer}", Scored).append(
        0, Scored(writer=claim.writer, rollout=claim.writer, batch=batch, groups=(group,))
    )
    rewards = scored.column("reward").to_numpy()
    return Verdict(
        ticket=ticket,
        accepted=True,
        batch=batch,
        group=group,
        reward_mean=float(np.nanmean(rewards)),
        prompt_id=scored.column("prompt_id")[0].as_py(),
        metrics={"released": 1.0},
    )


def _settle(ledger: Ledger, writer: str, verdict: Verdict) -> None:
    while True:
        ledger.sync()
        record = decide_verdicts(ledger.state, writer, [Judged(writer, 0, (verdict,))])
        if record is None or verdict.ticket not in {settled.ticket for settled in record.verdicts}:
            raise ProtocolError(f"ticket {verdict.ticket} was released and settled by another process meanwhile")
        if ledger.append(record):
            return
