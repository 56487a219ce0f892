"""Tests message sockets: whole messages in order, descriptors with their own message, ends that are noticed."""
from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
import threading
import time

import pytest

from bpsfast.base import message_socket
from bpsfast.base.message_socket import MessageSocket
from bpsfast.orchestration import messages
from bpsfast.orchestration.errors import PeerLostError, ProtocolError, StallError

KEY = b"k" * 32


@pytest.fixture
def pair():
    ends = [MessageSocket(sock) for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)]
    yield ends
    for end in ends:
        end.close()


def told(request: int, n_counters: int = 0) -> messages.Counters:
    return messages.Counters(request=request, counters={f"counter_{i}": i for i in range(n_counters)})


def test_messages_arrive_whole_and_in_order(pair):
    left, right = pair
    for request in range(100):
        left.send(told(request, n_counters=request))
    assert [right.recv(5)[0] for _ in range(100)] == [told(i, n_counters=i) for i in range(100)]


def test_descriptors_stay_with_their_message(pair):
    left, right = pair
    pipes = [os.pipe() for _ in range(3)]
    left.send(told(0))
    left.send(told(1), [pipes[0][0], pipes[1][0]])
    left.send(told(2))
    left.send(told(3), [pipes[2][0]])
    received = []
    while len(received) < 4:
        received += right.recv_nowait()
    assert [len(fds) for _, fds in received] == [0, 2, 0, 1]
    for index, fd in enumerate([*received[1][1], *received[3][1]]):
        os.write(pipes[index][1], bytes([index]))
        assert os.read(fd, 1) == bytes([index])
        os.close(fd)
    for read_end, write_end in pipes:
        os.close(read_end)
        os.close(write_end)


def test_a_message_larger_than_the_socket_buffer_is_sent_while_it_is_read(pair):
    left, right = pair
    big = told(1, n_counters=60_000)
    sender = threading.Thread(target=left.send, args=(big,))
    sender.start()
    assert right.recv(30)[0] == big
    sender.join()


def test_post_keeps_what_the_socket_does_not_take(pair):
    left, right = pair
    big = told(1, n_counters=60_000)
    read_end, write_end = os.pipe()
    left.post(big, [read_end])
    left.post(told(2))
    assert left.backlog
    received = []
    while len(received) < 2:
        left.flush()
        received += right.recv_nowait()
    assert [message for message, _ in received] == [big, told(2)]
    assert [len(fds) for _, fds in received] == [1, 0]
    assert not left.backlog
    for fd in (read_end, write_end, *received[0][1]):
        os.close(fd)


def test_others_may_post_while_a_send_waits_for_the_reader(pair):
    left, right = pair
    sender = threading.Thread(target=lambda: left.send(messages.KeyValueReply(
        rank=0, question=1, value=bytes(8 << 20)), timeout_s=20.0))
    sender.start()
    while not left.backlog:
        assert sender.is_alive()
    begin = time.monotonic()
    left.post(messages.KeyValueReply(rank=0, question=2))
    assert time.monotonic() - begin < 10.0 and sender.is_alive(), "nothing of it was read yet"
    assert right.recv(20.0)[0].question == 1
    sender.join(20.0)
    assert not sender.is_alive()
    left.flush()
    assert right.recv(20.0)[0].question == 2


def test_send_names_the_process_that_does_not_read(pair):
    left, _ = pair
    with pytest.raises(StallError, match=f"process {os.getpid()} did not read"):
        left.send(told(1, n_counters=60_000), timeout_s=0.05)


def test_recv_ends_at_its_deadline(pair):
    with pytest.raises(StallError, match="sent nothing"):
        pair[1].recv(0.01)


def test_a_closed_end_is_seen_after_its_last_message(pair):
    left, right = pair
    left.send(told(7))
    left.close()
    assert [message for message, _ in right.recv_nowait()] == [told(7)]
    with pytest.raises(PeerLostError):
        right.recv_nowait()
    with pytest.raises(PeerLostError):
        right.recv(1)


def test_sending_to_a_closed_end_is_an_error(pair):
    left, right = pair
    right.close()
    with pytest.raises(PeerLostError):
        left.send(told(1))


def test_close_closes_descriptors_nobody_took(pair):
    left, right = pair
    read_end, write_end = os.pipe()
    left.send(told(1), [write_end])
    os.close(write_end)
    right._read()
    right.close()
    assert os.read(read_end, 1) == b""  # end of file: no writer is left
    os.close(read_end)


def test_bytes_that_are_no_message_are_refused(pair):
    left, right = pair
    left._sock.sendall(b"\x03\x00\x00\x00abc")
    with pytest.raises(ProtocolError, match="no control message"):
        right.recv(1)


def test_a_message_that_promises_descriptors_must_bring_them(pair):
    left, right = pair
    body = messages.encode(told(1))
    left._sock.sendall((len(body) | 1 << 28).to_bytes(4, "little") + body)
    with pytest.raises(ProtocolError, match="announces 1 descriptors, 0 came"):
        right.recv(1)


def test_too_many_descriptors_are_refused_before_anything_is_sent(pair):
    with pytest.raises(ProtocolError, match="16 descriptors"):
        pair[0].send(told(1), [0] * 16)


def test_the_address_depends_on_key_and_node():
    name = message_socket.address(KEY, "machine")
    assert name.startswith(b"\0bpsfast-") and len(name) == len(b"\0bpsfast-") + 32
    assert len({name, message_socket.address(KEY, "other"), message_socket.address(b"x" * 32, "machine")}) == 3


def test_connect_waits_for_the_listener_and_knows_who_it_is():
    name = message_socket.address(os.urandom(32), "machine")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found = []
    connector = threading.Thread(target=lambda: found.append(message_socket.connect(name, 30)))
    connector.start()
    listener.bind(name)
    listener.listen()
    accepted = MessageSocket(listener.accept()[0])
    connector.join()
    assert accepted.peer == (os.getpid(), os.getuid())
    found[0].send(told(1))
    assert accepted.recv(5)[0] == told(1)
    for end in (accepted, found[0], listener):
        end.close()


def test_connect_without_a_listener_says_what_is_missing():
    with pytest.raises(StallError, match="no node listened on the local socket @bpsfast-"):
        message_socket.connect(message_socket.address(os.urandom(32), "machine"), 0.05)


def test_more_than_a_stranger_may_say_is_refused_before_it_has_come(pair):
    left, right = pair
    right.frame_max_nbytes = 100
    left.send(told(1))
    assert right.recv(5) == (told(1), ())
    left._sock.send(struct.pack("<I", 101))
    with pytest.raises(ProtocolError, match="announces 101 bytes, at most 100 are taken"):
        right.recv(5)


def test_descriptors_without_a_message_are_not_hoarded(no_leaks, pair):
    left, right = pair
    with open(os.devnull) as file:
        fds = array.array("i", [file.fileno()] * 8)
        for piece in (struct.pack("<I", 50 | 8 << 28), b"x"):
            left._sock.sendmsg([piece], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
    with pytest.raises(ProtocolError, match="16 descriptors came on a local channel without a message"):
        right.recv(5)
    right.close()


def test_who_never_stops_talking_leaves_others_their_turn(pair):
    left, right = pair
    message = told(1, n_counters=2000)
    ended = threading.Event()

    def talk():
        while not ended.is_set():
            with contextlib.suppress(StallError):
                left.send(message, timeout_s=0.05)

    talker = threading.Thread(target=talk)
    talker.start()
    try:
        for _ in range(5):
            nbytes = sum(len(messages.encode(each)) for each, _ in right.recv_nowait())
            assert nbytes <= message_socket._MOST_READS * message_socket._READ_NBYTES
    finally:
        ended.set()
        talker.join(20)


def test_another_users_process_behind_the_name_is_told_nothing(monkeypatch):
    name = message_socket.address(KEY, f"taken-{os.getpid()}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(name)
        listener.listen()
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        if os.geteuid() == 0:  # root's processes may listen for everybody
            monkeypatch.setattr(message_socket, "peer_uid", lambda sock: (1, 4712))
        with pytest.raises(ProtocolError, match="nothing is sent to it"):
            message_socket.connect(name, 5)
