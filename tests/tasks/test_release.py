"""What was refused is listed with its reason and fate, and comes back only as the protocol allows."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from dashboards.reconcile import reconcile
from data_contracts import trajectory
from data_contracts.errors import ConfigError
from data_contracts.records import Claim, Commit, Curated, GroupRef, Raw
from flows.quarantine import list_entries, release_entry, show_entry
from infra.log import Log
from infra.objects import get_batch, put_batch
from infra.runs import Run
from tasks.curate import Curator
from tasks.envs.registry import build_envs
from tasks.ledger import Ledger
from tasks.model_files import read_model_files
from tasks.prompts import encode_prompt, tokenizer_from_files
from tasks.quarantine import Entry, find_entry, read_quarantine
from tasks.reward import Judge
from tasks.role import Role

WORKER, NUM_SAMPLES = "worker", 4
STRICT = {"drop_zero_variance": True}


def refuse_some(run: Run, bad: dict[str, object] | None = None) -> None:
    """Let ticket 0 be all wrong (and have `bad` values in its first row), ticket 1 be half right, and curate both."""
    digest = Log(run.store, "log/commit", Commit).read_from(0)[0].weights.digest
    tokenizer, envs = tokenizer_from_files(read_model_files(run.store)), build_envs(run.config.envs, run.config.seed)
    rows = []
    for ticket in (0, 1):
        prompt = envs.prompt_for(ticket)
        right = tokenizer.encode(prompt.answer, add_special_tokens=False)
        wrong = [3 + (token - 2) % 10 for token in right]  # another digit in every place
        for sample in range(NUM_SAMPLES):
            ids = [*(right if ticket == 1 and sample < 2 else wrong), 2]
            row = {
                "ticket": ticket, "attempt": 0, "sample": sample, "prompt_id": prompt.id, "env": "addition", "seed": 0,
                "prompt_ids": encode_prompt(prompt, tokenizer, 16), "response_ids": np.array(ids, np.int32),
                "action_mask": [True] * len(ids), "behavior_logprobs": np.full(len(ids), -0.5, np.float32),
                "policy_versions": np.zeros(len(ids), np.int32), "used_versions": [0], "used_digests": [digest],
                "finish_reason": "stop", "error": "", "temperature": 1.0, "top_p": 1.0, "top_k": 0,
                "max_new_tokens": 4, "engine": "torch", "dtype": "float32", "queued_at": 0.0, "started_at": 0.0,
                "finished_at": 0.0,
            }  # fmt: skip
            rows.append(row | (bad or {} if (ticket, sample) == (0, 0) else {}))
    claim = Claim(
        writer=WORKER, kind="claim", tickets=(0, 1), attempt=0, version=0, curriculum=0,
        deadline=run.config.staleness.bound, next_ticket=2,
    )  # fmt: skip
    Log(run.store, "log/claim", Claim).append(0, claim)
    groups = tuple(
        GroupRef(ticket=t, attempt=0, first_row=t * NUM_SAMPLES, num_rows=NUM_SAMPLES, oldest_version=0) for t in (0, 1)
    )
    batch = put_batch(run.store, trajectory.make_table(rows, "raw"))
    Log(run.store, f"log/raw/{WORKER}", Raw).append(0, Raw(writer=WORKER, batch=batch, groups=groups))
    with Role("reward", run.store, run.config) as role, Judge(role, Ledger(run.store, run.config)) as judge:
        assert judge.turn()
    with Role("curate", run.store, run.config) as role:
        curator = Curator(role, Ledger(run.store, run.config))
        assert curator.read()
        assert curator.settle()


def refused(run: Run) -> Entry:
    (entry,) = [entry for entry in read_quarantine(run.store) if entry.tickets == (0,)]
    return entry


def test_a_released_group_is_trained_once_under_a_new_ticket(begun: Callable[..., Run], processes, capsys) -> None:
    run = begun(staleness={"max_staleness": 1}, curate=STRICT)
    refuse_some(run)
    entry = refused(run)
    assert entry.reason == "zero_variance"
    release_entry(run, entry.id[:8], is_confirmed=False)
    assert Log(run.store, "log/claim", Claim).tail() == 1, "without a yes nothing is written"
    release_entry(run, entry.id[:8], is_confirmed=True)
    assert "it is ticket 2 now, accepted" in capsys.readouterr().out
    verdicts = [v for record in Log(run.store, "log/curated", Curated).read_from(0) for v in record.verdicts]
    assert [(v.ticket, v.accepted) for v in verdicts] == [(0, False), (1, True), (2, True)]
    with pytest.raises(ConfigError, match="has been released already, as ticket 2"):
        release_entry(run, entry.id, is_confirmed=True)

    processes.join(processes.start_all(run, ("train", "rollout", "reward", "curate")))
    consumed = [group for commit in Log(run.store, "log/commit", Commit).read_from(0) for group in commit.consumed]
    tickets = [group.ticket for group in consumed]
    assert len(tickets) == len(set(tickets)) == 24
    assert {1, 2} <= set(tickets)
    assert 0 not in tickets
    group = next(group for group in consumed if group.ticket == 2)
    rows = get_batch(run.store, group.batch, "scored")
    assert rows.column("ticket").to_pylist() == [2] * NUM_SAMPLES
    claim = Log(run.store, "log/claim", Claim).read(1)
    assert claim is not None
    raw = Log(run.store, f"log/raw/{claim.writer}", Raw).read(0)
    assert raw is not None
    assert entry.reference is not None
    assert raw.released_from == {"2": f"ticket 0 in {entry.reference.key}"}
    assert reconcile(run.store, deep=True).contradictions == []
    list_entries(run, Console(width=200))
    assert "released as ticket" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ConfigError, match="nothing more is trained|has been released already"):
        release_entry(run, entry.id, is_confirmed=True)


def test_a_refusal_is_shown_with_its_rule_values_and_rows(begun: Callable[..., Run], capsys) -> None:
    run = begun(curate=STRICT)
    refuse_some(run)
    list_entries(run, Console(width=200))
    assert "zero_variance" in capsys.readouterr().out
    show_entry(run, refused(run).id[:10])
    told = capsys.readouterr().out
    prompt = build_envs(run.config.envs, run.config.seed).prompt_for(0).content
    assert "refused by curation, its place was given away" in told
    assert str(prompt) in told
    with pytest.raises(ConfigError, match="there is no such entry among 1"):
        find_entry(run.store, "ffff")


def test_a_broken_contract_is_shown_row_by_row_and_never_released(begun: Callable[..., Run], capsys) -> None:
    run = begun(curate=STRICT)
    refuse_some(run, {"behavior_logprobs": np.array([-0.5, np.nan, -0.5], np.float32)})
    entry = refused(run)
    assert entry.stage == "reward"
    assert "behavior_logprobs" in entry.evidence["rows"]["0"]
    show_entry(run, entry.id)
    assert "behavior_logprobs" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="it broke its contract and can never be trained"):
        release_entry(run, entry.id, is_confirmed=True)


def test_a_group_whose_tokens_are_too_old_is_not_released(begun: Callable[..., Run], processes) -> None:
    run = begun(staleness={"max_staleness": 1}, curate=STRICT)
    refuse_some(run)
    started = processes.start_all(
        run, ("train", "rollout", "reward", "curate"), ROLLFLOW_CRASH_POINT="train.committed:3"
    )
    processes.join([process for process in started if process.name == "train"])
    processes.kill_all()
    entry = refused(run)
    before = run.store.list("log")
    with pytest.raises(ConfigError, match="too old: sampled by version 0, the next step trains from version 3, and"):
        release_entry(run, entry.id, is_confirmed=True)
    assert run.store.list("log") == before


def test_a_group_comes_back_only_while_a_step_has_room_for_it(begun: Callable[..., Run]) -> None:
    run = begun(staleness={"max_staleness": 0}, deterministic=False, curate=STRICT)
    refuse_some(run)
    claims = Log(run.store, "log/claim", Claim)
    claims.append(
        1,
        Claim(
            writer="other",
            kind="claim",
            tickets=(2, 3, 4),
            attempt=0,
            version=0,
            curriculum=0,
            deadline=0,
            next_ticket=5,
        ),
    )
    with pytest.raises(ConfigError, match="no room: every step that may use version 0 has its groups already"):
        release_entry(run, refused(run).id, is_confirmed=True)


def test_bytes_that_are_gone_are_said_to_be_gone(begun: Callable[..., Run], capsys) -> None:
    run = begun(curate=STRICT)
    refuse_some(run)
    entry = refused(run)
    assert entry.reference is not None
    (Path(run.store.url) / entry.reference.key).unlink()
    show_entry(run, entry.id)
    assert "its bytes cannot be read" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="its bytes cannot be read"):
        release_entry(run, entry.id, is_confirmed=True)
