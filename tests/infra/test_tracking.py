"""The exporter against a real MLflow server. What the server holds is read from its own database and files."""

import http.client
import http.server
import itertools
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import psutil
import pytest

from data_contracts.config import EvaluateConfig, RunConfig, TrackingConfig
from data_contracts.errors import ConfigError, ContractError, ProtocolError, ServiceError
from data_contracts.records import Audit, Commit, Control, Curated, Evaluation, RuleResult
from infra import services
from infra.export_loop import export_loop
from infra.log import Log
from infra.processes import family as family_of
from infra.server_processes import TOKEN_VARIABLE
from infra.store import Store, open_store
from infra.tracking import Exporter
from infra.tracking_experiments import ensure_group_run

CONFIG = RunConfig(name="placeholder", steps=6, tracking=TrackingConfig(register_every=3, experiment="tests"))


@pytest.fixture(autouse=True)
def prompt_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow's client waits up to a second, at random, before it repeats a call."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")


class Recorded:
    """A run's records, written as roles would."""

    def __init__(self, store: Store, make_commit: Callable[..., Commit]) -> None:
        self.store = store
        self._make_commit = make_commit
        self._num_commits = 0

    def commit(self, count: int = 1, **fields: object) -> None:
        for _ in range(count):
            Log(self.store, "log/commit", Commit).append(
                self._num_commits, self._make_commit(self._num_commits, **fields)
            )
            self._num_commits += 1

    def evaluate(self, version: int, accuracy: float, digest: str | None = None, at: float = 5.0) -> None:
        log = Log(self.store, "log/eval", Evaluation)
        record = Evaluation(
            writer="e",
            version=version,
            digest=digest or f"digest-{version}",
            metrics={"eval/accuracy": accuracy},
            at=at,
        )
        log.append(log.tail(), record)

    def control(self, kind: str, **fields: object) -> None:
        log = Log(self.store, "log/control", Control)
        log.append(log.tail(), Control.model_validate({"writer": "s", "kind": kind, "at": 4.0, **fields}))

    def audit(self, stage: str, *, passed: bool, **statistics: float) -> None:
        log = Log(self.store, "log/audit", Audit)
        result = RuleResult(rule="reward_level", severity="warn", passed=passed, expected="0 to 1", observed="2")
        fields = {"writer": "a", "num_rows": 64, "covers": {}, "at": 6.0}
        record = Audit.model_validate(fields | {"stage": stage, "results": (result,), "statistics": statistics})
        log.append(log.tail(), record)

    def short_run(self) -> None:
        self.control("start")
        self.commit(4)
        self.evaluate(2, 0.2)
        self.control("end")

    def whole_run(self) -> None:
        self.control("start")
        self.commit(7)
        self.evaluate(0, 0.2)
        self.evaluate(4, 0.9)
        self.evaluate(6, 0.7)
        self.audit("scored", passed=True, **{"reward/mean": 0.5, "reward/std": float("nan")})
        self.audit("scored", passed=False, **{"reward/mean": 2.0})
        self.control("end")


@pytest.fixture
def recorded(make_commit) -> Recorded:
    return Recorded(open_store(f"memory://{uuid4().hex}").at("run"), make_commit)


class Scene:
    """One MLflow run of its own: a fresh run id, and a fresh name for registered policies."""

    def __init__(self, servers, config: RunConfig = CONFIG) -> None:
        self.run_id = f"r{uuid4().hex[:10]}"
        self.config = config.model_copy(update={"name": self.run_id})
        self.servers = servers
        self.uri = servers.services.mlflow_url

    def exporter(self, recorded: Recorded, uri: str | None = None, **options: Any) -> Exporter:
        return Exporter(recorded.store, uri or self.uri, self.config, self.run_id, **options)

    def ask(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        path = self.servers.home / "mlflow" / "mlflow.db"
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30)) as database:
            return database.execute(query, values).fetchall()

    def runs(self) -> list[tuple[str, str]]:
        return self.ask(
            "select runs.run_uuid, status from runs join tags on tags.run_uuid = runs.run_uuid "
            "where tags.key = 'rollflow.run_id' and tags.value = ? and lifecycle_stage = 'active'",
            self.run_id,
        )

    def points(self, key: str) -> list[tuple[int, float]]:
        ((run, _),) = self.runs()
        return self.ask("select step, value from metrics where run_uuid = ? and key = ? order by step, value", run, key)

    def tag(self, key: str) -> str:
        ((run, _),) = self.runs()
        return self.ask("select value from tags where run_uuid = ? and key = ?", run, key)[0][0]

    def held(self) -> dict[str, Any]:
        """Everything that MLflow holds about the run, but for ids that MLflow makes up."""
        ((run, status),) = self.runs()
        versions = dict(
            self.ask(
                "select v.version, t.value from model_versions v join model_version_tags t "
                "on t.name = v.name and t.version = v.version and t.key = 'rollflow.version' "
                "where v.run_id = ? and v.current_stage != 'Deleted_Internal'",
                run,
            )
        )
        aliases = self.ask("select alias, version from registered_model_aliases where name like ?", f"{self.run_id}-%")
        folders = (self.servers.home / "mlflow" / "artifacts").glob(f"*/{run}/artifacts")
        files = {str(p.relative_to(f)): p.read_text() for f in folders for p in f.rglob("*") if p.is_file()}
        metrics = "select key, step, value, timestamp, is_nan from metrics where run_uuid = ? order by 1, 2, 3, 4"
        params = "select key, value from params where run_uuid = ? and key != 'name' order by 1"
        tags = (
            "select key, value from tags where run_uuid = ? "
            "and key not in ('rollflow.run_id', 'rollflow.made_ns', 'mlflow.runName', 'mlflow.source.git.commit')"
        )
        return {
            "status": status,
            "metrics": self.ask(metrics, run),
            "params": self.ask(params, run),
            "tags": sorted(self.ask(tags, run)),
            "versions": sorted(versions.values(), key=int),
            "aliases": {alias: versions[number] for alias, number in aliases},
            "version tags": self.ask(
                "select value from model_version_tags where name like ? and key = 'eval/accuracy' order by value",
                f"{self.run_id}-%",
            ),
            "models": self.ask(
                "select name, status from logged_models "
                "where source_run_id = ? and lifecycle_stage = 'active' order by 1",
                run,
            ),
            "model metrics": self.ask(
                "select m.name, metric_name, metric_step, metric_value from logged_model_metrics x "
                "join logged_models m on m.model_id = x.model_id where run_id = ? order by 1, 2, 3",
                run,
            ),
            "inputs": self.ask(
                "select d.name, d.digest from inputs i join datasets d on d.dataset_uuid = i.source_id "
                "where i.destination_id = ? order by 1",
                run,
            ),
            "files": files,
        }


@pytest.fixture
def scene(servers) -> Scene:
    return Scene(servers)


class Proxy(http.server.ThreadingHTTPServer):
    """Stands before a server and loses what it is told to.

    `fault(number, method, path)` is asked for every request: "lost reply" passes it on and hangs up, "no reply"
    hangs up at once, "" lets it through.
    """

    daemon_threads = True

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _ProxyHandler)
        self.upstream = urlsplit(upstream).netloc
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.fault: Callable[[int, str, str], str] = lambda *_: ""
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def handle_error(self, request, client_address) -> None:
        pass  # a client that goes away is part of the tests


class _ProxyHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1
    server: Proxy

    def log_message(self, *_: object) -> None:
        pass

    def do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.server.lock:
            number = len(self.server.requests)
            self.server.requests.append((self.command, urlsplit(self.path).path))
        fault = self.server.fault(number, self.command, self.path)
        if fault == "no reply":
            self.close_connection = True
            return
        with closing(http.client.HTTPConnection(self.server.upstream, timeout=30)) as upstream:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in ("host", "accept-encoding")}
            upstream.request(self.command, self.path, body, headers)
            reply = upstream.getresponse()
            answer = reply.read()
        if fault == "lost reply":
            self.close_connection = True
            return
        self.send_response(reply.status)
        self.send_header("Content-Type", reply.getheader("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = do


@pytest.fixture
def proxy(servers) -> Iterator[Proxy]:
    server = Proxy(servers.services.mlflow_url)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


# What a run looks like


def test_a_run_is_told_whole(scene: Scene, recorded: Recorded):
    recorded.whole_run()
    exporter = scene.exporter(recorded, packages={"torch": "2.13"}, flow_run_id="f1", flow_run_url="http://x/f1")

    assert exporter.export_available() == 7 + 3 + 2, "commits, evaluations, audits"

    held = scene.held()
    assert held["status"] == "FINISHED"
    assert scene.points("reward/mean") == [(v, v / 100) for v in range(7)]
    assert scene.points("eval/accuracy") == [(0, 0.2), (4, 0.9), (6, 0.7)]
    assert held["versions"] == ["0", "3", "4", "6"], "every third, those evaluated, the last"
    assert held["aliases"] == {"champion": "4", "candidate": "6"}
    assert held["models"] == [(f"policy-v{v}", 2) for v in (0, 3, 4, 6)]
    assert held["model metrics"] == [
        (f"policy-v{v}", "eval/accuracy", v, accuracy) for v, accuracy in ((0, 0.2), (4, 0.9), (6, 0.7))
    ]
    assert [name for name, _ in held["inputs"]] == ["addition"]
    params = dict(held["params"])
    assert params["train.learning_rate"] == "0.0003"
    assert params["envs.0.max_operand"] == "99"
    tags = dict(held["tags"])
    assert tags["rollflow.store"] == recorded.store.url
    assert tags["rollflow.package.torch"] == "2.13"
    assert (tags["rollflow.flow_run_id"], tags["rollflow.flow_run"]) == ("f1", "http://x/f1")
    assert tags["rollflow.state"] == "ended at version 6"
    assert sorted(held["files"]) == [
        *(f"data_quality/{n:010d}.json" for n in range(2)),
        *(f"evaluations/{n:010d}.json" for n in range(3)),
        *(f"lineage/{first:010d}.json" for first in (0, 1, 4)),
    ]
    for version in range(7):
        first = 0 if version == 0 else 1 if version <= 3 else 4
        assert (f"{version:064x}" in held["files"][f"lineage/{first:010d}.json"]) == (version > 0)
    assert f"/runs/{scene.runs()[0][0]}?" in exporter.run_url


def test_nothing_is_told_twice(scene: Scene, recorded: Recorded):
    recorded.whole_run()
    scene.exporter(recorded).export_available()
    before = scene.held()
    again = scene.exporter(recorded)
    assert [again.export_available(), again.export_available()] == [0, 0]
    assert scene.held() == before


def test_records_arrive_as_they_are_written(scene: Scene, recorded: Recorded):
    exporter = scene.exporter(recorded)
    assert exporter.export_available() == 0, "the run shows before its first commit"
    recorded.commit(2)
    assert exporter.export_available() == 2
    recorded.commit(1)
    recorded.evaluate(1, 0.5)
    assert exporter.export_available() == 2
    assert scene.points("export/commit") == [(0, 0), (1, 1), (2, 2)]


def test_what_the_audit_found_is_told_window_by_window(scene: Scene, recorded: Recorded):
    recorded.whole_run()
    exporter = scene.exporter(recorded)
    exporter.export_available()
    assert scene.points("audit/scored/reward.mean") == [(0, 0.5), (1, 2.0)]
    assert scene.points("audit/scored/violations") == [(0, 0.0), (1, 1.0)]
    assert scene.points("audit/scored/reward.std") == []
    assert scene.tag("rollflow.data_quality") == "windows 2, violations 1: reward_level 1"
    assert '"observed": "2"' in scene.held()["files"]["data_quality/0000000001.json"]
    recorded.audit("raw", passed=True)
    assert exporter.export_available() == 1
    assert scene.points("audit/raw/rows") == [(2, 64.0)]


def test_a_stopped_run_waits_for_its_resume(scene: Scene, recorded: Recorded):
    exporter = scene.exporter(recorded)
    statuses = []
    for kind, fields in (
        ("start", {}),
        ("stop", {"error": "interrupted"}),
        ("start", {}),
        ("fail", {"role": "reward", "error": "EngineError: boom"}),
        ("start", {}),
        ("end", {}),
    ):
        recorded.control(kind, **fields)
        recorded.commit(1)
        exporter.export_available()
        statuses.append((scene.runs()[0][1], scene.tag("rollflow.state"), scene.tag("rollflow.error")))
    assert statuses == [
        ("RUNNING", "running", ""),
        ("SCHEDULED", "stopped at version 1", "interrupted"),
        ("RUNNING", "running", ""),
        ("FAILED", "failed at version 3", "reward: EngineError: boom"),
        ("RUNNING", "running", ""),
        ("FINISHED", "ended at version 5", ""),
    ]


def test_what_the_other_roles_did_is_told_at_the_commit_that_saw_it(scene: Scene, recorded: Recorded):
    for number, busy_s in enumerate((1.0, 2.0, 4.0)):
        record = Curated(writer="c", verdicts=(), covers={}, num_accepted=0, num_refused=0, metrics={"busy_s": busy_s})
        Log(recorded.store, "log/curated", Curated).append(number, record)
    recorded.commit(1)
    recorded.commit(1, positions={"curated": 2})
    scene.exporter(recorded).export_available()
    recorded.commit(1, positions={"curated": 3})
    scene.exporter(recorded).export_available()
    assert scene.points("curate/busy_s") == [(1, 3.0), (2, 4.0)]


def test_many_points_go_out_in_few_calls(scene: Scene, recorded: Recorded, proxy: Proxy):
    scene.config = scene.config.model_copy(update={"tracking": TrackingConfig(register_every=10_000), "steps": 10_000})
    recorded.commit(450)
    scene.exporter(recorded, proxy.url).export_available()
    assert scene.points("reward/mean") == [(v, v / 100) for v in range(450)]
    batches = [path for _, path in proxy.requests if path.endswith("runs/log-batch")]
    # 200 commits of 3 points at a time, and three calls for parameters, tags and the state; a slow reply is asked again
    assert 3 + 3 <= len(batches) < 20


def test_values_that_are_not_finite_are_told(scene: Scene, recorded: Recorded):
    recorded.commit(1, metrics={"loss/total": float("nan"), "policy/ratio_max": float("inf")})
    scene.exporter(recorded).export_available()
    scene.exporter(recorded).export_available()
    held = {key: (value, is_nan) for key, _, value, _, is_nan in scene.held()["metrics"]}
    assert held["loss/total"] == (0.0, 1)
    assert held["policy/ratio_max"] == (sys.float_info.max, 0)


def test_only_a_better_evaluation_changes_the_champion(scene: Scene, recorded: Recorded):
    recorded.commit(6)
    champions = []
    for version, accuracy in ((0, 0.5), (1, 0.4), (2, 0.5), (3, 0.6), (4, float("nan"))):
        recorded.evaluate(version, accuracy)
        scene.exporter(recorded).export_available()
        champions.append(scene.held()["aliases"]["champion"])
    assert champions == ["0", "0", "0", "3", "3"]
    assert scene.held()["aliases"]["candidate"] == "4"


def test_a_version_evaluated_twice_keeps_its_first_value(scene: Scene, recorded: Recorded):
    recorded.commit(1)
    recorded.evaluate(0, 0.5, at=5.0)
    recorded.evaluate(0, 0.6, at=6.0)
    assert scene.exporter(recorded).export_available() == 3
    assert scene.points("eval/accuracy") == [(0, 0.5)]
    assert scene.points("export/evaluation") == [(0, 0), (1, 1)]


def test_an_evaluation_of_other_weights_is_refused(scene: Scene, recorded: Recorded):
    recorded.commit(1)
    recorded.evaluate(0, 0.9, digest="something else")
    with pytest.raises(
        ProtocolError, match="evaluated weights something else as version 0, whose commit says digest-0"
    ):
        scene.exporter(recorded).export_available()
    assert "champion" not in scene.held()["aliases"]


def test_an_undeclared_metric_is_refused(scene: Scene, recorded: Recorded):
    recorded.commit(1, metrics={"loss/typo": 1.0})
    with pytest.raises(ContractError, match="loss/typo"):
        scene.exporter(recorded).export_available()


def test_without_an_address_it_says_what_to_do(scene: Scene, recorded: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="tracking.uri is not set.*rollflow up"):
        Exporter(recorded.store, None, scene.config, scene.run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", scene.uri)
    assert Exporter(recorded.store, None, scene.config, scene.run_id).export_available() == 0


# Exactly once, whatever goes wrong


def lose_two(number: int, fault: str) -> Callable[[int, str, str], str]:
    """Lose request `number` and the next, by which the client repeats it."""
    return lambda at, *_: fault if at in (number, number + 1) else ""


def export_with_faults(scene: Scene, recorded: Recorded, proxy: Proxy, fault: Callable[[int, str, str], str]) -> int:
    """Export through `proxy` with an exporter that dies at the first trouble, and then with another.

    Returns:
        How many requests the first one made.
    """
    proxy.requests.clear()
    proxy.fault = fault
    with suppress(ServiceError):
        scene.exporter(recorded, proxy.url).export_available()
    num_requests = len(proxy.requests)
    proxy.fault = lambda *_: ""
    scene.exporter(recorded, proxy.url).export_available()
    return num_requests


def expect_undisturbed(servers, recorded: Recorded) -> dict[str, Any]:
    undisturbed = Scene(servers)
    undisturbed.exporter(recorded).export_available()
    return undisturbed.held()


@pytest.mark.parametrize("path", ["runs/create", "runs/log-batch", "model-versions/create", "logged-models"])
def test_a_lost_reply_doubles_nothing(servers, recorded: Recorded, proxy: Proxy, path: str):
    recorded.whole_run()
    scene = Scene(servers)
    hits = itertools.count()

    def fault(number: int, method: str, target: str) -> str:
        is_hit = method == "POST" and target.split("?")[0].endswith(path)
        return "lost reply" if is_hit and next(hits) in (2, 3) else ""

    if path == "runs/create":
        hits = itertools.count(2)  # there is but one
    export_with_faults(scene, recorded, proxy, fault)
    assert next(hits) > 3, "the fault did occur"
    assert scene.held() == expect_undisturbed(servers, recorded)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["lost reply", "no reply"])
def test_an_exporter_that_dies_at_any_request_is_taken_over(servers, recorded: Recorded, proxy: Proxy, fault: str):
    recorded.short_run()
    expected = expect_undisturbed(servers, recorded)
    number, num_requests = 0, 1
    while number < num_requests:
        scene = Scene(servers)
        num_requests = max(num_requests, export_with_faults(scene, recorded, proxy, lose_two(number, fault)))
        assert scene.held() == expected, f"after losing request {number}: {proxy.requests[number]}"
        number += 1
    assert number > 30


def test_two_exporters_at_once_tell_everything_once(servers, recorded: Recorded):
    recorded.whole_run()
    scene = Scene(servers)
    exporters = [scene.exporter(recorded) for _ in range(3)]
    threads = [threading.Thread(target=export_loop, args=(e, lambda: True), kwargs={"poll_s": 0.05}) for e in exporters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert scene.exporter(recorded).export_available() == 0
    assert scene.held() == expect_undisturbed(servers, recorded)


def test_a_killed_exporter_is_taken_over(servers, tmp_path: Path, make_commit, proxy: Proxy):
    recorded = Recorded(open_store(str(tmp_path)).at("run"), make_commit)
    recorded.whole_run()
    scene = Scene(servers)
    code = (
        "import sys; from data_contracts.config import RunConfig; from infra.store import open_store;"
        "from infra.tracking import Exporter;"
        "store, uri, config, run_id = sys.argv[1:];"
        "Exporter(open_store(store), uri, RunConfig.model_validate_json(config), run_id).export_available()"
    )
    arguments = [recorded.store.url, proxy.url, scene.config.model_dump_json(), scene.run_id]
    process = subprocess.Popen([sys.executable, "-c", code, *arguments])
    log_batches = itertools.count()

    def kill(number: int, method: str, path: str) -> str:
        if path.endswith("runs/log-batch") and next(log_batches) == 3:  # it carries points
            process.send_signal(signal.SIGKILL)
        return ""

    proxy.fault = kill
    assert process.wait() == -signal.SIGKILL
    scene.exporter(recorded).export_available()
    assert scene.held() == expect_undisturbed(servers, recorded)


def test_a_server_that_was_down_and_came_back_older_is_caught_up_with(servers, scene: Scene, recorded: Recorded):
    recorded.control("start")
    recorded.commit(4)
    exporter = scene.exporter(recorded)
    exporter.export_available()
    database = servers.home / "mlflow" / "mlflow.db"
    yesterday = servers.home / "yesterday.db"
    with closing(sqlite3.connect(database)) as now, closing(sqlite3.connect(yesterday)) as copy:
        now.backup(copy)
    recorded.commit(2)
    recorded.evaluate(5, 0.9)
    exporter.export_available()
    assert scene.points("export/commit")[-1] == (5, 5)

    stop_mlflow(servers.home)
    recorded.commit(1)
    with pytest.raises(ServiceError, match=f"MLflow at {scene.uri} does not answer"):
        exporter.export_available()
    shutil.copy(yesterday, database)
    servers.up()
    assert scene.points("export/commit")[-1] == (3, 3), "the server has forgotten"

    assert exporter.export_available() == 3 + 1
    assert exporter.export_available() == 0
    assert scene.points("reward/mean") == [(v, v / 100) for v in range(7)]
    assert scene.held()["versions"] == ["0", "3", "5", "6"]
    assert scene.held()["aliases"] == {"champion": "5", "candidate": "6"}


def stop_mlflow(home: Path) -> None:
    """Kill the server, and the worker that would answer on."""
    server = services._read_state(home)["mlflow"]
    family = family_of(TOKEN_VARIABLE, {server.token})
    os.killpg(server.pid, signal.SIGKILL)
    psutil.wait_procs(family, timeout=10)


def test_a_server_restored_to_before_the_run_gets_it_anew(scene: Scene, recorded: Recorded):
    recorded.commit(3)
    exporter = scene.exporter(recorded)
    exporter.export_available()
    ((first, _),) = scene.runs()
    with closing(sqlite3.connect(scene.servers.home / "mlflow" / "mlflow.db", timeout=30)) as database:
        for table in ("metrics", "latest_metrics", "params", "tags", "logged_models", "runs"):
            column = "source_run_id" if table == "logged_models" else "run_uuid"
            database.execute(f"delete from {table} where {column} = ?", (first,))
        database.commit()
    assert exporter.export_available() == 3
    ((second, _),) = scene.runs()
    assert second != first
    assert [step for step, _ in scene.points("reward/mean")] == [0, 1, 2]


def test_a_deleted_experiment_is_named(scene: Scene, recorded: Recorded):
    name = f"gone-{uuid4().hex[:6]}"
    tracking = TrackingConfig(experiment=name)
    scene.config = scene.config.model_copy(update={"tracking": tracking, "evaluate": EvaluateConfig()})
    scene.exporter(recorded).export_available()
    with closing(sqlite3.connect(scene.servers.home / "mlflow" / "mlflow.db", timeout=30)) as database:
        database.execute("update experiments set lifecycle_stage = 'deleted' where name = ?", (name,))
        database.commit()
    with pytest.raises(ServiceError, match=f"experiment {name} is deleted there"):
        scene.exporter(recorded).export_available()


# The loop


def test_the_loop_waits_for_the_server_and_says_so_once(
    scene: Scene, recorded: Recorded, proxy: Proxy, caplog: pytest.LogCaptureFixture
):
    recorded.whole_run()
    proxy.fault = lambda *_: "no reply"
    said: list[str] = []

    def wait(_: float) -> None:
        if said.count("waiting for MLflow") == 3:
            proxy.fault = lambda *_: ""

    with caplog.at_level(logging.WARNING, logger="rollflow.export"):
        done = export_loop(
            scene.exporter(recorded, proxy.url),
            lambda: "exporting" in said,
            wait=wait,
            report=said.append,
            poll_s=0.0,
        )
    assert done
    assert said == ["waiting for MLflow"] * 3 + ["exporting"] * 2
    messages = [record.getMessage() for record in caplog.records if record.name == "rollflow.export"]
    assert len(messages) == 2
    assert "does not answer" in messages[0]
    assert messages[1].endswith("answers again; exported 12 records")
    assert scene.runs()[0][1] == "FINISHED"


def test_the_end_waits_for_the_server_no_longer_than_it_may(
    scene: Scene, recorded: Recorded, caplog: pytest.LogCaptureFixture
):
    with caplog.at_level(logging.ERROR, logger="rollflow.export"):
        assert not export_loop(scene.exporter(recorded, "http://127.0.0.1:9"), lambda: True, poll_s=0.01, drain_s=0.02)
    assert any("not everything was exported" in record.getMessage() for record in caplog.records)


def test_while_the_server_is_away_it_is_asked_less_and_less_often(scene: Scene, recorded: Recorded, proxy: Proxy):
    proxy.fault = lambda *_: "no reply"
    polls = itertools.count()
    said: list[str] = []
    exporter = scene.exporter(recorded, proxy.url)
    export_loop(exporter, lambda: next(polls) >= 60, report=said.append, poll_s=0.01, longest_wait_s=0.1, drain_s=0.0)
    # tries after 0, 2, 4, 8 and then 10 polls or fewer, if trying takes long; and one at the end
    assert 2 <= len(said) < 20


def test_processes_that_begin_a_group_at_the_same_moment_agree_on_its_run(servers):
    uri = servers.services.mlflow_url
    start = threading.Barrier(6)

    def begin(_: int) -> str:
        start.wait()
        return ensure_group_run(uri, "a-new-experiment", "a-new-group", {"about": "nothing"})

    with ThreadPoolExecutor(6) as pool:
        first = list(pool.map(begin, range(6)))
    agreed = {ensure_group_run(uri, "a-new-experiment", "a-new-group", {}) for _ in range(2)}
    assert len(agreed) == 1
    assert agreed <= set(first)
