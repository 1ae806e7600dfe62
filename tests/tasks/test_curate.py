"""Verdicts in a run's records: rows left out are not trained on, and what looks back sees committed verdicts only."""

from collections.abc import Callable, Sequence

import pytest

from data_contracts import trajectory
from data_contracts.records import Claim, Consumed, Curated, GroupRef, Scored, Verdict
from infra.log import Log
from infra.objects import get_batch, put_batch
from infra.runs import Run
from tasks.curate import Curator, kind_of
from tasks.ledger import Ledger
from tasks.role import Role
from tasks.train import GroupReader
from tests.tasks.curation.build_group import different, row

WORKER = "worker"
WINDOW = {"rules": [{"type": "duplicates", "window": 8}], "min_samples": 2}


def deliver(run: Run, number: int, tickets: Sequence[int], responses: Sequence[Sequence[Sequence[int]]]) -> None:
    """Claim the tickets and append a scored record with one group for each."""
    digest = Ledger(run.store, run.config).commit(0).weights.digest
    claim = Claim(
        writer=WORKER, kind="claim", tickets=tuple(tickets), attempt=0, version=0, curriculum=0, deadline=0,
        next_ticket=max(tickets) + 1,
    )  # fmt: skip
    assert Log(run.store, "log/claim", Claim).append(number, claim) is None
    rows, groups = [], []
    for ticket, group in zip(tickets, responses, strict=True):
        groups.append(GroupRef(ticket=ticket, attempt=0, first_row=len(rows), num_rows=len(group), oldest_version=0))
        rows += [row(ticket, i, tokens, used_digests=[digest]) for i, tokens in enumerate(group)]
    batch = put_batch(run.store, trajectory.make_table(rows, "scored"))
    record = Scored(writer="judge", rollout=WORKER, batch=batch, groups=tuple(groups))
    assert Log(run.store, f"log/scored/{WORKER}", Scored).append(number, record) is None


def curate(run: Run) -> dict[int, Verdict]:
    """Let a new curate role settle what there is; return all verdicts so far."""
    with Role("curate", run.store, run.config) as role:
        curator = Curator(role, Ledger(run.store, run.config))
        curator.read()
        curator.settle()
    records = Log(run.store, "log/curated", Curated).read_from(0)
    Ledger(run.store, run.config)  # the totals of the records agree with their verdicts, or this raises
    return {verdict.ticket: verdict for record in records for verdict in record.verdicts}


def test_rows_left_out_stay_in_the_batch_and_out_of_the_training(begun: Callable[..., Run]) -> None:
    run = begun(curate={"rules": [{"type": "repetition"}]})
    responses = different(4)
    responses[1] = [3] * 40
    deliver(run, 0, [0], [responses])
    verdict = curate(run)[0]
    assert verdict.accepted
    assert verdict.batch is not None
    assert verdict.group is not None
    assert verdict.group.left_out == (1,)
    assert get_batch(run.store, verdict.batch, "scored").num_rows == 4
    consumed = Consumed(ticket=0, attempt=0, batch=verdict.batch, group=verdict.group)
    samples = GroupReader(Ledger(run.store, run.config)).read(consumed)
    assert [sample.sample for sample in samples] == [0, 2, 3]
    record = Log(run.store, "log/curated", Curated).last()
    assert record is not None
    assert record.metrics["curate/left_out/repetition"] == 1.0
    assert run.store.list("quarantine/curate")


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_window_gives_the_same_verdicts_however_the_groups_arrive(
    max_staleness: int, begun: Callable[..., Run]
) -> None:
    first, second, third = (different(4, seed=seed) for seed in range(3))
    copied = [first[0], first[1], first[2], second[3]]  # every row was said before
    mixed = [third[0], second[1], third[2], third[3]]
    groups = [first, second, copied, mixed]

    together = begun("together", curate=WINDOW, staleness={"max_staleness": max_staleness})
    deliver(together, 0, [0, 1, 2, 3], groups)
    expected = curate(together)
    assert [expected[ticket].accepted for ticket in range(4)] == [True, True, False, True]
    assert expected[2].reason == "too_few_good_rows: expected at least 2, got 0, 4 left out by duplicates"
    assert expected[3].group is not None
    assert expected[3].group.left_out == (1,)

    # One at a time, each settled by a role that has just started and remembers nothing.
    apart = begun("apart", curate=WINDOW, staleness={"max_staleness": max_staleness})
    for ticket, group in enumerate(groups):
        deliver(apart, ticket, [ticket], [group])
        found = curate(apart)
    for ticket in range(4):
        assert found[ticket].accepted == expected[ticket].accepted
        assert found[ticket].reason == expected[ticket].reason
        assert found[ticket].reward_mean == expected[ticket].reward_mean


def test_refusals_are_counted_by_reason(begun: Callable[..., Run]) -> None:
    run = begun(curate=WINDOW)
    (responses,) = [different(4)]
    deliver(run, 0, [0, 1, 2], [responses, responses, responses])
    curate(run)
    record = Log(run.store, "log/curated", Curated).last()
    assert record is not None
    assert record.metrics["curate/refused/too_few_good_rows"] == 2.0
    assert (record.num_accepted, record.num_refused) == (1, 2)


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("too_few_good_rows: expected at least 2, got 1", "too_few_good_rows"),
        ("given_up", "given_up"),
        ("", "no_reason"),
        ("not a name / at all: x", "not_a_name_at_all"),
    ],
)
def test_reasons_become_names_of_metrics(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind
