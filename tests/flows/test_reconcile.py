"""The books of a run are proved from its records, and a record that cannot be true is named."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dashboards.reconcile import reconcile
from dashboards.snapshot import snapshot
from data_contracts import trajectory
from data_contracts.records import Commit
from flows.reconcile import reconcile_run
from infra.log import Log
from infra.objects import put_batch
from infra.runs import Run


def alter(run: Run, key: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a record behind the store's back."""
    path = Path(run.store.url) / key
    body = json.loads(path.read_text())
    change(body)
    path.chmod(0o600)
    path.write_text(json.dumps(body))


def first(run: Run, log: str) -> str:
    return run.store.list(f"log/{log}")[0]


def batch_of(run: Run) -> str:
    commit = Log(run.store, "log/commit", Commit).read(2)
    assert commit is not None
    return commit.consumed[0].batch.key


def test_a_finished_run_balances_and_agrees_with_its_snapshot(finished: Run, capsys) -> None:
    books, seen = reconcile(finished.store, deep=True), snapshot(finished.store)
    assert books.contradictions == []
    assert (books.issued, books.trained) == (seen.issued, seen.trained)
    assert books.trained == 24
    assert books.refused.total() == seen.refused_curation + seen.refused_trainer
    assert books.in_flight.total() == seen.queues.total
    batches = finished.store.list("batch")
    assert books.num_batches == len(batches)
    assert books.num_bytes == sum(len(finished.store.get(key)) for key in batches)
    assert books.num_records.total() == sum(
        len(finished.store.list(f"log/{name}")) for name in ("claim", "raw", "scored", "curated", "refused", "commit")
    )
    assert reconcile_run(finished, deep=True) == 0
    assert f"run finished: {books.equation}" in capsys.readouterr().out


def test_a_run_that_has_just_begun_balances(begun: Callable[..., Run]) -> None:
    books = reconcile(begun().store)
    assert (books.issued, books.contradictions) == (0, [])


def test_tickets_in_flight_are_counted_by_where_they_are(finished: Run) -> None:
    consumed = Log(finished.store, "log/commit", Commit).read_from(0)[6].consumed
    (Path(finished.store.url) / "log/commit/0000000006.json").unlink()
    for key in finished.store.list("log/refused")[1:]:
        (Path(finished.store.url) / key).unlink()
    books = reconcile(finished.store)
    assert books.contradictions == []
    assert books.trained == 20
    assert books.in_flight["accepted"] >= len(consumed) == 4
    assert books.issued == 20 + books.refused.total() + books.in_flight.total()


def twice(body: dict[str, Any]) -> None:
    body["consumed"][1] = body["consumed"][0]


def unclaimed(body: dict[str, Any]) -> None:
    body["tickets"] = [ticket + 1 for ticket in body["tickets"]]


def more_accepted(body: dict[str, Any]) -> None:
    body["num_accepted"] += 1


def turned_down(body: dict[str, Any]) -> None:
    body["verdicts"][0]["accepted"] = False


def another_group(body: dict[str, Any]) -> None:
    body["consumed"][0]["group"]["first_row"] += 1


def one_lost(body: dict[str, Any]) -> None:
    del body["groups"][0]


def not_covered(body: dict[str, Any]) -> None:
    del body["verdicts"][0]


CONTRADICTIONS = {
    "a ticket trained twice": ("commit", twice, r"ticket \d+ is trained by commit/1 and commit/1"),
    "tickets issued out of order": ("claim", unclaimed, r"claim/0 issues tickets \[1, 2, 3, 4\], expected \[0"),
    "a wrong total": ("curated", more_accepted, r"curated/0 tells \(\d+, \d+\) accepted and refused, it is"),
    "a refused ticket trained": ("curated", turned_down, r"trained ticket \d+, which curated/0 refused"),
    "another group trained": ("commit", another_group, r"commit/1 trained another result of ticket \d+ than curated/"),
    "a group that was not scored": ("scored", one_lost, r"scored/\w+/0 speaks of tickets .*, raw/\w+/0 of"),
    "a group without a verdict": ("curated", not_covered, r"ticket \d+ of scored/\w+/0 is dealt with and has no"),
}  # fmt: skip


@pytest.mark.parametrize("what", CONTRADICTIONS)
def test_a_contradiction_between_records_is_named(what: str, finished: Run, capsys) -> None:
    log, change, sentence = CONTRADICTIONS[what]
    key = "log/commit/0000000001.json" if log == "commit" else first(finished, log)
    alter(finished, key, change)
    assert reconcile_run(finished, deep=False) == 1
    told = capsys.readouterr().err
    assert re.search(sentence, told), told


def test_a_batch_that_is_gone_is_named_once(finished: Run) -> None:
    key = batch_of(finished)
    (Path(finished.store.url) / key).unlink()
    (sentence,) = reconcile(finished.store).contradictions
    assert f"names {key}, which does not exist" in sentence


def test_an_altered_batch_is_found_by_reading_only(finished: Run) -> None:
    path = Path(finished.store.url) / batch_of(finished)
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.chmod(0o600)
    path.write_bytes(body)
    assert reconcile(finished.store).contradictions == []
    (sentence,) = reconcile(finished.store, deep=True).contradictions
    assert "expected SHA-256" in sentence
    assert path.name in sentence


def test_rows_that_belong_to_another_ticket_than_the_record_says_are_named(finished: Run) -> None:
    """The bytes are those that are named, and yet the record lies about what lies where."""
    commit = Log(finished.store, "log/commit", Commit).read(1)
    assert commit is not None
    group = commit.consumed[0]
    table = trajectory.decode(finished.store.get(group.batch.key), name="batch")
    moved = table.set_column(0, table.schema.field("ticket"), pa.array([9] * table.num_rows, pa.int64()))
    was, now = group.batch.model_dump(), put_batch(finished.store, moved).model_dump()

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return now if value == was else {key: rename(inner) for key, inner in value.items()}
        return [rename(inner) for inner in value] if isinstance(value, list) else value

    for key in [key for log in ("scored", "curated", "commit") for key in finished.store.list(f"log/{log}")]:
        alter(finished, key, lambda body: body.update(rename(dict(body))))
    sentences = reconcile(finished.store, deep=True).contradictions
    assert any(f"are not those of ticket {group.ticket}" in sentence for sentence in sentences), sentences
    assert reconcile(finished.store).contradictions == []
