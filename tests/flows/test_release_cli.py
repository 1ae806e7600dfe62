"""Refused groups are released on the command line, trained after resume, and everything is in MLflow at the end."""

import json
import re
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient  # noqa: TID251

from data_contracts.records import Audit, Commit
from infra.log import Log
from infra.runs import load_run
from tests.flows.conftest import Deck, wait_until

pytestmark = pytest.mark.slow

CONFIG = """
name = "release"
steps = 400
groups_per_step = 4
samples_per_group = 4
[model]
type = "tiny"
hidden_size = 32
intermediate_size = 64
num_layers = 2
num_heads = 2
warm_start_max_steps = 20
[[envs]]
type = "addition"
max_operand = 9
[staleness]
max_staleness = 8
[curate]
drop_zero_variance = true
[audit]
window_rows = 256
min_rows = 16
[evaluate]
every = 100
num_prompts = 16
"""


def test_released_groups_are_trained_and_the_last_windows_are_in_mlflow(
    deck: Deck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")  # of the tables that commands print
    (tmp_path / "release.toml").write_text(CONFIG)
    store = str(tmp_path / "store")

    def rollflow(*words: str) -> str:
        name = f"command-{len(deck.processes)}"
        assert deck.start(name, "flows.cli", *words, "--store", store).wait() == 0, deck.output(name)
        return deck.output(name)

    running = deck.start("run", "flows.cli", "run", str(tmp_path / "release.toml"), "--id", "one", "--store", store)
    commits = tmp_path / "store/one/log/commit"
    wait_until(lambda: (commits / "0000000012.json").exists() or running.poll() is not None, "version 12")
    rollflow("stop", "one")
    assert running.wait() == 0, deck.output("run")

    run = load_run(f"{store}/one")
    stopped_at = Log(run.store, "log/commit", Commit).tail()
    listed = rollflow("quarantine", "one")
    assert "zero_variance" in listed
    entries = re.findall(r"^│ ([0-9a-f]{12}) │ curate", listed, re.MULTILINE)
    released = 0
    for entry in reversed(entries):  # the newest are the youngest
        assert "would release 4 trajectories" in rollflow("quarantine", "one", "--release", entry)
        assert "accepted; go on with: rollflow resume one" in rollflow("quarantine", "one", "--release", entry, "--yes")
        released += 1
        if released == 2:
            break
    assert released == 2

    running = deck.start("resume", "flows.cli", "resume", "one", "--store", store)
    last = commits / f"{stopped_at + 12:010}.json"
    wait_until(lambda: last.exists() or running.poll() is not None, "12 more versions")
    rollflow("stop", "one")
    assert running.wait() == 0, deck.output("resume")
    told = " ".join(rollflow("quarantine", "one").split())
    assert len(re.findall(r"released as", told)) == 2
    assert "issued" in rollflow("reconcile", "one", "--deep")

    audits = Log(run.store, "log/audit", Audit).read_from(0)
    client = MlflowClient(deck.services.mlflow_url)
    (experiment,) = [e.experiment_id for e in client.search_experiments() if e.name != "Default"]
    (found,) = client.search_runs([experiment])
    artifacts = [file.path for file in client.list_artifacts(found.info.run_id, "data_quality")]
    assert artifacts == [f"data_quality/{number:010}.json" for number in range(len(audits))]
    newest = json.loads(Path(client.download_artifacts(found.info.run_id, artifacts[-1], str(tmp_path))).read_text())
    assert newest["nonce"] == audits[-1].nonce
    for stage in {record.stage for record in audits}:
        rows = client.get_metric_history(found.info.run_id, f"audit/{stage}/rows")
        assert [(m.step, m.value) for m in rows] == [
            (number, record.num_rows) for number, record in enumerate(audits) if record.stage == stage
        ]
    assert (deck.home / "reports" / "one-data-docs" / "index.html").is_file()
