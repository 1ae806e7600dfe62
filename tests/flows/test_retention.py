"""What is removed from a run is missed by nobody: it replays to the same bits, and goes on to its end."""

import dataclasses
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dashboards.reconcile import reconcile
from data_contracts.errors import ConfigError
from data_contracts.records import Commit, Control, Heartbeat, encode_record
from flows.replay import replay
from flows.retention import archive, check_at_rest, collect
from infra.log import Log
from infra.query import ask
from infra.retention import find_removable, versions_to_keep
from infra.runs import Run
from tasks.role import append_control
from tasks.supervise import Supervisor
from tasks.weights import PolicyReader

ROLES = ("train", "rollout", "reward", "curate")


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def leave_orphans(run: Run) -> list[str]:
    """Write what processes leave behind that die before their record."""
    keys = [
        f"batch/{'0' * 64}.arrow",
        "policy/0000000007-dead/model.safetensors",
        "checkpoint/0000000007-dead/state.safetensors",
        f"curriculum/{'0' * 64}.json",
    ]
    for key in keys:
        run.store.put_new(key, b"x" * 1000)
    return sorted(keys)


def test_orphans_are_found_and_removed_only_after_a_yes(finished: Run, capsys) -> None:
    before = finished.store.list()
    orphans = leave_orphans(finished)
    found = find_removable(finished.store, finished.config)
    assert [removable.key for removable in found] == orphans
    assert sum(removable.num_bytes for removable in found) == 4000
    collect(finished, weights=False, archive_to=None, is_confirmed=False)
    assert "batch: 1 objects, 1000 bytes: no record names them" in capsys.readouterr().out
    assert set(finished.store.list()) == {*before, *orphans}
    collect(finished, weights=False, archive_to=None, is_confirmed=True)
    (added,) = set(finished.store.list()) - set(before)
    assert set(before) <= set(finished.store.list())
    record = Log(finished.store, "log/control", Control).last()
    assert record is not None
    assert added.startswith("log/control/")
    assert record.detail["collected"] == {"objects": 4, "bytes": 4000, "weights_of_versions": []}
    collect(finished, weights=False, archive_to=None, is_confirmed=True)
    assert "nothing to remove" in capsys.readouterr().out


def test_without_weights_nobody_comes_back_to_a_run_still_replays_to_the_same_bits(finished: Run, capsys) -> None:
    commits = commits_of(finished)
    batches = finished.store.list("batch")
    collect(finished, weights=True, archive_to=None, is_confirmed=True)
    gone = [c.version for c in commits if not all(finished.store.exists(o.key) for o in c.weights.objects)]
    # 3 and 6 have checkpoints and evaluations; 3 and 5 are differences to 2 and 4
    assert gone == [1, 4, 5]
    for version in (0, 2, 3, 6):
        assert PolicyReader(finished.store).weights(version)[1] == commits[version].weights.digest
    assert finished.store.list("batch") == batches
    capsys.readouterr()
    assert replay(finished, []) == 0
    assert "6 versions trained again" in capsys.readouterr().out
    assert replay(finished, ["--train.learning_rate", "0.01"], evaluate=False) == 0
    assert reconcile(finished.store, deep=True).contradictions == []


def test_what_recovery_evaluation_and_promotion_come_back_to_is_kept(finished: Run) -> None:
    commits = commits_of(finished)
    assert versions_to_keep(commits, [], finished.config) == {0, 2, 3, 6}
    assert versions_to_keep(commits[:6], [], finished.config) == {0, 2, 3, 4, 5}  # what follows the last checkpoint
    registered = finished.config.model_copy(
        update={"tracking": finished.config.tracking.model_copy(update={"register_every": 5})}
    )
    assert versions_to_keep(commits, [], registered) == {0, 2, 3, 4, 5, 6}


def test_a_run_that_was_stopped_goes_on_after_it(begun: Callable[..., Run], processes) -> None:
    run = begun(steps=8, train={"full_weights_every": 3, "checkpoint_every": 3})
    started = processes.start_all(run, ROLES, ROLLFLOW_CRASH_POINT="train.published:5")
    processes.join([process for process in started if process.name == "train"])
    processes.kill_all()
    with pytest.raises(ConfigError, match="is neither finished nor stopped"):
        collect(run, weights=True, archive_to=None, is_confirmed=True)
    Supervisor(run.store).stop_if_open("test")
    orphans = [r for r in find_removable(run.store, run.config) if r.key.startswith("policy/0000000005-")]
    assert len(orphans) == 1, "the weights of the step that was never committed"
    collect(run, weights=True, archive_to=None, is_confirmed=True)
    assert not run.store.exists(orphans[0].key)
    processes.join(processes.start_all(run, ROLES))
    assert [commit.version for commit in commits_of(run)] == list(range(9))
    assert replay(run, []) == 0
    assert reconcile(run.store, deep=True).contradictions == []


def far(writer: str, beat: int, *, done: bool = False) -> bytes:
    """The heartbeat of a rollout worker on another machine."""
    return encode_record(
        Heartbeat(
            role="rollout", writer=writer, host="far", pid=1, process_started=0, beat=beat, state="sampling", done=done
        )
    )


def impatient(run: Run, limit_s: float) -> Run:
    orchestration = run.config.orchestration.model_copy(update={"heartbeat_s": 0.01, "heartbeat_limit_s": limit_s})
    return dataclasses.replace(run, config=run.config.model_copy(update={"orchestration": orchestration}))


@pytest.fixture
def over(make_run: Callable[..., Run]) -> Run:
    """A run that has ended; nobody has ever worked on it."""
    run = make_run()
    append_control(run.store, "supervisor", "end")
    return run


@pytest.mark.parametrize("how", ["done", "declared dead"])
def test_a_worker_elsewhere_that_has_ended_is_not_waited_for(how: str, over: Run) -> None:
    over.store.put("role/rollout-w.json", far("w", 3, done=how == "done"))
    if how == "declared dead":
        append_control(over.store, "supervisor", "dead", target="w")
    assert check_at_rest(impatient(over, 3600.0)) == []


def test_nothing_is_removed_while_somebody_elsewhere_shows_life(over: Run) -> None:
    leave_orphans(over)
    over.store.put("role/rollout-w.json", far("w", 0))
    quit_ = threading.Event()

    def live() -> None:
        for beat in itertools.count(1):
            over.store.put("role/rollout-w.json", far("w", beat))
            if quit_.wait(0.01):
                return

    thread = threading.Thread(target=live)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="rollout w on far has not ended"):
            collect(impatient(over, 3600.0), weights=False, archive_to=None, is_confirmed=True)
    finally:
        quit_.set()
        thread.join()
    assert len(find_removable(over.store, over.config)) == 4


def test_a_killed_worker_elsewhere_is_taken_for_dead_when_its_heartbeat_stands_still(over: Run, capsys) -> None:
    leave_orphans(over)
    over.store.put("role/rollout-w.json", far("w", 3))
    control = Log(over.store, "log/control", Control)
    before = control.tail()
    collect(impatient(over, 0.05), weights=False, archive_to=None, is_confirmed=False)
    told = capsys.readouterr().out
    assert "no record says that rollout w on far has ended; looking for a heartbeat for 0.05 s" in told
    assert "w shows no life: taken for dead" in told
    assert control.tail() == before, "without a yes nothing is written"
    collect(impatient(over, 0.05), weights=False, archive_to=None, is_confirmed=True)
    assert [(record.kind, record.target) for record in control.read_from(before)] == [("dead", "w"), ("amend", "")]
    assert find_removable(over.store, over.config) == []
    assert check_at_rest(impatient(over, 3600.0)) == [], "and is not waited for again"


def test_trajectories_are_archived_as_parquet(finished: Run, tmp_path: Path) -> None:
    archive(finished, tmp_path / "archive")
    written = pq.read_table(tmp_path / "archive/finished-trajectories.parquet")
    sql = "SELECT * FROM trajectories ORDER BY ticket, attempt, sample"
    order = [(name, "ascending") for name in ("ticket", "attempt", "sample")]
    assert written.sort_by(order).to_pylist() == ask(finished.store, sql).to_pylist()
    assert (
        pq.ParquetFile(tmp_path / "archive/finished-trajectories.parquet").metadata.row_group(0).column(0).compression
        == "ZSTD"
    )
    assert pq.read_table(tmp_path / "archive/finished-commits.parquet").num_rows == 7
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        archive(finished, tmp_path / "file" / "archive")
