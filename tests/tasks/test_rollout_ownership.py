"""A worker works on its own tickets only, and goes in order when it is asked to."""

import time
from collections.abc import Callable

from data_contracts.protocol import Lease, decide_reclaim
from data_contracts.records import Claim, Raw
from infra.heartbeats import read_heartbeats
from infra.log import Log
from infra.runs import Run
from tasks.ledger import Ledger
from tasks.role import Role, append_control
from tasks.rollout import Worker

LONG = {"rollout": {"sampling": {"max_new_tokens": 11}}, "envs": [{"type": "addition", "max_operand": 9}]}


def raws_of(run: Run, writer: str) -> list[Raw]:
    return Log(run.store, f"log/raw/{writer}", Raw).read_from(0)


def turn_until(worker: Worker, is_there: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 60
    while not is_there():
        assert time.monotonic() < give_up
        worker.turn()


def test_a_worker_stops_sampling_what_another_has_taken_over_and_counts_it(begun: Callable[..., Run]) -> None:
    run = begun(**LONG)
    with Role("rollout", run.store, run.config) as role:
        worker = Worker(role, Ledger(run.store, run.config))
        worker.turn()
        (claim,) = Log(run.store, "log/claim", Claim).read_from(0)
        other = Ledger(run.store, run.config)
        taken = decide_reclaim(other.state, "other", [Lease(t, 0) for t in claim.tickets[:2]], version=0)
        assert taken is not None
        assert other.append(taken)
        time.sleep(run.store.pacing[0])
        worker.turn()
        assert worker.num_open <= len(claim.tickets) - 2
        turn_until(worker, lambda: worker.is_idle)
        delivered = {group.ticket for record in raws_of(run, role.writer) for group in record.groups}
        assert delivered == set(claim.tickets[2:])
        counted = [record.metrics for record in raws_of(run, role.writer)]
        assert sum(metrics.get("aborted_groups", 0.0) for metrics in counted) == 2
        assert sum(metrics.get("aborted_tokens", 0.0) for metrics in counted) >= 2 * run.config.samples_per_group

        append_control(run.store, "test", "dead", target="other")
        turn_until(worker, lambda: len(raws_of(run, role.writer)) > len(counted) and worker.is_idle)
        last = raws_of(run, role.writer)[-1].groups
        assert {(group.ticket, group.attempt) for group in last} == {(ticket, 2) for ticket in claim.tickets[:2]}


def test_a_worker_that_is_asked_to_leave_delivers_what_it_holds_and_claims_no_more(begun: Callable[..., Run]) -> None:
    run = begun(staleness={"max_staleness": 1})
    with Role("rollout", run.store, run.config) as role:
        worker = Worker(role, Ledger(run.store, run.config))
        worker.turn()
        assert not worker.is_over()
        role.is_finishing = True
        while not worker.is_over():
            worker.turn()
        worker.publish()
        claims = Log(run.store, "log/claim", Claim).read_from(0)
        delivered = sorted(group.ticket for record in raws_of(run, role.writer) for group in record.groups)
        assert len(claims) == 1, "there was room for twice as many"
        assert delivered == list(claims[0].tickets)
    (beat,) = read_heartbeats(run.store, "rollout")
    assert beat.done
