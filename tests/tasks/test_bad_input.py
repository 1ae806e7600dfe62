"""Bad data are refused with a reason, wherever they come from; the rest goes on and nothing is half used."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_contracts import trajectory
from data_contracts.records import BatchRef, Claim, Commit, Consumed, Curated, GroupRef, Raw, Scored
from infra.log import Log
from infra.objects import put_batch
from infra.runs import Run
from tasks.curate import Curator
from tasks.envs.registry import build_envs
from tasks.ledger import Ledger
from tasks.model_files import read_model_files
from tasks.prompts import encode_prompt, tokenizer_from_files
from tasks.reward import Judge
from tasks.role import Role
from tasks.train import GroupReader, GroupUnusable

WORKER = "worker"
NUM_SAMPLES = 4


def rows_of(run: Run, ticket: int, **changes: object) -> list[dict[str, object]]:
    """Return good raw rows of one ticket; `changes` replace columns of its first row."""
    digest = Log(run.store, "log/commit", Commit).read_from(0)[0].weights.digest
    prompt = build_envs(run.config.envs, run.config.seed).prompt_for(ticket)
    prompt_ids = encode_prompt(prompt, tokenizer_from_files(read_model_files(run.store)), 16)
    row: dict[str, object] = {
        "ticket": ticket, "attempt": 0, "prompt_id": prompt.id, "env": "addition", "seed": 0,
        "prompt_ids": prompt_ids, "response_ids": np.array([3, 4, 5, 2], np.int32),
        "action_mask": [True] * 4, "behavior_logprobs": np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
        "policy_versions": np.zeros(4, np.int32), "used_versions": [0], "used_digests": [digest],
        "finish_reason": "stop", "error": "", "temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 4,
        "engine": "torch", "dtype": "float32", "queued_at": 0.0, "started_at": 0.0, "finished_at": 0.0,
    }  # fmt: skip
    rows = [{**row, "sample": sample} for sample in range(NUM_SAMPLES)]
    rows[0] |= changes
    return rows


def publish(run: Run, table: pa.Table, tickets: list[int]) -> BatchRef:
    """Claim the tickets and append a raw record whose batch holds `table`."""
    claim = Claim(
        writer=WORKER, kind="claim", tickets=tuple(tickets), attempt=0, version=0, curriculum=0, deadline=0,
        next_ticket=len(tickets),
    )  # fmt: skip
    assert Log(run.store, "log/claim", Claim).append(0, claim) is None
    batch = put_batch(run.store, table)
    groups = [
        GroupRef(ticket=t, attempt=0, first_row=i * NUM_SAMPLES, num_rows=NUM_SAMPLES, oldest_version=0)
        for i, t in enumerate(tickets)
    ]
    Log(run.store, f"log/raw/{WORKER}", Raw).append(0, Raw(writer=WORKER, batch=batch, groups=tuple(groups)))
    return batch


def score_and_curate(run: Run) -> tuple[Scored, Curated]:
    """Let the reward and curate roles do their work on what is there."""
    with Role("reward", run.store, run.config) as role, Judge(role, Ledger(run.store, run.config)) as judge:
        assert judge.turn()
    with Role("curate", run.store, run.config) as role:
        curator = Curator(role, Ledger(run.store, run.config))
        assert curator.read()
        assert curator.settle()
    scored = Log(run.store, f"log/scored/{WORKER}", Scored).last()
    curated = Log(run.store, "log/curated", Curated).last()
    assert scored is not None
    assert curated is not None
    return scored, curated


def alter(run: Run, ref: BatchRef, how: Callable[[bytes], bytes]) -> None:
    """Damage an object behind the store's back."""
    path = Path(run.store.url) / ref.key
    body = path.read_bytes()
    path.chmod(0o600)
    path.write_bytes(how(body))


BAD_ROWS = {
    "NaN log-probability": ({"behavior_logprobs": [-0.1, float("nan"), -0.3, -0.4]}, "behavior_logprobs"),
    "positive log-probability": ({"behavior_logprobs": [-0.1, 0.5, -0.3, -0.4]}, "behavior_logprobs"),
    "a version from the future": (
        {"policy_versions": [0, 0, 0, 7], "used_versions": [0, 7], "used_digests": ["a", "b"]},
        "policy_versions",
    ),
    "a token that the vocabulary lacks": ({"response_ids": [3, 4, 99, 2]}, "response_ids"),
    "columns of different lengths": ({"action_mask": [True] * 3}, "action_mask"),
}


@pytest.mark.parametrize("what", BAD_ROWS)
def test_a_bad_row_refuses_its_group_and_spares_the_others(what: str, begun: Callable[..., Run]) -> None:
    changes, column = BAD_ROWS[what]
    run = begun()
    rows = [*rows_of(run, 0, **changes), *rows_of(run, 1)]
    publish(run, trajectory.make_table(rows, "raw"), [0, 1])
    scored, curated = score_and_curate(run)
    assert list(scored.refused) == ["0"]
    assert column in scored.refused["0"]
    verdicts = {verdict.ticket: verdict for verdict in curated.verdicts}
    assert not verdicts[0].accepted
    assert column in verdicts[0].reason
    assert verdicts[1].accepted
    assert any(key.startswith("quarantine/reward/") for key in run.store.list("quarantine"))


def without_column(table: pa.Table) -> pa.Table:
    return table.drop_columns(["behavior_logprobs"])


def without_units(table: pa.Table) -> pa.Table:
    return table.replace_schema_metadata(None)


@pytest.mark.parametrize("how", [without_column, without_units])
def test_a_batch_of_another_schema_is_refused_whole(
    how: Callable[[pa.Table], pa.Table], begun: Callable[..., Run]
) -> None:
    run = begun()
    publish(run, how(trajectory.make_table(rows_of(run, 0), "raw")), [0])
    scored, curated = score_and_curate(run)
    assert scored.batch is None
    assert "trajectory/raw" in scored.refused["0"]
    assert [verdict.accepted for verdict in curated.verdicts] == [False]


def torn(body: bytes) -> bytes:
    return body[: len(body) // 2]


def flipped(body: bytes) -> bytes:
    middle = len(body) // 2
    return body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]


@pytest.mark.parametrize("how", [torn, flipped])
def test_a_torn_or_altered_raw_batch_is_refused_whole(how: Callable[[bytes], bytes], begun: Callable[..., Run]) -> None:
    run = begun()
    ref = publish(run, trajectory.make_table(rows_of(run, 0), "raw"), [0])
    alter(run, ref, how)
    scored, curated = score_and_curate(run)
    assert scored.batch is None
    assert "unreadable" in scored.refused["0"]
    assert [verdict.accepted for verdict in curated.verdicts] == [False]


@pytest.mark.parametrize("how", [torn, flipped])
def test_a_batch_altered_after_acceptance_is_refused_by_the_trainer(
    how: Callable[[bytes], bytes], begun: Callable[..., Run]
) -> None:
    run = begun()
    publish(run, trajectory.make_table(rows_of(run, 0), "raw"), [0])
    _, curated = score_and_curate(run)
    verdict = curated.verdicts[0]
    assert verdict.batch is not None
    assert verdict.group is not None
    alter(run, verdict.batch, how)
    with pytest.raises(GroupUnusable, match=r"batch/") as caught:
        GroupReader(Ledger(run.store, run.config)).read(
            Consumed(ticket=0, attempt=0, batch=verdict.batch, group=verdict.group)
        )
    assert caught.value.reason == "unreadable"


def test_tokens_of_other_weights_than_the_committed_ones_are_refused_by_the_trainer(begun: Callable[..., Run]) -> None:
    run = begun()
    publish(run, trajectory.make_table(rows_of(run, 0, used_digests=["float32:0"]), "raw"), [0])
    _, curated = score_and_curate(run)
    verdict = curated.verdicts[0]
    assert verdict.batch is not None
    assert verdict.group is not None
    with pytest.raises(GroupUnusable, match="float32:0") as caught:
        GroupReader(Ledger(run.store, run.config)).read(
            Consumed(ticket=0, attempt=0, batch=verdict.batch, group=verdict.group)
        )
    assert caught.value.reason == "digest"
