"""Rows of earlier groups under a new ticket, and as part of one. The rows keep what they were sampled with."""

import numpy as np
import pyarrow as pa

from data_contracts import trajectory
from data_contracts.curriculum import Source
from data_contracts.errors import ContractError
from data_contracts.records import GroupRef, Joined, Reused
from infra.objects import get_batch
from infra.store import Store


def copy_group(
    store: Store, source: Source, ticket: int, attempt: int, first_row: int, max_age: int
) -> tuple[pa.Table, GroupRef]:
    """Return the raw rows of an earlier group renumbered to a ticket, and the reference that names their source.

    Args:
        store: the run's prefix.
        source: the earlier group; rows that curation left out of it stay out.
        ticket: the new ticket.
        attempt: its attempt.
        first_row: where the rows will stand in the new batch.
        max_age: bound in versions on the age of their tokens.

    Raises:
        ContractError: the batch is torn or altered, or no row of the group is good.
        ObjectMissing: it is not there.
    """
    table = get_batch(store, source.batch, "scored")
    rows = good_rows_of(table, source.group)
    if not rows:
        raise ContractError(f"ticket {source.ticket} in {source.batch.key}: no row of its group is good")
    taken = table.take(pa.array(rows)).select(trajectory.SCHEMAS["raw"].names).cast(trajectory.SCHEMAS["raw"])
    reused = Reused(ticket=source.ticket, oldest_version=source.oldest_version, max_age=max_age)
    group = GroupRef(ticket=ticket, attempt=attempt, first_row=first_row, num_rows=len(rows), reused=reused)
    return renumber(taken, ticket, attempt), group


def renumber(rows: pa.Table, ticket: int, attempt: int) -> pa.Table:
    """Return the rows under another ticket and attempt."""
    for name, value in (("ticket", ticket), ("attempt", attempt)):
        field = rows.schema.field(name)
        rows = rows.set_column(rows.schema.get_field_index(name), field, pa.array([value] * rows.num_rows, field.type))
    return rows


def joined_rows(table: pa.Table, source: Source, rows: list[int], max_age: int, *, lent: bool = False) -> Joined:
    """Return the reference under which rows of an earlier group's batch become part of a later group.

    Args:
        table: that batch.
        source: the earlier group.
        rows: which, by number in the batch.
        max_age: bound in versions on the age of their tokens.
        lent: whether other groups may have them too.
    """
    rewards = table.column("reward").to_numpy()
    return Joined(
        ticket=source.ticket,
        batch=source.batch,
        rows=tuple(rows),
        rewards=tuple(float(rewards[row]) for row in rows),
        oldest_version=source.group.oldest_version,
        max_age=max_age,
        lent=lent,
    )


def good_rows_of(table: pa.Table, group: GroupRef) -> list[int]:
    """Return the rows of a group, by number in its batch, that neither rollout nor reward failed nor curation left out.

    Raises:
        ContractError: the group lies outside of the batch.
    """
    end = group.first_row + group.num_rows
    if end > table.num_rows:
        raise ContractError(f"ticket {group.ticket}: rows up to {end} of a batch of {table.num_rows}")
    part = table.slice(group.first_row, group.num_rows)
    good = (part.column("finish_reason").to_numpy() != "error") & (part.column("reward_error").to_numpy() == "")
    good[list(group.left_out)] = False
    return (group.first_row + np.flatnonzero(good)).tolist()
