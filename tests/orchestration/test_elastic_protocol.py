"""What workers and their coordinator say to each other, over real sockets on loopback: what arrives, what does not."""
from __future__ import annotations

import secrets
import socket
import time

import msgspec
import pytest

from bpsfast.orchestration.elastic import protocol
from bpsfast.orchestration.elastic.protocol import (
    Add,
    Added,
    Come,
    Dismissed,
    Done,
    Formed,
    Hello,
    Newcomers,
    Over,
    Put,
    Refused,
    Value,
    Void,
    Wait,
    Want,
    connect,
    listen,
    stored_nbytes,
)
from bpsfast.orchestration.errors import ConfigError, PeerLostError, ProtocolError
from tests.support.channel_ends import look, receive

KEY = secrets.token_bytes(32)
LIMIT_S = 20.0
OF_WORKERS = [Come(member=3, node="boot net é"), Come(3, "n", True, 7, "a link\n\0"), Put(3, 2, "k", "v" * 70_000),
              Want(3, 2, "k"), Add(-9, 4), Done(3)]
OF_THE_COORDINATOR = [Formed(2, 0, 3, "shrink"), Wait("worker 1 has not come"), Value(2, "ключ", ""),
                      Void(2, "is gone"),
                      Newcomers(2, 1), Newcomers(2, 0, 3), Dismissed("ö"), Added(0, "the training has ended"),
                      Refused("StallError", "no quorum"), Over()]


@pytest.fixture
def lines(no_leaks):
    """The coordinator's end and two workers', of members 3 and 5; nobody has said anything."""
    coordinator = listen(KEY, "127.0.0.1")
    workers = {number: connect("127.0.0.1", coordinator.port, KEY) for number in (3, 5)}
    yield coordinator, workers
    for line in (coordinator, *workers.values()):
        line.close()


def greet(coordinator, workers):
    for number, line in workers.items():
        line.tell(Hello(number))
    receive(coordinator, len(workers))


def test_all_that_a_worker_says_arrives_as_it_was_said(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    for message in OF_WORKERS:
        workers[3].tell(message)
    assert receive(coordinator, len(OF_WORKERS)) == OF_WORKERS
    assert coordinator.present == {3, 5}


def test_all_that_the_coordinator_says_arrives_and_at_nobody_elses(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    for message in OF_THE_COORDINATOR:
        assert coordinator.tell(message, but={5}) == []
    coordinator.tell(Wait("for you"), but={3})
    assert receive(workers[3], len(OF_THE_COORDINATOR)) == OF_THE_COORDINATOR
    assert receive(workers[5], 1) == [Wait("for you")]


def test_who_comes_for_the_first_time_has_no_state_and_no_complaint(lines):
    assert OF_WORKERS[0] == Come(3, "boot net é", has_state=False, n_commits=0, reason="")


@pytest.mark.parametrize("message", OF_THE_COORDINATOR, ids=lambda message: type(message).__name__)
def test_the_musters_words_are_no_workers(lines, message):
    coordinator, workers = lines
    greet(coordinator, workers)
    for each in (Done(3), message, Want(3, 1, "k")):
        workers[3].tell(each)
    with pytest.raises(ProtocolError, match="is no message"):
        look(coordinator, lambda found: len(found) > 1)
    assert receive(coordinator, 1) == [Want(3, 1, "k")], "what came after it is had by the next call"


@pytest.mark.parametrize("message", [Hello(3), *OF_WORKERS[1:]], ids=lambda message: type(message).__name__)
def test_a_workers_words_are_not_the_musters(lines, message):
    coordinator, workers = lines
    greet(coordinator, workers)
    coordinator.tell(message)
    with pytest.raises(ProtocolError, match="install one version of bpsfast everywhere"):
        receive(workers[3], 1)


@pytest.mark.parametrize("fields", [{"member": "3", "node": "n"}, {"member": 3}, {"member": 3, "node": b"n"},
                                    {"member": 3, "node": "n", "n_commits": 1.5}])
def test_fields_of_another_kind_are_no_message(lines, fields):
    coordinator, workers = lines
    workers[3]._socket.send(msgspec.msgpack.encode({"type": "Come", **fields}))
    with pytest.raises(ProtocolError, match="is no message"):
        receive(coordinator, 1)


def test_the_largest_that_may_be_stored_gets_through(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    key = "k" * protocol.MOST_KEY_LENGTH
    value = "x" * (protocol.MOST_VALUE_NBYTES - stored_nbytes(key, ""))
    assert stored_nbytes(key, value) == protocol.MOST_VALUE_NBYTES
    workers[3].tell(Put(3, 1, key, value))
    assert receive(coordinator, 1) == [Put(3, 1, key, value)]
    coordinator.tell(Value(1, key, value), but={5})
    assert receive(workers[3], 1) == [Value(1, key, value)]


def test_what_is_stored_counts_in_bytes_and_an_empty_entry_is_not_free():
    assert stored_nbytes("é", "€x") == stored_nbytes("", "") + 2 + 4
    n_entries = protocol.MOST_STORED_NBYTES // stored_nbytes("", "")
    assert n_entries <= 1 << 16, "what a member can make the launcher remember, in entries"


def test_who_has_another_key_is_not_heard(lines):
    coordinator, workers = lines
    stranger = connect("127.0.0.1", coordinator.port, secrets.token_bytes(32))
    try:
        stranger.tell(Hello(9))
        assert stranger._monitor.poll(int(LIMIT_S * 1000)), "neither understood nor cut off"
        assert stranger.recv_nowait() == [] and not stranger.is_connected
        greet(coordinator, workers)
        assert coordinator.present == {3, 5}
    finally:
        stranger.close()


def test_a_coordinator_that_is_gone_is_named_after_its_last_words(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    coordinator.tell(Over())
    coordinator.close()
    for line in workers.values():
        assert receive(line, 1) == [Over()]
        with pytest.raises(PeerLostError, match=r"the coordinator \(bpsfast run\)'s process is gone: its"):
            receive(line, 1)


def test_a_worker_that_is_gone_is_noticed_at_the_next_word(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    workers[5].close()
    until = time.monotonic() + LIMIT_S
    while coordinator.tell(Wait("x"), but={3}) != [5]:
        assert time.monotonic() < until
    coordinator.tell(Over())
    assert receive(workers[3], 1) == [Over()], "the others' words are not lost with it"


def test_a_worker_that_connects_anew_is_heard_by_its_number(lines):
    coordinator, workers = lines
    greet(coordinator, workers)
    again = connect("127.0.0.1", coordinator.port, KEY)
    try:
        again.tell(Hello(3))
        receive(coordinator, 1)
        coordinator.tell(Over(), but={5})
        assert receive(again, 1) == [Over()] and workers[3].recv_nowait() == []
    finally:
        again.close()


def test_an_address_of_this_machine_is_the_only_one_that_is_listened_at(lines):
    coordinator, _ = lines
    with socket.create_connection(("127.0.0.1", coordinator.port), LIMIT_S):
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", coordinator.port), LIMIT_S)


def test_what_is_no_address_is_the_musters(no_leaks):
    with pytest.raises(ConfigError, match=r"the coordinator \(bpsfast run\) says it listens at no such place:7, which"):
        connect("no such place", 7, KEY)
