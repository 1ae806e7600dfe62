"""The protocol's decisions, one by one, on states that a few records make."""

import pytest

from data_contracts.config import RunConfig, StalenessConfig
from data_contracts.errors import ProtocolError
from data_contracts.protocol import (
    Finished,
    Judged,
    Lease,
    Recover,
    Refuse,
    Replaced,
    Rules,
    RunState,
    Train,
    Wait,
    choose_groups,
    decide_claim,
    decide_rebase,
    decide_reclaim,
    decide_refuse,
    decide_start,
    decide_verdicts,
    followed,
    owned,
    room,
)
from data_contracts.records import BatchRef, Claim, Commit, Curated, GroupRef, PolicyRef, Record, Refused, Verdict

WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)


def make_rules(**fields) -> Rules:
    return Rules(**{"groups_per_step": 2, "steps": 10, "max_staleness": 1, "claim_block": 100, **fields})


class Run:
    """A state, and the records that led to it, made by the decisions themselves where they decide."""

    def __init__(self, **rules) -> None:
        self.state = RunState(make_rules(**rules))
        self.commit()
        self.start("trainer")

    def put(self, record: Record | None) -> Record:
        assert record is not None
        log = {Claim: "claim", Curated: "curated", Refused: "refused", Commit: "commit"}[type(record)]
        self.state.apply(log, self.state.next[log], record)
        return record

    def start(self, trainer: str) -> None:
        self.put(decide_start(self.state, trainer))

    def claim(self, num: int, version: int | None = None, writer: str = "worker") -> None:
        version = self.state.version if version is None else version
        record = decide_claim(self.state, writer, version=version, curriculum=version, limit=num)
        assert record is not None and len(record.tickets) == num
        self.put(record)

    def settle(self, *tickets: int, accepted: bool = True, oldest: int | None = None, attempt: int = 0) -> None:
        verdicts = tuple(self.verdict(n, accepted, oldest, attempt) for n in tickets)
        self.put(Curated(writer="curator", verdicts=verdicts, covers={}, num_accepted=0, num_refused=0))

    def verdict(self, ticket: int, accepted: bool = True, oldest: int | None = None, attempt: int = 0) -> Verdict:
        oldest = self.state.tickets[ticket].floor if oldest is None else oldest
        return Verdict(
            ticket=ticket,
            accepted=accepted,
            attempt=attempt,
            batch=BatchRef(key=f"batch/{ticket}.{attempt}", num_bytes=1, sha256="", num_rows=1),
            group=GroupRef(ticket=ticket, attempt=attempt, first_row=0, num_rows=1, oldest_version=oldest),
        )

    def commit(self, **changes) -> None:
        version = self.state.version + 1
        if version == 0:
            fields = {"version": 0, "consumed": (), "num_trained": 0, "status": "initial"}
        else:
            choice = self.choose()
            assert isinstance(choice, Train), choice
            fields = {**choice._asdict(), "status": "trained"}
        fields = {**fields, **changes}
        self.put(Commit(writer="trainer", weights=WEIGHTS, checkpoint_version=0, num_tokens=0, **fields))

    def choose(self) -> object:
        return choose_groups(self.state, "trainer")

    def step(self) -> None:
        """One commit with fresh groups."""
        first = self.state.next_ticket
        self.claim(2)
        self.settle(first, first + 1)
        self.commit()

    def reclaim(self, ticket: int, writer: str, attempt: int = 0) -> None:
        lost = [Lease(ticket, attempt)]
        self.put(decide_reclaim(self.state, writer, lost, version=self.state.version))


# --- rules ---


def test_rules_come_from_the_config():
    config = RunConfig(
        steps=7, groups_per_step=3, staleness=StalenessConfig(max_staleness=2, max_unsettled=9, stragglers="drop")
    )
    rules = Rules.of(config)
    assert rules == Rules(3, 7, 2, 9, 3, 32, False, "drop")
    assert Rules.of(RunConfig(staleness=StalenessConfig(max_staleness=0))).deterministic


# --- admission ---


@pytest.mark.parametrize(("eta", "places"), [(0, 2), (1, 4), (2, 6), (4, 10), (None, 20)])
def test_room_at_the_start_is_that_of_the_steps_up_to_the_deadline(eta, places):
    run = Run(max_staleness=eta, max_unsettled=20 if eta is None else None)
    assert room(run.state, 0) == places
    run.claim(places)
    assert decide_claim(run.state, "other", version=0, curriculum=0) is None


def test_a_commit_makes_room_for_a_step_only_for_those_who_hold_its_weights():
    run = Run(max_staleness=1)
    run.claim(4)
    run.settle(0, 1)
    run.commit()
    assert (room(run.state, 0), room(run.state, 1)) == (0, 2)
    claim = decide_claim(run.state, "w", version=1, curriculum=0)
    assert claim is not None
    assert (claim.tickets, claim.version, claim.curriculum, claim.deadline, claim.next_ticket) == ((4, 5), 1, 0, 2, 6)


def test_a_refused_ticket_makes_room_at_once_by_whomever_it_was_refused():
    run = Run(max_staleness=0)
    run.claim(2)
    run.settle(0, accepted=False)
    assert room(run.state, 0) == 1
    run.put(decide_refuse(run.state, "trainer", [0, 1], "timeout"))
    assert room(run.state, 0) == 2, "ticket 0 counts once"


def test_claims_end_where_the_remaining_steps_need_no_more():
    run = Run(steps=2, max_staleness=4)
    assert room(run.state, 0) == 4
    run.claim(4)
    run.settle(0, 1, 2, accepted=False)
    assert room(run.state, 0) == 3


def test_no_more_than_max_unsettled_are_in_flight():
    run = Run(max_staleness=None, max_unsettled=3)
    run.claim(3)
    run.settle(0, 1)
    assert room(run.state, 0) == 0, "accepted groups still wait"
    run.commit()
    assert room(run.state, 1) == 2


def test_a_claim_is_a_block_or_what_the_worker_can_take():
    run = Run(max_staleness=4, claim_block=3)
    claim = decide_claim(run.state, "w", version=0, curriculum=0)
    assert claim is not None and len(claim.tickets) == 3
    claim = decide_claim(run.state, "w", version=0, curriculum=0, limit=2)
    assert claim is not None and len(claim.tickets) == 2
    assert decide_claim(run.state, "w", version=0, curriculum=0, limit=0) is None


@pytest.mark.parametrize("version", [-1, 1])
def test_nobody_holds_a_version_that_does_not_exist(version):
    run = Run()
    with pytest.raises(ProtocolError, match=f"version {version} is not among the commits 0..0"):
        decide_claim(run.state, "w", version=version, curriculum=0)
    with pytest.raises(ProtocolError, match=f"version {version} is not among the commits 0..0"):
        decide_claim(run.state, "w", version=0, curriculum=version)


# --- views that lag ---


def test_nothing_is_decided_in_a_view_that_lags_behind_what_others_knew():
    run = Run()
    run.step()
    run.claim(1)
    view = RunState(run.state.rules)
    late = RunState(run.state.rules)
    claims = [(0, (0, 1), 0, 2), (1, (2,), 1, 3)]
    for number, tickets, version, end in claims:
        record = Claim(
            writer="w",
            kind="claim",
            tickets=tickets,
            attempt=0,
            version=version,
            curriculum=0,
            deadline=1,
            next_ticket=end,
        )
        view.apply("claim", number, record)
    assert view.behind() == ["commit"]
    assert late.behind() == []
    for decide in (
        lambda: decide_claim(view, "w", version=0, curriculum=0),
        lambda: decide_reclaim(view, "w", [], version=0),
        lambda: decide_rebase(view, "w", [], version=0),
        lambda: decide_verdicts(view, "w", []),
        lambda: decide_start(view, "w"),
        lambda: decide_refuse(view, "w", [], "timeout"),
        lambda: choose_groups(view, "w"),
    ):
        with pytest.raises(ProtocolError, match=r"lags behind in \['commit'\]"):
            decide()


def test_a_commit_tells_a_view_to_read_the_other_logs_as_far_as_its_trainer_had():
    run = Run()
    run.step()
    commits = RunState(run.state.rules)
    commits.apply("commit", 0, Commit(writer="t", weights=WEIGHTS, checkpoint_version=0, num_tokens=0, **INITIAL))
    consumed = tuple(c for c in CONSUMED)
    positions = {"claim": 1, "curated": 1, "refused": 1, "commit": 1}
    commits.apply(
        "commit",
        1,
        Commit(
            writer="t",
            version=1,
            status="trained",
            consumed=consumed,
            num_trained=2,
            positions=positions,
            weights=WEIGHTS,
            checkpoint_version=0,
            num_tokens=0,
        ),
    )
    assert commits.behind() == ["claim", "curated", "refused"]
    assert commits.account() == (0, 0, 0, 0), "the tickets are not known to be issued yet"


INITIAL = {"version": 0, "status": "initial", "consumed": (), "num_trained": 0}
CONSUMED = [
    {
        "ticket": n,
        "attempt": 0,
        "batch": {"key": "", "num_bytes": 0, "sha256": "", "num_rows": 1},
        "group": {"ticket": n, "attempt": 0, "first_row": 0, "num_rows": 1},
    }
    for n in (0, 1)
]


# --- attempts ---


def test_a_lost_ticket_is_taken_over_with_its_prompt_and_its_deadline():
    run = Run(max_staleness=2)
    run.claim(1)
    run.step()
    claim = decide_reclaim(run.state, "other", [Lease(0, 0)], version=1)
    assert claim is not None
    assert (claim.kind, claim.tickets, claim.attempt, claim.curriculum) == ("reclaim", (0,), 1, 0)
    run.put(claim)
    ticket = run.state.tickets[0]
    assert (ticket.owner, ticket.writers, run.state.deadline(ticket)) == ("other", ["worker", "other"], 2)
    assert [t.number for t in owned(run.state, "other")] == [0]
    assert owned(run.state, "worker") == []


def test_only_the_attempt_whose_lease_was_lost_is_taken_over():
    run = Run()
    run.claim(1)
    run.reclaim(0, "second")
    assert decide_reclaim(run.state, "third", [Lease(0, 0)], version=0) is None
    assert decide_reclaim(run.state, "third", [Lease(0, 1), Lease(0, 1)], version=0) is not None
    assert decide_reclaim(run.state, "third", [Lease(7, 0)], version=0) is None


def test_the_first_takeover_in_the_log_has_the_attempt():
    run = Run()
    run.claim(1)
    rival = decide_reclaim(run.state, "rival", [Lease(0, 0)], version=0)
    run.reclaim(0, "second")
    run.put(rival)
    assert run.state.tickets[0].writers == ["worker", "second"]


def test_older_weights_cannot_take_over_and_would_be_noticed():
    run = Run(max_staleness=1)
    run.step()
    run.claim(1)
    assert decide_reclaim(run.state, "old", [Lease(2, 0)], version=0) is None
    claim = decide_reclaim(run.state, "old", [Lease(2, 0)], version=1)
    assert claim is not None
    with pytest.raises(ProtocolError, match="takes over ticket 2 with version 0, expected at least 1"):
        run.put(claim.model_copy(update={"version": 0}))


def test_a_takeover_speaks_of_one_attempt_and_one_curriculum_state_at_a_time():
    run = Run(max_staleness=4)
    run.claim(2)
    run.reclaim(1, "second")
    run.step()
    run.claim(1)
    lost = [Lease(0, 0), Lease(1, 1), Lease(4, 0)]
    seen = []
    while (claim := decide_reclaim(run.state, "w", lost, version=1)) is not None:
        run.put(claim)
        seen.append((claim.tickets, claim.attempt, claim.curriculum))
    assert seen == [((0,), 1, 0), ((1,), 2, 0), ((4,), 1, 1)]


def test_a_takeover_takes_no_more_than_the_worker_can():
    run = Run(max_staleness=4)
    run.claim(5)
    lost = [Lease(n, 0) for n in range(5)]
    claim = decide_reclaim(run.state, "w", lost, version=0, limit=2)
    assert claim is not None and claim.tickets == (0, 1)
    assert decide_reclaim(run.state, "w", lost, version=0, limit=0) is None


def test_a_ticket_is_given_up_after_its_last_attempt_and_curation_refuses_it():
    run = Run(max_attempts=2, max_staleness=0)
    run.claim(2)
    run.reclaim(0, "second")
    claim = decide_reclaim(run.state, "third", [Lease(0, 1)], version=0, limit=0)
    assert claim is not None and (claim.kind, claim.tickets) == ("give_up", (0,))
    run.put(claim)
    assert owned(run.state, "second") == []
    assert decide_reclaim(run.state, "third", [Lease(0, 1)], version=0) is None
    curated = decide_verdicts(run.state, "curator", [])
    assert curated is not None and (curated.num_accepted, curated.num_refused) == (0, 1)
    assert [(v.ticket, v.accepted, v.reason) for v in curated.verdicts] == [(0, False, "given_up")]
    run.put(curated)
    assert room(run.state, 0) == 1


def test_a_result_in_hand_is_better_than_giving_up():
    run = Run(max_attempts=1)
    run.claim(1)
    run.put(decide_reclaim(run.state, "w", [Lease(0, 0)], version=0))
    judged = [Judged("worker", 0, (run.verdict(0),))]
    curated = decide_verdicts(run.state, "curator", judged)
    assert curated is not None and [v.accepted for v in curated.verdicts] == [True]


# --- interruption ---


def slow_ticket(stragglers: str) -> Run:
    """eta = 1, B = 2: ticket 0 is unfinished, its step is the next one, and two others are ready."""
    run = Run(max_staleness=1, stragglers=stragglers)
    run.claim(3)
    run.settle(1, 2)
    run.commit()
    run.claim(2)
    run.settle(3, 4)
    return run


def test_a_ticket_that_holds_training_up_is_moved_to_newer_weights():
    run = slow_ticket("interrupt")
    assert run.choose() == Wait("deadlines", (0,))
    assert decide_rebase(run.state, "worker", [], version=1) is None, "it is finished"
    assert decide_rebase(run.state, "other", [0], version=1) is None, "it is another's"
    assert decide_rebase(run.state, "worker", [0], version=0) is None, "these weights are no newer"
    rebase = decide_rebase(run.state, "worker", [0], version=1)
    assert rebase is not None and (rebase.kind, rebase.tickets, rebase.version) == ("rebase", (0,), 1)
    run.put(rebase)
    assert run.state.deadline(run.state.tickets[0]) == 2
    assert isinstance(run.choose(), Train)
    assert decide_rebase(run.state, "worker", [0], version=1) is None


@pytest.mark.parametrize("stragglers", ["wait", "drop"])
def test_nothing_is_moved_unless_stragglers_are_to_be_interrupted(stragglers):
    assert decide_rebase(slow_ticket(stragglers).state, "worker", [0], version=1) is None


def test_nothing_is_moved_while_training_lacks_groups():
    run = Run(max_staleness=1, stragglers="interrupt")
    run.claim(3)
    run.settle(1, 2)
    run.commit()
    run.claim(1)
    run.settle(3)
    assert run.choose() == Wait("groups", (0,))
    assert decide_rebase(run.state, "worker", [0], version=1) is None


def test_a_rebase_by_a_former_owner_changes_nothing():
    run = slow_ticket("interrupt")
    rebase = decide_rebase(run.state, "worker", [0], version=1)
    run.reclaim(0, "second")
    run.put(rebase)
    assert run.state.tickets[0].floor == 0


def test_results_of_attempts_before_a_rebase_come_too_late():
    run = slow_ticket("interrupt")
    run.reclaim(0, "second")
    run.put(decide_rebase(run.state, "second", [0], version=1))
    old = Judged("worker", 0, (run.verdict(0, oldest=0, attempt=0),))
    curated = decide_verdicts(run.state, "curator", [old])
    assert curated is not None and curated.verdicts == () and curated.covers == {"worker": 1}
    assert [(g.ticket, g.attempt) for g in curated.late] == [(0, 0)]
    new = Judged("second", 0, (run.verdict(0, oldest=0, attempt=1),))
    curated = decide_verdicts(run.state, "curator", [old, new])
    assert curated is not None and [v.attempt for v in curated.verdicts] == [1]
    run.put(curated)
    assert run.state.deadline(run.state.tickets[0]) == 2, "tokens before the rebase are out of the loss"


def test_a_result_that_could_not_be_judged_settles_whichever_attempt_it_was():
    run = slow_ticket("interrupt")
    run.reclaim(0, "second")
    run.put(decide_rebase(run.state, "second", [0], version=1))
    unreadable = Verdict(ticket=0, accepted=False, reason="unreadable")  # of which attempt cannot be read either
    curated = decide_verdicts(run.state, "curator", [Judged("second", 0, (unreadable,))])
    assert curated is not None and [v.accepted for v in curated.verdicts] == [False]


# --- curation ---


def test_the_first_result_settles_a_ticket_and_others_are_recorded_as_late():
    run = Run()
    run.claim(3)
    run.reclaim(0, "second")
    judged = [
        Judged("second", 0, (run.verdict(0, attempt=1),)),
        Judged("worker", 0, (run.verdict(0), run.verdict(1, accepted=False))),
    ]
    curated = decide_verdicts(run.state, "curator", judged)
    assert curated is not None
    assert [(v.ticket, v.attempt, v.accepted) for v in curated.verdicts] == [(0, 1, True), (1, 0, False)]
    assert [(g.ticket, g.attempt) for g in curated.late] == [(0, 0)]
    assert curated.covers == {"second": 1, "worker": 1}
    assert (curated.num_accepted, curated.num_refused) == (1, 1)
    run.put(curated)
    assert decide_verdicts(run.state, "curator", judged) is None, "everything is covered"
    assert followed(run.state) == {"worker": 1}, "only ticket 2 is waited for"


def test_verdicts_come_in_the_order_in_which_results_arrived():
    run = Run(max_attempts=1)
    run.claim(4)
    run.put(decide_reclaim(run.state, "w", [Lease(0, 0)], version=0))
    judged = [Judged("worker", 0, (run.verdict(3), run.verdict(1))), Judged("worker", 1, (run.verdict(2),))]
    curated = decide_verdicts(run.state, "curator", judged)
    assert curated is not None and [v.ticket for v in curated.verdicts] == [3, 1, 2, 0]


def test_results_of_tickets_that_the_trainer_refused_are_late():
    run = Run()
    run.claim(2)
    run.put(decide_refuse(run.state, "trainer", [0], "timeout"))
    curated = decide_verdicts(run.state, "curator", [Judged("worker", 0, (run.verdict(0), run.verdict(1)))])
    assert curated is not None
    assert [v.ticket for v in curated.verdicts] == [1]
    assert [g.ticket for g in curated.late] == [0]


def test_a_result_whose_claim_is_unknown_waits():
    run = Run()
    run.claim(1)
    unknown = Verdict(ticket=5, accepted=True)
    judged = [Judged("worker", 0, (run.verdict(0), unknown)), Judged("other", 0, (unknown,))]
    curated = decide_verdicts(run.state, "curator", judged)
    assert curated is not None
    assert [v.ticket for v in curated.verdicts] == [0]
    assert curated.covers == {}


def test_deterministic_verdicts_come_in_ticket_order_only():
    run = Run(deterministic=True)
    run.claim(4)
    judged = [Judged("worker", 0, (run.verdict(3), run.verdict(2))), Judged("worker", 1, (run.verdict(0),))]
    first = decide_verdicts(run.state, "curator", judged)
    assert first is not None and [v.ticket for v in first.verdicts] == [0]
    assert first.covers == {}, "record 0 is not dealt with, so record 1 cannot be covered"
    run.put(first)
    assert decide_verdicts(run.state, "curator", judged) is None
    judged.append(Judged("worker", 2, (run.verdict(1),)))
    second = decide_verdicts(run.state, "curator", judged)
    assert second is not None and [v.ticket for v in second.verdicts] == [1, 2, 3]
    assert second.covers == {"worker": 3}
    assert second.late == (), "ticket 0 is settled by this very result"


def test_in_ticket_order_tickets_that_are_settled_otherwise_are_not_waited_for():
    run = Run(deterministic=True, max_attempts=1)
    run.claim(3)
    run.put(decide_refuse(run.state, "trainer", [0], "timeout"))
    run.put(decide_reclaim(run.state, "w", [Lease(1, 0)], version=0))
    curated = decide_verdicts(run.state, "curator", [Judged("worker", 0, (run.verdict(2),))])
    assert curated is not None
    assert [(v.ticket, v.accepted) for v in curated.verdicts] == [(1, False), (2, True)]


def test_a_gap_in_a_writers_records_is_not_covered():
    run = Run()
    run.claim(3)
    curated = decide_verdicts(run.state, "curator", [Judged("worker", 1, (run.verdict(0),))])
    assert curated is not None and curated.covers == {} and [v.ticket for v in curated.verdicts] == [0]


def test_a_writer_is_followed_while_any_of_its_attempts_may_still_count():
    run = Run()
    run.claim(1)
    run.claim(1, writer="other")
    run.reclaim(0, "second")
    assert followed(run.state) == {"other": 0, "second": 0, "worker": 0}
    run.settle(0, attempt=1)
    assert followed(run.state) == {"other": 0}


# --- training ---


def test_groups_are_trained_earliest_deadline_first():
    run = Run(max_staleness=2)
    run.claim(2)
    run.step()
    run.claim(2)
    run.settle(4, 5, 1, 0)
    choice = run.choose()
    assert isinstance(choice, Train)
    assert [(c.ticket, c.deadline) for c in choice.consumed] == [(0, 2), (1, 2)]
    assert (choice.version, choice.num_trained) == (2, 4)
    assert choice.positions == {**run.state.next}


def test_training_waits_for_groups():
    run = Run()
    assert run.choose() == Wait("groups", ())
    run.claim(3)
    run.settle(1)
    assert run.choose() == Wait("groups", (0, 2))


def test_training_waits_for_a_group_whose_last_step_it_is():
    run = slow_ticket("wait")
    assert run.choose() == Wait("deadlines", (0,))
    run.settle(0)
    choice = run.choose()
    assert isinstance(choice, Train) and [c.ticket for c in choice.consumed] == [0, 3]


def test_training_waits_in_time_for_more_groups_than_the_last_step_has_places():
    run = Run(max_staleness=2)
    run.claim(5)
    run.settle(0, 1)
    run.commit()  # 2, 3, 4 are due at step 2 and fit into the places of steps 1 and 2
    run.claim(2)
    run.settle(5, 6)
    assert run.choose() == Wait("deadlines", (2, 3, 4)), "only two of them would fit into step 2"
    run.settle(3)
    choice = run.choose()
    assert isinstance(choice, Train) and [c.ticket for c in choice.consumed] == [3, 5]


def test_dropping_names_the_fewest_that_let_training_go_on():
    run = slow_ticket("drop")
    assert run.choose() == Refuse((0,), "dropped")
    run.put(decide_refuse(run.state, "trainer", [0], "dropped"))
    choice = run.choose()
    assert isinstance(choice, Train) and [c.ticket for c in choice.consumed] == [3, 4]


def test_the_most_urgent_are_dropped_first_and_no_more_than_need_be():
    run = Run(max_staleness=2, stragglers="drop")
    run.claim(6)
    run.settle(4, 5)
    run.commit()
    run.claim(2)
    run.settle(6, 7)  # 0..3 are due at step 2, which has two places, and 6, 7 are ready
    assert run.choose() == Refuse((0, 1), "dropped")
    run.put(decide_refuse(run.state, "trainer", [0], "dropped"))
    assert run.choose() == Refuse((1,), "dropped")
    run.put(decide_refuse(run.state, "trainer", [1], "dropped"))
    choice = run.choose()
    assert isinstance(choice, Train) and [c.ticket for c in choice.consumed] == [6, 7]


def test_those_with_a_later_deadline_are_not_dropped_for_the_sake_of_others():
    run = Run(max_staleness=3, stragglers="drop")
    run.claim(7)
    run.settle(5, 6)
    run.commit()
    run.claim(2)
    run.settle(4, 7)
    run.commit()
    run.claim(3)
    run.settle(9, 10)  # left behind: 0..3 due at step 3 with two places, 8 due at 4, 11 due at 5
    assert run.choose() == Refuse((0, 1), "dropped")


def test_nothing_is_dropped_while_it_would_not_help():
    run = Run(max_staleness=0, stragglers="drop")
    run.claim(2)
    run.settle(0)
    assert run.choose() == Wait("groups", (1,))


def test_the_last_steps_take_what_is_there():
    run = Run(steps=1, max_staleness=4)
    run.claim(2)
    run.settle(0, 1)
    run.commit()
    assert run.state.is_finished
    assert run.choose() == Finished()
    assert decide_claim(run.state, "w", version=1, curriculum=1) is None


def test_without_a_bound_the_oldest_tickets_go_first():
    run = Run(max_staleness=None, max_unsettled=8)
    run.claim(6)
    run.settle(5, 3, 4)
    choice = run.choose()
    assert isinstance(choice, Train) and [(c.ticket, c.deadline) for c in choice.consumed] == [(3, None), (4, None)]


def test_a_result_of_newer_weights_gives_a_settled_group_more_time():
    run = slow_ticket("wait")
    run.settle(0, oldest=1)
    assert run.state.deadline(run.state.tickets[0]) == 2


def test_tokens_older_than_the_claim_promised_are_refused():
    run = Run(max_staleness=1)
    run.step()
    run.claim(2)
    run.settle(2, oldest=0)
    assert run.choose() == Refuse((2,), "contract")


def test_groups_without_a_sampled_token_keep_the_deadline_of_their_claim():
    run = Run()
    run.claim(2)
    run.settle(0, 1, oldest=-1)
    choice = run.choose()
    assert isinstance(choice, Train) and [c.deadline for c in choice.consumed] == [1, 1]


def test_more_accepted_groups_than_places_stop_the_run():
    run = Run(max_staleness=0)
    record = Claim(
        writer="w",
        kind="claim",
        tickets=(0, 1, 2),
        attempt=0,
        version=0,
        curriculum=0,
        deadline=0,
        next_ticket=3,
    )
    run.put(record)
    run.settle(0, 1)
    assert run.choose() == Wait("deadlines", (2,)), "it may still be refused"
    run.settle(2)
    with pytest.raises(ProtocolError, match=r"step 1: the accepted tickets \(2,\) cannot all be trained in time"):
        run.choose()


def test_an_accepted_group_must_be_named():
    run = Run()
    run.claim(2)
    run.settle(0)
    verdict = Verdict(ticket=1, accepted=True)
    run.put(Curated(writer="c", verdicts=(verdict,), covers={}, num_accepted=2, num_refused=0))
    with pytest.raises(ProtocolError, match="ticket 1 was accepted without naming its batch"):
        run.choose()


# --- trainers that replace each other ---


def test_a_trainer_is_the_newest_once_its_start_is_recorded():
    run = Run()
    assert decide_start(run.state, "trainer") is None
    run.start("second")
    assert run.choose() == Replaced("second")
    with pytest.raises(ProtocolError, match="trainer trainer cannot refuse: second is the newest"):
        decide_refuse(run.state, "trainer", [0], "timeout")


def test_a_trainer_loads_what_others_committed_before_it_goes_on():
    run = Run()
    run.step()
    assert choose_groups(run.state, "trainer", version=0) == Recover(1)
    assert choose_groups(run.state, "trainer", version=1) == Wait("groups", ())
    run.start("second")
    assert choose_groups(run.state, "trainer", version=0) == Replaced("second")
    late = zombie()
    assert choose_groups(late.state, "second", version=0) == Recover(1)


def test_tickets_that_were_out_too_long_are_refused_unless_they_are_accepted_by_now():
    run = Run()
    run.claim(3)
    run.settle(0)
    assert choose_groups(run.state, "trainer", overdue=[2, 0, 1, 9]) == Refuse((1, 2), "timeout")
    assert choose_groups(run.state, "trainer", overdue=[0]) == Wait("groups", (1, 2))
    run.start("second")
    assert choose_groups(run.state, "trainer", overdue=[1]) == Replaced("second")


def test_refusals_by_a_replaced_trainer_are_noticed():
    run = Run()
    run.claim(1)
    record = decide_refuse(run.state, "trainer", [0], "timeout")
    run.start("second")
    with pytest.raises(ProtocolError, match="record 2 is by trainer trainer, but second had replaced it"):
        run.put(record)


def test_only_tickets_in_flight_can_be_refused_and_totals_count_tickets():
    run = Run()
    run.step()
    run.claim(3)
    run.settle(2, accepted=False)
    run.settle(3)
    record = decide_refuse(run.state, "trainer", [0, 2, 3, 4, 99], "unreadable", "torn")
    assert isinstance(record, Refused)
    assert (record.tickets, record.commit, record.num_refused, record.detail) == ((3, 4), 1, 2, "torn")
    run.put(record)
    assert run.state.account() == (5, 2, 3, 0)
    assert decide_refuse(run.state, "trainer", [3], "unreadable") is None


def zombie(eta: int = 0) -> Run:
    """A trainer goes silent with a commit in its hand; its successor refuses one of the groups; the commit wins."""
    run = Run(max_staleness=eta, steps=4)
    run.claim(2)
    run.settle(0, 1)
    choice = run.choose()
    assert isinstance(choice, Train)
    run.start("second")
    run.put(decide_refuse(run.state, "second", [1], "unreadable"))
    run.claim(1)  # the place of ticket 1 is given away, with a deadline that only step 1 could meet
    fields = {"status": "trained", "weights": WEIGHTS, "checkpoint_version": 0, "num_tokens": 0}
    run.put(Commit(writer="trainer", **choice._asdict(), **fields))
    return run


def test_what_was_trained_counts_as_trained_although_it_was_refused():
    run = zombie()
    assert run.state.account() == (3, 2, 0, 1)
    assert run.state.num_both == 1


def test_the_surplus_after_a_late_commit_is_refused_as_overbooked():
    run = zombie()
    assert room(run.state, 1) == 1
    assert choose_groups(run.state, "second") == Wait("groups", (2,))
    run.settle(2)
    assert choose_groups(run.state, "second") == Refuse((2,), "overbooked")
    run.put(decide_refuse(run.state, "second", [2], "overbooked"))
    assert room(run.state, 1) == 2
    run.claim(2)
    run.settle(3, 4)
    choice = choose_groups(run.state, "second")
    assert isinstance(choice, Train) and [c.ticket for c in choice.consumed] == [3, 4]


def test_an_overdue_group_is_never_trained():
    run = zombie()
    run.settle(2)
    run.claim(1)
    run.settle(3)
    assert choose_groups(run.state, "second") == Refuse((2,), "overbooked")


def test_only_as_many_as_a_late_commit_explains_may_be_overbooked():
    run = zombie()
    run.settle(2)
    run.put(decide_refuse(run.state, "second", [2], "overbooked"))
    record = decide_claim(run.state, "w", version=1, curriculum=1)
    assert record is not None
    run.put(record.model_copy(update={"tickets": (3, 4, 5), "next_ticket": 6}))
    run.settle(3, 4, 5)
    with pytest.raises(ProtocolError, match="only 0 may be surplus"):
        choose_groups(run.state, "second")


def test_tickets_left_when_the_run_is_over_are_refused():
    run = Run(steps=1, max_staleness=0)
    run.claim(2)
    run.settle(0, 1)
    choice = run.choose()
    run.start("second")
    run.put(decide_refuse(run.state, "second", [0], "unreadable"))
    run.claim(1)
    assert isinstance(choice, Train)
    fields = {"status": "trained", "weights": WEIGHTS, "checkpoint_version": 0, "num_tokens": 0}
    run.put(Commit(writer="trainer", **choice._asdict(), **fields))
    assert choose_groups(run.state, "second") == Refuse((2,), "overbooked")
    run.put(decide_refuse(run.state, "second", [2], "overbooked"))
    assert choose_groups(run.state, "second") == Finished()
    assert run.state.account() == (3, 2, 1, 0)
