"""A run answers questions in SQL, from its records and batches."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

import infra.query
from data_contracts import trajectory
from data_contracts.errors import ConfigError
from data_contracts.records import Commit, Curated, GroupRef, Refused, Scored, Verdict
from flows.cli import app
from flows.query import query
from infra.log import Log
from infra.objects import get_batch, put_batch
from infra.query import Questions, as_dask, ask
from infra.runs import Run
from infra.store import Store, open_store


def one(store: Store, sql: str) -> list[object]:
    """Return the only row of an answer."""
    (row,) = ask(store, sql).to_pylist()
    return list(row.values())


def trained_rows(run: Run) -> list[tuple[int, pa.Table]]:
    """Return (version, rows) of every group that was trained, straight from the batches."""
    return [
        (commit.version, get_batch(run.store, c.batch, "scored").slice(c.group.first_row, c.group.num_rows))
        for commit in Log(run.store, "log/commit", Commit).read_from(0)
        for c in commit.consumed
    ]


def test_trajectories_say_what_became_of_them(finished: Run) -> None:
    rows = trained_rows(finished)
    expected = sum(table.num_rows for _, table in rows)
    assert one(finished.store, "SELECT count(*) FROM trajectories WHERE trained_version IS NOT NULL") == [expected]
    told = ask(
        finished.store,
        "SELECT trained_version AS v, sum(reward) AS r, sum(length)::BIGINT AS n, max(staleness) AS s "
        "FROM trajectories WHERE trained_version IS NOT NULL GROUP BY 1 ORDER BY 1",
    ).to_pylist()
    for row in told:
        tables = [table for version, table in rows if version == row["v"]]
        assert row["r"] == pytest.approx(sum(pc.sum(table["reward"]).as_py() for table in tables))
        assert row["n"] == sum(len(ids) for table in tables for ids in table["response_ids"].to_pylist())
        oldest = min(min(used) for table in tables for used in table["used_versions"].to_pylist())
        assert row["s"] == row["v"] - 1 - oldest
    assert len(told) == 6


def test_commits_evaluations_and_tickets_are_tables(finished: Run) -> None:
    commits = Log(finished.store, "log/commit", Commit).read_from(0)
    told = ask(finished.store, 'SELECT version, digest, "reward/mean" AS reward FROM commits ORDER BY 1').to_pylist()
    assert [(row["version"], row["digest"]) for row in told] == [(c.version, c.weights.digest) for c in commits]
    assert [row["reward"] for row in told] == [c.metrics.get("reward/mean") for c in commits]
    assert one(finished.store, "SELECT count(*), count(trained_version) FROM tickets")[1] == 24
    assert one(finished.store, 'SELECT list(version ORDER BY version), count("eval/accuracy") FROM evaluations') == [
        [0, 3, 6],
        3,
    ]


def examples() -> list[str]:
    return re.findall(r"^        (SELECT.*?)(?=\n    \w|\n\n)", str(infra.query.__doc__), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("number", range(5))
def test_the_questions_in_the_documentation_have_answers(number: int, finished: Run) -> None:
    assert len(examples()) == 5
    assert len(ask(finished.store, examples()[number]).column_names) >= 2


def append_results(run: Run) -> tuple[int, int, int]:
    """Add tickets that the records refuse, drop, and have a late second result of."""
    scored = Log(run.store, "log/scored/extra", Scored)
    table = trajectory.make_table(
        [
            {**row, "ticket": ticket, "attempt": attempt, "sample": sample}
            for ticket, attempt in ((900, 0), (901, 0), (902, 0), (902, 1))
            for sample, row in enumerate(trained_rows(run)[0][1].to_pylist()[:2])
        ],
        "scored",
    )
    batch = put_batch(run.store, table)
    groups = [
        GroupRef(ticket=t, attempt=a, first_row=2 * i, num_rows=2, oldest_version=0, left_out=(1,) if i == 2 else ())
        for i, (t, a) in enumerate(((900, 0), (901, 0), (902, 0), (902, 1)))
    ]
    scored.append(0, Scored(writer="w", rollout="extra", batch=batch, groups=tuple(groups)))
    verdicts = (
        Verdict(ticket=900, accepted=False, reason="zero_variance", group=groups[0]),
        Verdict(ticket=901, accepted=True, batch=batch, group=groups[1]),
        Verdict(ticket=902, accepted=True, batch=batch, group=groups[2]),
    )
    curated = Log(run.store, "log/curated", Curated)
    curated.append(curated.tail(), Curated(writer="w", verdicts=verdicts, covers={}, num_accepted=0, num_refused=0))
    refused = Log(run.store, "log/refused", Refused)
    refused.append(refused.tail(), Refused(writer="w", tickets=(901,), reason="digest", commit=6, num_refused=1))
    return 900, 901, 902


def test_what_was_dropped_says_why(finished: Run) -> None:
    append_results(finished)
    told = ask(
        finished.store,
        "SELECT ticket, attempt, sample, verdict, drop_reason FROM trajectories WHERE ticket >= 900 ORDER BY ALL",
    ).to_pylist()
    assert [tuple(row.values()) for row in told] == [
        (900, 0, 0, "refused", "zero_variance"),
        (900, 0, 1, "refused", "zero_variance"),
        (901, 0, 0, "accepted", "train: digest"),
        (901, 0, 1, "accepted", "train: digest"),
        (902, 0, 0, "accepted", None),
        (902, 0, 1, "accepted", "left_out"),
        (902, 1, 0, "late", "late"),
        (902, 1, 1, "late", "late"),
    ]


def test_batches_that_a_question_does_not_touch_are_not_read(finished: Run) -> None:
    keys = ask(finished.store, "SELECT DISTINCT batch FROM trajectories ORDER BY 1").column(0).to_pylist()
    for key in keys[1:]:
        (Path(finished.store.url) / key).unlink()
    assert one(finished.store, "SELECT count(*) FROM commits") == [7]
    (count,) = one(finished.store, f"SELECT count(reward) FROM trajectories WHERE batch = '{keys[0]}'")
    assert isinstance(count, int)
    assert count > 0


def test_the_same_rows_come_as_a_dask_dataframe_by_batch(finished: Run) -> None:
    append_results(finished)
    frame = as_dask(finished.store)
    assert frame.npartitions == one(finished.store, "SELECT count(DISTINCT batch) FROM trajectories")[0]
    columns = ["ticket", "attempt", "sample"]
    computed = frame.compute(scheduler="synchronous").sort_values(columns)
    told = ask(finished.store, f"SELECT * FROM trajectories ORDER BY {', '.join(columns)}")
    assert pa.Table.from_pandas(computed, preserve_index=False).to_pylist() == told.to_pylist()
    frame = frame[frame["trained_version"].notnull()]
    means = frame.groupby("trained_version")["reward"].mean().compute(scheduler="synchronous")
    trained = "SELECT avg(reward) AS r FROM trajectories WHERE trained_version IS NOT NULL "
    by_sql = ask(finished.store, f"{trained} GROUP BY trained_version ORDER BY trained_version")
    assert means.sort_index().tolist() == pytest.approx(by_sql.column("r").to_pylist(), rel=1e-6)


def test_a_run_elsewhere_than_in_a_folder_answers_too(finished: Run) -> None:
    copy = open_store("memory://query/finished")
    for key in finished.store.list():
        copy.put(key, finished.store.get(key))
    sql = "SELECT trained_version, avg(reward) FROM trajectories GROUP BY 1 ORDER BY 1"
    assert ask(copy, sql) == ask(finished.store, sql)


@pytest.mark.parametrize(
    ("sql", "sentence"),
    [
        ("SELEC 1", "query: Parser Error"),
        ("SELECT no_such_column FROM commits", 'query: Binder Error: Referenced column "no_such_column" not found'),
        ("SELECT no_such_column FROM commits", '; commits has version, status, at, .*, "reward/mean"'),
        ("SELECT t.rewrd FROM trajectories t", "; trajectories has ticket, attempt, sample, prompt_id, .*, reward, "),
        ("SELECT * FROM no_such_table", "; the tables are trajectories, tickets, commits, evaluations"),
        ("SELECT * FROM read_csv('/etc/hosts')", "query: Permission Error"),
        ("COPY commits TO 'here.csv'", "query: "),
        ("SELECT (prompt_id || 'x')::INTEGER FROM trajectories", "query: .*Conversion Error"),
        ("", "query: expected something that has an answer"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_sentence(sql: str, sentence: str, finished: Run) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        query(finished, sql, csv_file=None, parquet_file=None, rows=5)
    assert "\n" not in str(caught.value)


def test_an_answer_is_printed_or_written(finished: Run, tmp_path: Path, capsys) -> None:
    sql = "SELECT ticket, sample, response_ids, reward FROM trajectories ORDER BY 1, 2"
    query(finished, sql, csv_file=None, parquet_file=None, rows=3)
    count = ask(finished.store, sql).num_rows
    assert f"3 of {count} rows" in capsys.readouterr().out
    query(finished, sql, csv_file=None, parquet_file=tmp_path / "answer.parquet", rows=3)
    assert pq.read_table(tmp_path / "answer.parquet").to_pylist() == ask(finished.store, sql).to_pylist()
    query(finished, sql, csv_file=tmp_path / "answer.csv", parquet_file=None, rows=3)
    lines = (tmp_path / "answer.csv").read_text().splitlines()
    assert lines[0] == "ticket,sample,response_ids,reward"
    assert len(lines) == count + 1
    with pytest.raises(ConfigError, match="no_such_folder"):
        query(finished, sql, csv_file=tmp_path / "no_such_folder/x.csv", parquet_file=None, rows=3)


def test_records_are_seen_as_they_were_when_the_run_was_opened(finished: Run) -> None:
    with Questions(finished.store) as questions:
        append_results(finished)
        assert questions.ask("SELECT count(*) FROM trajectories WHERE ticket >= 900").read_all().to_pylist() == [
            {"count_star()": 0}
        ]


def test_the_help_names_every_table_and_column(finished: Run) -> None:
    told = CliRunner().invoke(app, ["query", "--help"]).output
    with Questions(finished.store) as questions:
        for table in ("trajectories", "tickets", "commits", "evaluations"):
            assert f"{table}, one row per" in told
            columns = [row["column_name"] for row in questions.ask(f"DESCRIBE {table}").read_all().to_pylist()]
            assert [name for name in columns if "/" not in name and not re.search(rf"\b{name}\b", told)] == []
