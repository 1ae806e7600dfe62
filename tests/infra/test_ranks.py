import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_contracts.errors import ConfigError, RankFailed
from infra.ranks import Channel, Message, RankGroup

MODULE = "tests.infra.echo_rank"


@pytest.fixture
def group():
    group = RankGroup(MODULE, 2)
    yield group
    group.close()


def say(*asked):
    return [Message(fields) for fields in asked]


ECHO, WAIT = {"do": "echo"}, {"do": "wait"}


def assert_all_gone(pids):
    for pid in pids:
        assert not psutil.pid_exists(pid)


@settings(deadline=None)
@given(
    fields=st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False) | st.text() | st.none()),
    blobs=st.dictionaries(st.text(), st.binary(max_size=300)),
)
def test_what_is_sent_is_what_is_received(fields, blobs):
    left, right = socket.socketpair()
    with left, right:
        Channel(left).send(Message(fields, blobs))
        assert Channel(right).receive() == Message(fields, blobs)


def test_a_message_larger_than_the_buffers_of_a_socket_arrives_whole():
    left, right = socket.socketpair()
    body = os.urandom(3 << 20)
    with left, right:
        sender = threading.Thread(target=Channel(left).send, args=(Message({}, {"body": body}),))
        sender.start()
        assert Channel(right).receive().blobs == {"body": body}
        sender.join()


def test_a_torn_message_is_the_end_and_not_a_short_message():
    left, right = socket.socketpair()
    with right:
        left.sendall((100).to_bytes(8, "big") + b"{")
        left.close()
        with pytest.raises(EOFError, match="gone"):
            Channel(right).receive()


def test_the_first_rank_answers_and_none_outlives_the_group(group):
    for text in ("one", "two"):
        answer = group.call([Message(ECHO | {"text": text}, {"a": b"x"}), Message(ECHO)])
        assert answer == Message(ECHO | {"text": text}, {"a": b"x"})
    pids = group.pids
    group.close()
    assert_all_gone(pids)
    with pytest.raises(RankFailed, match="has ended"):
        group.call(say(ECHO, ECHO))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_group_with_its_name(group, victim):
    pids = group.pids
    asked = [WAIT, WAIT]
    asked[victim] = {"do": "die"}
    with pytest.raises(RankFailed, match=rf"rank {victim} \(process {pids[victim]}\) was killed by SIGKILL"):
        group.call(say(*asked))
    assert_all_gone(pids)


def test_a_rank_killed_between_two_calls_is_noticed_by_the_next(group):
    group.call(say(ECHO, ECHO))
    os.kill(group.pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match="rank 1 .* was killed by SIGKILL"):
        group.call(say(ECHO, ECHO))


def test_the_error_is_that_of_the_rank_that_failed_first(group):
    late = {"do": "raise", "text": "connection closed by peer", "after_s": 0.3}
    with pytest.raises(RankFailed, match="rank 1 .*: ValueError: out of memory"):
        group.call(say(late, {"do": "raise", "text": "out of memory"}))


def test_a_death_explains_the_error_of_another_rank(group):
    with pytest.raises(RankFailed, match="rank 1 .* was killed by SIGKILL"):
        group.call(say({"do": "raise", "text": "connection closed by peer"}, {"do": "die"}))


def test_the_last_lines_that_a_rank_printed_are_quoted(group):
    with pytest.raises(RankFailed, match=r"rank 0 .* ended with code 7; its last words: first line \| last words"):
        group.call(say({"do": "exit"}, WAIT))


def test_an_error_of_this_project_keeps_its_class(group):
    with pytest.raises(ConfigError, match="choose another model"):
        group.call(say({"do": "refuse", "text": "choose another model"}, WAIT))


def test_ranks_do_not_outlive_a_parent_that_is_killed():
    code = (
        "from infra.ranks import Message, RankGroup\n"
        f"group = RankGroup({MODULE!r}, 2)\n"
        "group.call([Message({'do': 'echo'})] * 2)\n"
        "print(*group.pids, flush=True)\n"
        "group.call([Message({'do': 'wait'})] * 2)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        ranks = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert all(rank.is_running() for rank in ranks)
        parent.kill()
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(ranks) == 2
    assert not [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE]
