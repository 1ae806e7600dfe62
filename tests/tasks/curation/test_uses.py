"""A curator that has just started knows what the log has accepted, and reads no more of it than it needs."""

import secrets

from data_contracts.config import RunConfig
from data_contracts.records import BatchRef, Commit, Curated, GroupRef, PolicyRef, Reused, Verdict
from infra.log import Log
from infra.store import Store, open_store
from tasks.curation.uses import UseLimit

CONFIG = RunConfig.model_validate({"curriculum": {"reuse": {"share": 0.2, "max_age": 9, "max_uses": 2}}})
BATCH = BatchRef(key="batch/x.arrow", num_bytes=1, sha256="x", num_rows=8)


def new_store() -> Store:
    return open_store(f"memory://{secrets.token_hex(4)}")


def copies(*sources: int, oldest_version: int = 2) -> Curated:
    """Verdicts that accept a copy of each source."""
    verdicts = [
        Verdict(
            ticket=100 + source, accepted=True, batch=BATCH,
            group=GroupRef(ticket=100 + source, attempt=0, first_row=0, num_rows=8,
                           reused=Reused(ticket=source, oldest_version=oldest_version, max_age=9)),
        )
        for source in sources
    ]  # fmt: skip
    return Curated(writer="c", verdicts=tuple(verdicts), covers={}, num_accepted=len(verdicts), num_refused=0)


def commit(version: int) -> Commit:
    """Every commit's trainer had read ten times as many records of log/curated."""
    return Commit(
        writer="t", version=version, status="trained", checkpoint_version=0, num_trained=version, num_tokens=0,
        consumed=(), positions={"curated": 10 * version},
        weights=PolicyRef(kind="full", objects=(), digest="d", dtype="float32", num_parameters=1),
    )  # fmt: skip


def test_what_others_have_accepted_counts_after_a_restart_too() -> None:
    store = new_store()
    log = Log(store, "log/curated", Curated)
    for number in range(30):
        log.append(number, copies(*{25: (1, 2), 27: (2, 3)}.get(number, ())))
    refused: list[Verdict] = []
    checked = UseLimit(store, CONFIG, commit).check(copies(1, 2, 3), 30, refused=refused.append)
    assert [verdict.accepted for verdict in checked.verdicts] == [True, False, True]
    assert (checked.num_accepted, checked.num_refused) == (2, 1)
    assert [verdict.reason for verdict in refused] == [
        "used_before: the samples of ticket 2 were copied 2 times, at most 2"
    ]


def test_it_looks_back_as_far_as_the_oldest_source_and_counts_nothing_twice() -> None:
    store = new_store()
    log = Log(store, "log/curated", Curated)
    for number in range(40):
        log.append(number, copies(*{5: (7,), 31: (8,)}.get(number, ())))
    limit, refused = UseLimit(store, CONFIG, commit), []
    first = limit.check(copies(8, oldest_version=3), 40, refused=refused.append)
    log.append(40, first)
    second = limit.check(copies(7, 8, oldest_version=0), 41, refused=refused.append)
    assert [verdict.accepted for verdict in (*first.verdicts, *second.verdicts)] == [True, True, False]
    assert limit.check(copies(oldest_version=0), 41, refused=refused.append).verdicts == ()
    assert [verdict.ticket for verdict in refused] == [108]
