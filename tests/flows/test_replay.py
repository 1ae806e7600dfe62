"""A run trained again from its stored batches gives the same bits, or with another field a run beside it."""

from pathlib import Path

import pytest
import torch

from dashboards.snapshot import snapshot
from data_contracts.errors import ConfigError
from data_contracts.records import Commit, Control, Evaluation
from flows import conduct
from flows.replay import replay
from infra.log import Log
from infra.runs import Run, list_run_ids, load_run
from infra.store import open_store
from tasks.train import GroupUnusable
from tasks.weights import PolicyReader


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def replay_of(run: Run) -> Run:
    root = open_store(str(Path(run.store.url).parent))
    (made,) = [run_id for run_id in list_run_ids(root) if run_id != run.id]
    return load_run(root.at(made).url)


def test_every_version_of_a_finished_run_is_trained_again_to_the_same_bits(finished: Run, capsys) -> None:
    digests = [commit.weights.digest for commit in commits_of(finished)]
    assert len(set(digests)) == len(digests), "every step must have changed the weights, or sameness says nothing"
    before = finished.store.list()
    torch.set_num_threads(2)  # as in a process that nobody told: the run's own number decides
    assert replay(finished, []) == 0
    assert torch.get_num_threads() == finished.config.train.threads
    assert "6 versions trained again from 24 groups" in capsys.readouterr().out
    assert finished.store.list() == before


def test_a_commit_whose_weights_are_not_those_of_its_batches_is_named(finished: Run, capsys) -> None:
    was = commits_of(finished)[4]
    lied = was.model_copy(update={"weights": was.weights.model_copy(update={"digest": "float32:0"})})
    (Path(finished.store.url) / "log/commit/0000000004.json").chmod(0o600)
    (Path(finished.store.url) / "log/commit/0000000004.json").write_text(lied.model_dump_json())
    assert replay(finished, []) == 1
    assert "version 4: expected weights float32:0, trained again they are" in capsys.readouterr().err


def test_a_batch_that_was_altered_ends_the_replay_with_its_name(finished: Run) -> None:
    batch = commits_of(finished)[3].consumed[0].batch
    path = Path(finished.store.url) / batch.key
    path.chmod(0o600)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(GroupUnusable, match=batch.key):
        replay(finished, [])


def test_another_algorithm_on_the_same_data_is_a_run_beside_the_first(finished: Run, capsys) -> None:
    assert replay(finished, ["--algorithm.loss.type", "reinforce", "--train.learning_rate", "0.01"]) == 0
    made = replay_of(finished)
    assert made.replay_of == finished.id
    assert made.config.algorithm.loss.type == "reinforce"
    original, other = commits_of(finished), commits_of(made)
    assert [c.version for c in other] == [c.version for c in original]
    assert [c.consumed for c in other] == [c.consumed for c in original]
    assert other[0].weights == original[0].weights
    assert all(a.weights.digest != b.weights.digest for a, b in zip(original[1:], other[1:], strict=True))
    _, digest = PolicyReader(made.store).weights(6)  # through differences, as they were published
    assert digest == other[6].weights.digest
    assert [e.version for e in Log(made.store, "log/eval", Evaluation).read_from(0)] == [0, 3, 6]
    seen = snapshot(made.store)
    assert seen.state == "finished"
    assert [check.name for check in seen.checks if not check.is_ok] == []
    assert "replays finished with algorithm.loss.type reinforce, train.learning_rate 0.01" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is a replay of finished"):
        conduct.resume(made)


def test_a_kept_replay_without_changes_is_the_same_bits_and_can_be_replayed_itself(finished: Run) -> None:
    assert replay(finished, [], keep=True, evaluate=False) == 0
    made = replay_of(finished)
    digests = [[commit.weights.digest for commit in commits_of(run)] for run in (finished, made)]
    assert digests[0] == digests[1]
    assert replay(made, []) == 0


def test_a_tighter_staleness_bound_takes_the_older_tokens_out_of_the_loss(finished: Run) -> None:
    assert replay(finished, ["--staleness.max_staleness", "0"], evaluate=False) == 0
    made = replay_of(finished)
    excluded = sum(commit.metrics["staleness/excluded_tokens"] for commit in commits_of(made)[1:])
    old = sum(
        count
        for commit in commits_of(finished)[1:]
        for age, count in commit.histograms["staleness/tokens"].items()
        if float(age) > 0
    )
    assert excluded == old > 0


def test_a_stricter_curation_leaves_the_groups_out_that_it_refuses(finished: Run) -> None:
    assert replay(finished, ["--curate.drop_zero_variance", "true"], evaluate=False) == 0
    made = replay_of(finished)
    flat = {
        commit.version: round(commit.metrics["reward/zero_variance_groups"] * 4) for commit in commits_of(finished)[1:]
    }
    assert {commit.version: 4 - len(commit.consumed) for commit in commits_of(made)[1:]} == flat
    assert sum(flat.values()) > 0
    seen = snapshot(made.store)
    assert seen.refused_curation == sum(flat.values())
    assert [check.name for check in seen.checks if not check.is_ok] == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--seed", "1"], "seed: cannot be changed in a replay"),
        (["--rollout.sampling.temperature", "0.5"], "rollout.sampling.temperature: cannot be changed"),
        (["--steps", "7"], "steps: the run has 6"),
        (["--algorithm.loss.no_such_field", "1"], "no_such_field"),
    ],
)
def test_what_the_stored_batches_cannot_answer_is_refused(words: list[str], sentence: str, finished: Run) -> None:
    with pytest.raises(ConfigError, match=sentence):
        replay(finished, words)
    assert list_run_ids(open_store(str(Path(finished.store.url).parent))) == ["finished"]


def test_a_replay_that_breaks_says_so_in_its_own_records(finished: Run) -> None:
    batch = commits_of(finished)[3].consumed[0].batch
    (Path(finished.store.url) / batch.key).unlink()
    with pytest.raises(OSError, match=batch.key):
        replay(finished, ["--train.learning_rate", "0.01"])
    kinds = [record.kind for record in Log(replay_of(finished).store, "log/control", Control).read_from(0)]
    assert kinds == ["start", "fail"]
