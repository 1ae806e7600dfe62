"""Whose lease is lost, by an observer's own clock."""

from data_contracts.protocol import Lease, Leases, Rules, RunState, Timeouts, decide_claim, decide_reclaim
from data_contracts.records import DELIVERED, Commit, Curated, Heartbeat, PolicyRef, Verdict

WEIGHTS = PolicyRef(kind="full", objects=(), digest="", dtype="float32", num_parameters=0)


def make_state(num_tickets: int = 2, max_attempts: int = 3) -> RunState:
    state = RunState(Rules(groups_per_step=num_tickets, steps=3, max_staleness=0, max_attempts=max_attempts))
    fields = {"version": 0, "status": "initial", "consumed": (), "num_trained": 0, "num_tokens": 0}
    state.apply("commit", 0, Commit(writer="w", weights=WEIGHTS, checkpoint_version=0, **fields))
    state.apply("claim", 0, decide_claim(state, "worker", version=0, curriculum=0))
    return state


def beat(writer: str = "worker", done: bool = False, **held: int) -> dict[str, Heartbeat]:
    """A heartbeat; t0=3 says that ticket 0 has counter 3."""
    counters = {name[1:]: counter for name, counter in held.items()}
    heartbeat = Heartbeat(
        role="rollout", writer=writer, host="", pid=1, process_started=0, beat=1, state="", held=counters, done=done
    )
    return {writer: heartbeat}


def settle(state: RunState, ticket: int) -> None:
    verdict = Verdict(ticket=ticket, accepted=True)
    record = Curated(writer="c", verdicts=(verdict,), covers={}, num_accepted=1, num_refused=0)
    state.apply("curated", state.next["curated"], record)


def reclaim(state: RunState, lost: list[Lease], writer: str = "second") -> None:
    state.apply("claim", state.next["claim"], decide_reclaim(state, writer, lost, version=0))


def test_a_lease_lives_while_its_counter_moves():
    state, leases = make_state(), Leases(lease_s=10)
    for now in range(0, 100, 9):
        assert leases.observe(now, state, beat(t0=now + 1, t1=now + 1)) == []


def test_a_lease_is_lost_when_its_counter_stands_still_for_too_long():
    state, leases = make_state(), Leases(lease_s=10)
    assert leases.observe(100, state, beat(t0=1, t1=1)) == []
    assert leases.observe(105, state, beat(t0=1, t1=2)) == []
    assert leases.observe(109.9, state, beat(t0=1, t1=2)) == []
    assert leases.observe(110, state, beat(t0=1, t1=2)) == [Lease(0, 0)]
    assert leases.observe(115, state, beat(t0=1, t1=2)) == [Lease(0, 0), Lease(1, 0)]
    assert leases.observe(116, state, beat(t0=2, t1=2)) == [Lease(1, 0)], "it has moved after all"


def test_a_heartbeat_that_never_comes_does_not_move_either():
    state, leases = make_state(), Leases(lease_s=10)
    assert leases.observe(0, state, {}) == []
    assert leases.observe(10, state, {}) == [Lease(0, 0), Lease(1, 0)]


def test_a_ticket_that_its_owner_does_not_name_is_lost_in_time():
    state, leases = make_state(), Leases(lease_s=10)
    assert leases.observe(0, state, beat(t1=1)) == []
    assert leases.observe(10, state, beat(t1=2)) == [Lease(0, 0)]


def test_a_ticket_that_waits_for_its_turn_lives_while_its_owner_gets_on():
    state, leases = make_state(), Leases(lease_s=10)
    assert leases.observe(0, state, beat(t0=1, t1=0)) == []
    assert leases.observe(9, state, beat(t0=2, t1=0)) == []
    assert leases.observe(18, state, beat(t0=2, t1=0)) == []
    assert leases.observe(19, state, beat(t0=2, t1=0)) == [Lease(0, 0), Lease(1, 0)]


def test_a_delivered_ticket_waits_for_others_and_cannot_be_lost():
    state, leases = make_state(), Leases(lease_s=10)
    for now in (0, 50, 100):
        assert leases.observe(now, state, beat(t0=DELIVERED, t1=now + 1)) == []
    assert leases.observe(101, state, beat(done=True, t0=DELIVERED, t1=3)) == [Lease(1, 0)]
    assert leases.observe(102, state, beat(t0=DELIVERED, t1=3), dead={"worker"}) == [Lease(1, 0)]


def test_the_dead_and_those_who_have_ended_lose_their_leases_at_once():
    state, leases = make_state(), Leases(lease_s=10)
    assert leases.observe(0, state, beat(t0=1, t1=1), dead={"worker"}) == [Lease(0, 0), Lease(1, 0)]
    assert leases.observe(1, state, beat(t0=2, t1=2), dead={"another"}) == []
    assert leases.observe(2, state, beat(done=True, t0=2, t1=2)) == [Lease(0, 0), Lease(1, 0)]


def test_the_next_attempt_has_a_lease_of_its_own():
    state, leases = make_state(), Leases(lease_s=10)
    leases.observe(0, state, {})
    lost = leases.observe(10, state, {})
    reclaim(state, lost)
    assert leases.observe(11, state, {}) == []
    assert leases.observe(20, state, beat("second", t0=1, t1=1)) == []
    assert leases.observe(29, state, beat("second", t0=1, t1=1)) == []
    assert leases.observe(30, state, beat("second", t0=1, t1=2)) == [Lease(0, 1)]


def test_settled_and_given_up_tickets_have_no_lease():
    state, leases = make_state(max_attempts=1), Leases(lease_s=10)
    leases.observe(0, state, {})
    settle(state, 0)
    assert leases.observe(10, state, {}) == [Lease(1, 0)]
    reclaim(state, [Lease(1, 0)])
    assert leases.observe(20, state, {}) == []


def test_an_observer_starts_its_own_clock():
    state = make_state()
    old, new = Leases(lease_s=10), Leases(lease_s=10)
    assert old.observe(0, state, {}) == []
    assert old.observe(10, state, {}) != []
    assert new.observe(10, state, {}) == []


def test_a_ticket_times_out_by_the_clock_of_who_first_saw_it():
    state, timeouts = make_state(), Timeouts(timeout_s=5)
    assert timeouts.observe(100, state) == []
    assert timeouts.observe(104.9, state) == []
    reclaim(state, [Lease(0, 0)])
    assert timeouts.observe(105, state) == [0, 1], "a further attempt brings no more time"
    settle(state, 0)
    assert timeouts.observe(106, state) == [1]


def test_without_a_timeout_nothing_times_out():
    timeouts = Timeouts(timeout_s=None)
    state = make_state()
    assert [timeouts.observe(now, state) for now in (0, 1e9)] == [[], []]


def test_settled_tickets_are_not_remembered():
    state, leases, timeouts = make_state(), Leases(lease_s=10), Timeouts(timeout_s=10)
    for now in range(3):
        leases.observe(now, state, {})
        timeouts.observe(now, state)
    settle(state, 0)
    settle(state, 1)
    leases.observe(9, state, {})
    timeouts.observe(9, state)
    assert not leases._seen
    assert not timeouts._since
