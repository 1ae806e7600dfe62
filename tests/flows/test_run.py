"""A whole run in real processes: it trains, its records add up, and what was committed can be trained again."""

from collections.abc import Callable

from data_contracts.records import Commit
from infra.log import Log
from infra.runs import Run
from tasks.ledger import Ledger


def commits_of(run: Run) -> list[Commit]:
    return Log(run.store, "log/commit", Commit).read_from(0)


def test_a_run_trains_every_step_and_its_tickets_add_up(make_run: Callable[..., Run], processes) -> None:
    run = make_run()
    started = processes.start_all(run)
    processes.join(started)
    assert [process.exitcode for process in started] == [0] * len(started)
    commits = commits_of(run)
    assert [commit.version for commit in commits] == list(range(run.config.steps + 1))
    tickets = [group.ticket for commit in commits for group in commit.consumed]
    assert tickets == list(range(run.config.steps * run.config.groups_per_step))
    account = Ledger(run.store, run.config).state.account()
    assert account.issued == account.trained + account.refused + account.in_flight
    assert account.in_flight == 0
