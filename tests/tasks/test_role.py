"""What a role learns from the records: that it is to leave, that it was given up, who shows life."""

from collections.abc import Iterator
from uuid import uuid4

import pytest

from data_contracts.config import RunConfig
from data_contracts.errors import RunStopped
from data_contracts.records import Heartbeat, encode_record
from infra.heartbeats import heartbeat_key, read_heartbeats
from infra.store import Store, open_store
from tasks.role import Role
from tasks.supervise import Supervisor, find_moving


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.model_validate({"orchestration": {"heartbeat_s": 0.02}})


@pytest.fixture
def supervisor(store: Store) -> Iterator[Supervisor]:
    supervisor = Supervisor(store)
    supervisor.open()
    return supervisor


def test_a_role_that_is_told_to_leave_ends_its_part_and_says_that_it_is_done(store, config, supervisor) -> None:
    with pytest.raises(RunStopped, match="the worker closes"), Role("rollout", store, config) as role:
        role.check(often=True)
        role.leave("the worker closes")
        role.check()
    assert [beat.done for beat in read_heartbeats(store)] == [True]
    assert supervisor.closing() == "", "the run goes on"


def test_a_role_that_was_declared_dead_leaves_and_others_stay(store, config, supervisor) -> None:
    with Role("train", store, config) as lost, Role("train", store, config) as other:
        supervisor.bury(lost.writer)
        supervisor.bury(lost.writer)
        for role in (lost, other):
            role.check(often=True)
        assert other.dead_writers == {lost.writer}
        assert not other.is_leaving
        with pytest.raises(RunStopped, match="declared dead"):
            lost.check()
    assert lost.is_leaving


def test_a_writer_that_is_given_keeps_its_id(store, config) -> None:
    assert Role("train", store, config, "abc").writer == "abc"
    assert Role("train", store, config).writer != Role("train", store, config).writer


def test_moving_heartbeats_are_found_and_still_ones_are_not(store, config) -> None:
    still = Heartbeat(role="train", writer="still", host="elsewhere", pid=1, process_started=0.0, beat=1, state="")
    store.put(heartbeat_key("train", "still"), encode_record(still))
    with Role("reward", store, config) as role:
        assert [beat.writer for beat in find_moving(store, 0.3)] == [role.writer]
    assert find_moving(store, 0.1) == []


def test_heartbeats_are_read_by_role_and_what_is_none_is_passed_over(store) -> None:
    for role in ("rollout", "reward"):
        beat = Heartbeat(role=role, writer="w", host="h", pid=1, process_started=0.0, beat=1, state="")
        store.put(heartbeat_key(role, "w"), encode_record(beat))
    store.put(heartbeat_key("rollout", "torn"), b'{"role": "roll')
    assert [beat.role for beat in read_heartbeats(store, "rollout")] == ["rollout"]
    assert {beat.role for beat in read_heartbeats(store)} == {"rollout", "reward"}


@pytest.mark.parametrize("kind", ["stop", "end", "fail"])
def test_how_a_run_is_closed_is_told_since_its_last_start(kind: str, store, supervisor) -> None:
    from tasks.role import append_control

    append_control(store, "w", kind, role="train", error="why")
    assert supervisor.closing() == kind
    supervisor.open()
    assert supervisor.closing() == ""
