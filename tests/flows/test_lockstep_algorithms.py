"""Algorithms that keep state beside weights and optimizer, in whole runs: replay, restart and records."""

from pathlib import Path

import pytest

from data_contracts.config import RunConfig
from data_contracts.records import Commit, Scored, decode_record
from flows.lockstep import run_in_lockstep
from flows.replay import replay
from infra.log import Log
from infra.objects import get_batch, get_object
from infra.runs import Run, create_run
from models.trainer import checkpoint_from_bytes
from tasks.ledger import Ledger
from tasks.train import GroupReader
from tasks.training import Training
from tasks.weights import PolicyReader
from tests.harness import TINY, tiny_config


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def play(config: RunConfig) -> Run:
    run = create_run(config, "played")
    for _ in run_in_lockstep(run):
        pass
    return run


VALUED = {
    "ppo_gae": {"preset": "ppo_gae"},
    "dvpo": {"preset": "dvpo", "advantage": {"value": {"warmup_steps": 2}}},
}


@pytest.fixture(scope="module", params=VALUED)
def valued(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return play(tiny_config(str(tmp_path_factory.mktemp("runs")), algorithm=VALUED[request.param]))


def test_a_run_with_a_value_model_is_replayed_to_the_same_bits(valued: Run) -> None:
    assert replay(valued, [], evaluate=False) == 0


def test_a_restart_between_checkpoints_gives_the_same_versions_and_values(valued: Run) -> None:
    ledger, commits = Ledger(valued.store, valued.config), commits_of(valued)
    training = Training(valued.store, valued.config, PolicyReader(valued.store).weights(0)[0])
    assert training.load_checkpoint(valued.store, commits[3])
    groups = GroupReader(ledger)
    for commit in commits[4:]:
        training.step([groups.read(group) for group in commit.consumed], commit.version)
        assert training.digest() == commit.weights.digest
    assert commits[-1].checkpoint
    stored, scalars = checkpoint_from_bytes(get_object(valued.store, commits[-1].checkpoint[0]))
    own, _ = training.trainer.checkpoint_state()
    assert "critic" in scalars
    assert stored.keys() == own.keys()
    assert all((stored[name] == own[name]).all() for name in stored)


def test_values_are_in_checkpoints_and_in_no_published_version(valued: Run) -> None:
    weights, digest = PolicyReader(valued.store).weights(6)
    assert not [name for name in weights if "critic" in name]
    assert digest == commits_of(valued)[6].weights.digest
    assert all("critic/explained_variance" in commit.metrics for commit in commits_of(valued)[1:])


def test_rollouts_keep_closer_while_data_are_bad(tmp_path: Path) -> None:
    adaptive = {"low": 1.0, "high": 1.0}  # no effective sample size is good enough
    run = play(tiny_config(str(tmp_path), steps=14, staleness={"max_staleness": 4, "adaptive": adaptive}))
    commits = commits_of(run)[1:]
    limits = [commit.metrics["staleness/limit"] for commit in commits]
    assert limits == [4.0] * 5 + [2.0] * 3 + [1.0] * 2 + [0.0] * 4
    ages = [commit.metrics["staleness/max"] for commit in commits]
    assert max(ages) == 4
    assert ages[-3:] == [0.0] * 3


def rows_of(run: Run) -> list[dict]:
    scored = [
        record.batch
        for key in run.store.list("log/scored")
        for record in [decode_record(Scored, run.store.get(key))]
        if record.batch is not None
    ]
    return [row for ref in scored for row in get_batch(run.store, ref, "scored").to_pylist()]


@pytest.mark.parametrize("at", ["evenly", "unlikely"])
def test_groups_can_be_rolled_out_as_trees(tmp_path: Path, at: str) -> None:
    run = play(
        tiny_config(
            str(tmp_path),
            samples_per_group=6,
            algorithm={"preset": "branch_grpo"},
            rollout={**TINY["rollout"], "branching": {"trunks": 2, "at": at}},
        )
    )
    rows = rows_of(run)
    by_name = {(row["ticket"], row["sample"]): row for row in rows}
    branches = [row for row in rows if row["branch_of"] >= 0]
    assert len(branches) > 0.4 * len(rows)
    assert len({row["branch_at"] for row in branches}) > 1
    for row in branches:
        trunk, at_token = by_name[row["ticket"], row["branch_of"]], row["branch_at"]
        assert row["response_ids"][:at_token] == trunk["response_ids"][:at_token]
        assert not any(row["action_mask"][:at_token])
        assert all(row["action_mask"][at_token:])
    assert {row["branch_of"] for row in rows if row["sample"] < 2} == {-1}
    assert all(commit.status == "trained" for commit in commits_of(run)[1:])
    assert all(commit.metrics["policy/mismatch_k3"] < 1e-6 for commit in commits_of(run)[1:])
    assert replay(run, [], evaluate=False) == 0


def test_guided_rollouts_are_trained_without_their_guidance(tmp_path: Path) -> None:
    run = play(
        tiny_config(str(tmp_path), algorithm={"preset": "oc_grpo"}, rollout={**TINY["rollout"], "guided_samples": 2})
    )
    rows = rows_of(run)
    assert all(bool(row["guided_prompt_ids"]) == (row["sample"] < 2) for row in rows)
    assert all(len(row["guided_prompt_ids"]) > len(row["prompt_ids"]) for row in rows if row["sample"] < 2)
    prompts = {row["ticket"]: row["prompt_ids"] for row in rows}
    assert all(row["prompt_ids"] == prompts[row["ticket"]] for row in rows)
    commits = commits_of(run)[1:]
    assert all(commit.status == "trained" for commit in commits)
    # the policy has never seen such a prompt: it says other things there, so without it they are weighed less
    assert all(commit.metrics["loss/weight_mean"] < 0.999 for commit in commits)
    # mismatch is measured where sampler and trainer had the same prompt
    assert all(commit.metrics["policy/mismatch_k3"] < 1e-6 for commit in commits)
    assert all(0 < commit.metrics["policy/mismatch_tokens"] < commit.metrics["train/tokens"] for commit in commits)
    assert replay(run, [], evaluate=False) == 0


def test_a_greedy_sample_is_the_baseline_and_not_in_the_loss(tmp_path: Path) -> None:
    run = play(
        tiny_config(str(tmp_path), algorithm={"preset": "remax"}, rollout={**TINY["rollout"], "greedy_sample": True})
    )
    rows = rows_of(run)
    assert [row["temperature"] for row in rows] == [1.0, 1.0, 1.0, 0.0] * (len(rows) // 4)
    greedy = [row for row in rows if row["temperature"] == 0]
    assert all(set(row["behavior_logprobs"]) == {0.0} for row in greedy)
    sampled = {tuple(row["response_ids"]) for row in rows if row["temperature"] > 0}
    assert len(sampled) > len({tuple(row["response_ids"]) for row in greedy})
    commits = commits_of(run)[1:]
    assert all(commit.status == "trained" for commit in commits)
    trained = sum(len(row["response_ids"]) for row in rows if row["temperature"] > 0)
    assert sum(commit.metrics["train/tokens"] for commit in commits) == trained
    mean = [row["reward"] for row in rows if row["temperature"] > 0]
    assert sum(c.metrics["reward/mean"] for c in commits) / len(commits) == pytest.approx(sum(mean) / len(mean))
    assert replay(run, [], evaluate=False) == 0
