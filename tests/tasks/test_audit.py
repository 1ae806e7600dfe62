"""The audit goes through a run's records in windows, says what it found, and stops the run only when asked to."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from data_contracts.errors import ConfigError, RunStopped
from data_contracts.records import Audit, BatchRef, Commit, Consumed, Control, GroupRef, PolicyRef, Raw, Scored
from data_contracts.trajectory import make_table
from infra.log import Log
from infra.objects import put_batch
from infra.runs import Run
from tasks.audit import Auditor, to_markdown
from tasks.audit import run as audit_role
from tasks.role import Role, append_control
from tests.tasks.curation.build_group import different, row

WORKER = "worker"
SMALL = {"window_rows": 8, "min_rows": 4, "min_history": 2, "window_s": 3600.0}


def write(run: Run, number: int, reward: float = 0.5, **changes: object) -> BatchRef:
    """Append a raw and a scored record with one batch of 8 rows of mean `reward`; `changes` replace columns."""
    rewards = [reward - 0.1 if i % 2 else reward + 0.1 for i in range(8)]
    responses = different(8, 4, seed=number)
    rows = [
        row(number, i, t, **({"reward": r} | changes)) for i, (t, r) in enumerate(zip(responses, rewards, strict=True))
    ]
    groups = (GroupRef(ticket=number, attempt=0, first_row=0, num_rows=8, oldest_version=0),)
    raw, scored = (put_batch(run.store, make_table(rows, stage)) for stage in ("raw", "scored"))
    Log(run.store, f"log/raw/{WORKER}", Raw).append(number, Raw(writer=WORKER, batch=raw, groups=groups))
    record = Scored(writer="judge", rollout=WORKER, batch=scored, groups=groups)
    Log(run.store, f"log/scored/{WORKER}", Scored).append(number, record)
    return scored


def commit(run: Run, version: int, batch: BatchRef, ticket: int, left_out: tuple[int, ...] = ()) -> None:
    group = GroupRef(ticket=ticket, attempt=0, first_row=0, num_rows=8, oldest_version=0, left_out=left_out)
    record = Commit(
        writer="trainer", version=version, status="trained", checkpoint_version=0, num_trained=version, num_tokens=0,
        consumed=(Consumed(ticket=ticket, attempt=0, batch=batch, group=group),),
        weights=PolicyRef(kind="full", objects=(), digest="d", dtype="float32", num_parameters=1),
        metrics={"policy/mismatch_k3": 0.001},
    )  # fmt: skip
    assert Log(run.store, "log/commit", Commit).append(version, record) is None


def audit(run: Run, *, is_last: bool = False) -> list[Audit]:
    """Let a new audit role look at what there is; return all of log/audit."""
    with Role("audit", run.store, run.config) as role:
        Auditor(role).turn(is_last=is_last)
    return Log(run.store, "log/audit", Audit).read_from(0)


def of_stage(records: Sequence[Audit], stage: str) -> list[Audit]:
    return [record for record in records if record.stage == stage]


def broken(record: Audit) -> list[str]:
    return [result.rule for result in record.results if not result.passed]


def test_every_row_is_looked_at_once_by_stage_across_restarts(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL)
    batches = [write(run, number) for number in range(2)]
    audit(run)
    batches += [write(run, number) for number in range(2, 5)]
    commit(run, 1, batches[0], 0)
    records = audit(run)
    assert [record.num_rows for record in of_stage(records, "raw")] == [8] * 5
    assert [record.num_rows for record in of_stage(records, "scored")] == [8] * 5
    assert [record.num_rows for record in of_stage(records, "curated")] == [8]
    assert records[-1].covers == {f"log/raw/{WORKER}": 5, f"log/scored/{WORKER}": 5, "log/commit": 2}
    assert audit(run) == records
    assert [broken(record) for record in records] == [[]] * 11
    assert {record.verdict for record in records} == {"passed"}


def test_a_window_that_is_not_full_waits_until_the_last_turn(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL | {"window_rows": 100})
    write(run, 0)
    assert audit(run) == []
    assert [record.num_rows for record in audit(run, is_last=True)] == [8, 8]


@pytest.mark.parametrize("kind", ["stop", "end"])
def test_however_a_run_ends_its_last_windows_are_judged_and_its_data_docs_are_left(
    kind: str, begun: Callable[..., Run]
) -> None:
    run = begun(audit=SMALL | {"window_rows": 100, "severity": {"rollouts_succeed": "stop"}})
    write(run, 0, finish_reason="error", error="lost", reward=float("nan"), reward_error="no response")
    append_control(run.store, "someone", kind)
    with Role("audit", run.store, run.config) as role:
        if kind == "stop":
            with pytest.raises(RunStopped):
                audit_role(role)
        else:
            role.check(often=True)
            audit_role(role)
    records = Log(run.store, "log/audit", Audit).read_from(0)
    assert [record.num_rows for record in records] == [8, 8]
    assert records[0].verdict == "stop"
    assert Log(run.store, "log/control", Control).tail() == 1, "a run that is over already is not stopped"
    assert {"data_docs/index.html", "data_docs/window-000001.html"} <= set(run.store.list("data_docs"))


def test_distribution_rules_compare_with_the_runs_own_windows(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL)
    for number in range(3):
        write(run, number)
    calm = of_stage(audit(run), "scored")
    assert ["reward_level" in record.unjudged for record in calm] == [True, True, False]
    write(run, 3, reward=0.9)
    jump = of_stage(audit(run), "scored")[-1]
    assert broken(jump) == ["reward_level"]
    assert jump.verdict == "warn"
    result = next(result for result in jump.results if result.rule == "reward_level")
    assert result.observed == "0.9"
    assert "0.35" in result.expected
    assert Log(run.store, "log/control", Control).last() is None


def test_a_violation_stops_the_run_when_the_config_says_so(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL | {"severity": {"rollouts_succeed": "stop"}})
    failed = {"finish_reason": "error", "error": "lost", "reward": float("nan"), "reward_error": "no response"}
    write(run, 0, **failed)
    with Role("audit", run.store, run.config) as role, pytest.raises(RunStopped, match="rollouts_succeed"):
        Auditor(role).turn()
    control = Log(run.store, "log/control", Control).last()
    assert control is not None
    assert (control.kind, control.role) == ("stop", "audit")
    assert control.detail["results"][0]["observed"] == "1"
    record = Log(run.store, "log/audit", Audit).last()
    assert record is not None
    assert record.verdict == "stop"


def test_tokens_older_than_the_bound_are_seen_in_what_was_trained(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL, staleness={"max_staleness": 0})
    commit(run, 1, write(run, 0), 0, left_out=(0,))
    assert of_stage(audit(run), "curated") == []  # 7 rows
    commit(run, 2, write(run, 1), 1)
    with Role("audit", run.store, run.config) as role, pytest.raises(RunStopped, match="staleness_bound"):
        Auditor(role).turn()
    record = of_stage(Log(run.store, "log/audit", Audit).read_from(0), "curated")[0]
    assert record.num_rows == 15
    assert broken(record) == ["staleness_bound"]


def test_torn_batches_and_rows_are_counted_and_spare_the_rest(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL | {"window_rows": 20})
    write(run, 0)
    write(run, 1, action_mask=[True] * 3)  # of 4 tokens
    ref = write(run, 2)
    path = Path(run.store.url) / ref.key
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:100])
    write(run, 3)
    records = audit(run, is_last=True)
    assert [(r.stage, r.num_rows, r.num_torn) for r in records] == [("raw", 24, 8), ("scored", 16, 16)]
    assert [broken(record) for record in records] == [["rows_readable"]] * 2


def test_a_second_audit_goes_on_from_the_first_ones_word(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL)
    with Role("audit", run.store, run.config) as role, Role("audit", run.store, run.config) as twin:
        first, second = Auditor(role), Auditor(twin)
        write(run, 0)
        first.turn()
        while second.turn():
            pass
    records = Log(run.store, "log/audit", Audit).read_from(0)
    assert [(record.stage, record.num_rows) for record in records] == [("raw", 8), ("scored", 8)]


@pytest.mark.parametrize("config", [{"severity": {"no_such_rule": "warn"}}, {"suites": "{tmp}"}])
def test_a_wrong_suite_or_severity_ends_the_audit_at_once(
    config: dict[str, object], begun: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "raw.toml").write_text("[[rules]]\n")
    run = begun(audit={k: str(tmp_path) if v == "{tmp}" else v for k, v in config.items()})
    with Role("audit", run.store, run.config) as role, pytest.raises(ConfigError):
        Auditor(role)


def test_an_expectation_of_ones_own_is_a_function_and_an_entry_of_a_suite(
    begun: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_rules.py").write_text("def short(values, limit):\n    return values <= limit\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "raw.toml").write_text(
        '[[rules]]\nname = "short"\ncolumn = "num_tokens"\nexpect = "my_rules:short"\nparameters = { limit = 3 }\n'
    )
    run = begun(audit=SMALL | {"suites": str(tmp_path)})
    write(run, 0)
    record = of_stage(audit(run), "raw")[0]
    assert broken(record) == ["short"]
    assert record.results[1].observed == "8 of 8 rows not so, for example 4, 4, 4, 4, 4"


def test_violations_come_first_in_what_people_see(begun: Callable[..., Run]) -> None:
    run = begun(audit=SMALL)
    for number in range(3):
        write(run, number, reward=0.5 if number < 2 else 0.9)
    lines = to_markdown(audit(run)[-1:]).splitlines()
    assert lines[0] == "Newest windows: scored 8 rows, 0 torn."
    assert lines[4].startswith("| warn | scored | reward_level |")


def test_the_role_audits_a_whole_run(make_run: Callable[..., Run], processes) -> None:
    run = make_run(audit=SMALL)
    started = processes.start_all(run, ("start", "train", "rollout", "reward", "curate", "audit"))
    processes.join(started)
    assert [process.exitcode for process in started] == [0] * len(started)
    records = Log(run.store, "log/audit", Audit).read_from(0)
    trained = run.config.steps * run.config.groups_per_step * run.config.samples_per_group
    assert sum(record.num_rows for record in of_stage(records, "curated")) == trained
    assert sum(record.num_rows for record in of_stage(records, "raw")) >= trained
    assert "stop" not in {record.verdict for record in records}
