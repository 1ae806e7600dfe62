"""Questions to a run in SQL, through DuckDB, over everything that was rolled out and what became of it.

Views:

    trajectories   one row per scored trajectory: every column of its batch (data_contracts/trajectory.py), and
                   batch            key of the batch it lies in
                   length           response tokens
                   verdict          accepted, refused, late (another result of the ticket counted), NULL: none yet
                   drop_reason      why it was not trained; NULL when it was, or may still be
                   trained_version  version of the commit that trained it, else NULL
                   staleness        trained_version - 1 - the oldest version that sampled its group, else NULL
                   source_ticket    ticket that the rows are a copy of, NULL where they were sampled for their own
    tickets        one row per ticket: attempts, verdict, drop_reason, trained_version, prompt_id, reward_mean
    commits        one row per version: status, at, num_groups, num_tokens, digest, and every metric by its name
    evaluations    one row per evaluation: version, at, and every metric by its name

Names with a slash are quoted: SELECT version, "reward/mean" FROM commits. Useful questions:

    reward by prompt and version
        SELECT prompt_id, trained_version, avg(reward) FROM trajectories WHERE trained_version IS NOT NULL
        GROUP BY ALL ORDER BY ALL
    what was dropped, by length
        SELECT drop_reason, length, count(*) FROM trajectories WHERE drop_reason IS NOT NULL GROUP BY ALL ORDER BY ALL
    log-probabilities as sampled, by staleness
        SELECT staleness, quantile_cont(logprob, [0.05, 0.5, 0.95]) FROM
        (SELECT staleness, unnest(behavior_logprobs) AS logprob FROM trajectories WHERE trained_version IS NOT NULL)
        WHERE NOT isnan(logprob) GROUP BY staleness ORDER BY staleness
    importance ratios, by the staleness of what was trained
        SELECT round(s, 1) AS staleness, avg("policy/ratio_p05"), avg("policy/ratio_p95") FROM commits JOIN
        (SELECT trained_version, avg(staleness) AS s FROM trajectories GROUP BY 1) ON trained_version = version
        GROUP BY 1 ORDER BY 1
    prompts that nobody ever solved
        SELECT prompt_id, count(*) FROM trajectories GROUP BY 1 HAVING max(reward) = 0

Of batches in a folder only the columns that the query needs are read; from other stores, the batches are fetched
when the query speaks of trajectories. Bytes are not verified here: `rollflow reconcile --deep` does that.
"""

import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from data_contracts import trajectory
from data_contracts.errors import ConfigError
from data_contracts.records import BatchRef, Claim, Commit, Curated, Evaluation, Refused, Scored, Verdict
from infra.log import Log
from infra.objects import get_batch, get_object
from infra.store import Store, open_store

if TYPE_CHECKING:
    import dask.dataframe

BATCH = pa.field("batch", pa.string())
FATE = pa.schema(
    [
        BATCH,
        pa.field("ticket", pa.int64()),
        pa.field("attempt", pa.int32()),
        pa.field("verdict", pa.string()),
        pa.field("drop_reason", pa.string()),
        pa.field("trained_version", pa.int32()),
        pa.field("oldest_version", pa.int32()),
        pa.field("source_ticket", pa.int64()),
        pa.field("left_out", pa.list_(pa.int32())),
    ]
)
"""What became of one result of one ticket; `left_out` are samples that curation left out of an accepted group."""

TICKETS = pa.schema(
    [
        pa.field("ticket", pa.int64()),
        pa.field("attempts", pa.int32()),
        pa.field("verdict", pa.string()),
        pa.field("drop_reason", pa.string()),
        pa.field("trained_version", pa.int32()),
        pa.field("prompt_id", pa.string()),
        pa.field("reward_mean", pa.float64()),
    ]
)

TABLES = ("trajectories", "tickets", "commits", "evaluations")
"""What can be asked for."""

VIEW = """
CREATE VIEW trajectories AS SELECT rows.*, len(rows.response_ids) AS length, fates.verdict,
    CASE WHEN list_contains(fates.left_out, rows.sample) THEN 'left_out' ELSE fates.drop_reason END AS drop_reason,
    CASE WHEN list_contains(fates.left_out, rows.sample) THEN NULL ELSE fates.trained_version END AS trained_version,
    CASE WHEN list_contains(fates.left_out, rows.sample) THEN NULL
         ELSE fates.trained_version - 1 - fates.oldest_version END AS staleness, fates.source_ticket
FROM rows JOIN fates USING (batch, ticket, attempt)
"""


class Questions:
    """A run, open for questions. Use as a context manager; not safe for use from two threads.

    Records are read when it is opened: what is appended later is not seen.
    """

    def __init__(self, store: Store) -> None:
        """`store` is a view below the run's prefix."""
        self._store = store
        self._facts = Facts.read(store)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._has_rows = False
        self._db = duckdb.connect(":memory:", config={"python_enable_replacements": "false"})
        self._db.register("fates", self._facts.fates())
        self._db.register("tickets", self._facts.tickets())
        self._db.register("commits", _wide([_commit_row(commit) for commit in self._facts.commits]))
        evaluations = Log(store, "log/eval", Evaluation).read_from(0)
        self._db.register("evaluations", _wide([{"version": e.version, "at": e.at, **e.metrics} for e in evaluations]))

    def __enter__(self) -> "Questions":
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        if self._folder is not None:
            self._folder.cleanup()

    def ask(self, sql: str) -> pa.RecordBatchReader:
        """Return the answer, computed as it is read.

        Raises:
            ConfigError: DuckDB cannot run the query; its own first sentence says why.
        """
        if not self._has_rows and re.search(r"\b(trajectories|rows)\b", sql, re.IGNORECASE):
            self._db.register("rows", self._rows())
            self._db.execute(VIEW)
            self._has_rows = True
        try:
            # A question reads the run and nothing else; the setting cannot be taken back.
            self._db.execute("SET enable_external_access = false")
            answer = self._db.sql(sql)
            if answer is not None:
                return answer.to_arrow_reader()
        except duckdb.Error as cause:
            first = next(line for line in str(cause).splitlines() if line.strip())
            raise ConfigError(f"query: {first}{self._hint(cause, sql)}") from cause
        raise ConfigError(f"query: expected something that has an answer, such as SELECT ..., got {sql!r}")

    def _hint(self, cause: duckdb.Error, sql: str) -> str:
        """Return what there is to be asked for, when a name is unknown."""
        if isinstance(cause, duckdb.CatalogException):
            return f"; the tables are {', '.join(TABLES)}"
        if not isinstance(cause, duckdb.BinderException):
            return ""
        named = [table for table in TABLES if re.search(rf"\b{table}\b", sql, re.IGNORECASE)]
        columns = {table: [row[0] for row in self._db.execute(f"DESCRIBE {table}").fetchall()] for table in named}
        quoted = {table: [c if c.isidentifier() else f'"{c}"' for c in names] for table, names in columns.items()}
        return "".join(f"; {table} has {', '.join(names)}" for table, names in quoted.items())

    def _rows(self) -> ds.Dataset:
        """Return all scored batches as one data set whose column `batch` costs nothing to filter by."""
        root = Path(self._store.url)
        keys = [batch.key for batch in self._facts.batches]
        if not root.is_dir():
            root = self._fetch()
        return ds.FileSystemDataset.from_paths(
            [str(root / key) for key in keys],
            schema=pa.schema([*trajectory.SCHEMAS["scored"], BATCH]).remove_metadata(),
            format=ds.IpcFileFormat(),
            filesystem=pyarrow.fs.LocalFileSystem(),
            partitions=[ds.field("batch") == key for key in keys],
        )

    def _fetch(self) -> Path:
        self._folder = tempfile.TemporaryDirectory(prefix="rollflow-query-")
        root = Path(self._folder.name)
        (root / "batch").mkdir()
        for batch in self._facts.batches:
            (root / batch.key).write_bytes(get_object(self._store, batch))
        return root


def ask(store: Store, sql: str) -> pa.Table:
    """Return the whole answer to one question (see Questions.ask)."""
    with Questions(store) as questions:
        return questions.ask(sql).read_all()


def as_dask(store: Store) -> "dask.dataframe.DataFrame":
    """Return `trajectories` as a Dask dataframe, one partition per batch, for runs that do not fit into memory.

    A partition is read, and its bytes are verified, where and when it is computed: workers elsewhere need to reach
    the store. Columns are Arrow-backed.
    """
    import dask.dataframe

    facts = Facts.read(store)
    by_batch = _by_batch(facts.fates())
    parts = [(store.url, batch, by_batch[batch.key]) for batch in facts.batches if batch.key in by_batch]
    meta = _frame(_with_fates(trajectory.SCHEMAS["scored"].empty_table(), "", FATE.empty_table()))
    if not parts:
        return dask.dataframe.from_pandas(meta, npartitions=1)
    return dask.dataframe.from_map(_read_part, parts, meta=meta)


@dataclass
class Facts:
    """What the records say about results and tickets."""

    commits: list[Commit]
    scored: list[Scored]
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    trained: dict[int, int] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    samples: dict[int, list[int]] = field(default_factory=dict)
    """Ticket to the samples that curation left out of its accepted group."""

    @classmethod
    def read(cls, store: Store) -> "Facts":
        """Read all records, effects first, so that a run that goes on is seen without contradictions."""
        commits = Log(store, "log/commit", Commit).read_from(0)
        refused = Log(store, "log/refused", Refused).read_from(0)
        curated = Log(store, "log/curated", Curated).read_from(0)
        writers = store.at("log/scored").list_folders()
        scored = [record for writer in writers for record in _read(store, f"log/scored/{writer}", Scored)]
        facts = cls(commits, scored)
        for claim in _read(store, "log/claim", Claim):
            facts.attempts |= dict.fromkeys(claim.tickets, claim.attempt + 1)
        for record in curated:
            for verdict in record.verdicts:
                facts.verdicts.setdefault(verdict.ticket, verdict)
        facts.refused = {ticket: record.reason for record in reversed(refused) for ticket in record.tickets}
        facts.trained = {group.ticket: commit.version for commit in commits for group in commit.consumed}
        facts._find_left_out(store)
        return facts

    @property
    def batches(self) -> list[BatchRef]:
        """Every scored batch once, in the order of the logs."""
        return list({s.batch.key: s.batch for s in self.scored if s.batch is not None}.values())

    def _find_left_out(self, store: Store) -> None:
        for verdict in self.verdicts.values():
            group, batch = verdict.group, verdict.batch
            if verdict.accepted and group is not None and batch is not None and group.left_out:
                samples = get_batch(store, batch, "scored").column("sample").to_pylist()
                self.samples[verdict.ticket] = [samples[group.first_row + row] for row in group.left_out]

    def fates(self) -> pa.Table:
        """Return one row per scored group (see FATE)."""
        rows = []
        for record in self.scored:
            for group in record.groups if record.batch is not None else ():
                assert record.batch is not None  # noqa: S101 the comprehension above has said so
                verdict = self.verdicts.get(group.ticket)
                reused = group.reused
                counts = verdict is None or _is_of(verdict, group.attempt, record.batch)
                told, reason = self._fate(group.ticket) if counts else ("late", "late")
                rows.append(
                    {
                        "batch": record.batch.key,
                        "ticket": group.ticket,
                        "attempt": group.attempt,
                        "verdict": told,
                        "drop_reason": reason,
                        "trained_version": self.trained.get(group.ticket) if counts else None,
                        "oldest_version": reused.oldest_version if reused else group.oldest_version,
                        "source_ticket": reused.ticket if reused else None,
                        "left_out": self.samples.get(group.ticket, []) if counts else [],
                    }
                )
        return pa.Table.from_pylist(rows, schema=FATE)

    def tickets(self) -> pa.Table:
        """Return one row per ticket (see TICKETS)."""
        rows = []
        for ticket in sorted(self.attempts):
            verdict = self.verdicts.get(ticket)
            told, reason = self._fate(ticket)
            rows.append(
                {
                    "ticket": ticket,
                    "attempts": self.attempts[ticket],
                    "verdict": told,
                    "drop_reason": reason,
                    "trained_version": self.trained.get(ticket),
                    "prompt_id": (verdict.prompt_id or None) if verdict is not None else None,
                    "reward_mean": verdict.reward_mean if verdict is not None else None,
                }
            )
        return pa.Table.from_pylist(rows, schema=TICKETS)

    def _fate(self, ticket: int) -> tuple[str | None, str | None]:
        """Return (verdict, why it is not trained)."""
        verdict = self.verdicts.get(ticket)
        if verdict is not None and not verdict.accepted:
            return "refused", verdict.reason
        reason = f"train: {self.refused[ticket]}" if ticket in self.refused and ticket not in self.trained else None
        return (None if verdict is None else "accepted"), reason


def _read(store: Store, path: str, kind: type[Any]) -> list[Any]:
    return Log(store, path, kind).read_from(0)


def _is_of(verdict: Verdict, attempt: int, batch: BatchRef) -> bool:
    """Whether a verdict is on this result of its ticket; a refusal need not name the batch."""
    return verdict.attempt == attempt and (verdict.batch is None or verdict.batch.key == batch.key)


def _commit_row(commit: Commit) -> dict[str, Any]:
    return {
        "version": commit.version,
        "status": commit.status,
        "at": commit.at,
        "num_groups": len(commit.consumed),
        "num_tokens": commit.num_tokens,
        "digest": commit.weights.digest,
        "has_checkpoint": commit.checkpoint is not None,
        **commit.metrics,
    }


def _wide(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """Return a table with a column for every name that any row has."""
    names = list(dict.fromkeys(["version", *(name for row in rows for name in row)]))
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def _by_batch(fates: pa.Table) -> dict[str, pa.Table]:
    keys = fates.column("batch").to_pylist()
    places: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        places.setdefault(key, []).append(row)
    return {key: fates.take(pa.array(rows)) for key, rows in places.items()}


def _read_part(part: tuple[str, BatchRef, pa.Table]) -> Any:
    url, batch, fates = part
    return _frame(_with_fates(get_batch(open_store(url), batch, "scored"), batch.key, fates))


def _with_fates(table: pa.Table, key: str, fates: pa.Table) -> pa.Table:
    """Return the rows of one batch with the columns that the view adds, in its order."""
    of = {(fate["ticket"], fate["attempt"]): fate for fate in fates.to_pylist()}
    names = ("ticket", "attempt", "sample")
    rows = list(zip(*(table.column(name).to_pylist() for name in names), strict=True))
    found = [of[ticket, attempt] for ticket, attempt, _ in rows]
    out = [sample in fate["left_out"] for fate, (_, _, sample) in zip(found, rows, strict=True)]
    pairs = list(zip(found, out, strict=True))
    versions = [None if is_out else fate["trained_version"] for fate, is_out in pairs]
    ages = [None if v is None else v - 1 - fate["oldest_version"] for v, fate in zip(versions, found, strict=True)]
    added: dict[str, pa.Array] = {
        "batch": pa.array([key] * table.num_rows, pa.string()),
        "length": pc.cast(pc.call_function("list_value_length", [table.column("response_ids")]), pa.int64()),
        "verdict": pa.array([fate["verdict"] for fate in found], pa.string()),
        "drop_reason": pa.array(["left_out" if o else fate["drop_reason"] for fate, o in pairs], pa.string()),
        "trained_version": pa.array(versions, pa.int32()),
        "staleness": pa.array(ages, pa.int32()),
        "source_ticket": pa.array([fate["source_ticket"] for fate in found], pa.int64()),
    }
    return pa.table([*table.columns, *added.values()], names=[*table.column_names, *added])


def _frame(table: pa.Table) -> Any:
    import pandas as pd

    return table.to_pandas(types_mapper=pd.ArrowDtype)


def pages(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yield the answer as it is computed.

    Raises:
        ConfigError: DuckDB fails on the way, for example at a cast that a later row does not bear.
    """
    try:
        yield from reader
    except (duckdb.Error, pa.ArrowException, OSError) as cause:
        first = next(line for line in str(cause).splitlines() if line.strip())
        raise ConfigError(f"query: {first}") from cause
