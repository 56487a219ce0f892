"""``bpsfast ping --listen``: what strangers and a lack of descriptors do to it, which is nothing for long."""
from __future__ import annotations

import contextlib
import logging
import resource
import select
import socket
import threading
import time

import pytest

from bpsfast.base.settings import Settings
from bpsfast.orchestration.handshakes import MAX_PENDING_HANDSHAKES
from bpsfast.tools.perf import control as lines, ping as listeners
from bpsfast.tools.perf.control import Answer, Ask, Secret

KEY = bytes(range(32))
LIMIT_S = 20.0


@pytest.fixture(params=["secret"])
def serving(request, no_leaks):
    """The port that it listens on, in a thread of its own."""
    with lines.listen(0, "127.0.0.1") as sock:
        secret = Secret(KEY, is_public=request.param == "public")
        thread = threading.Thread(target=listeners.serve, args=(sock, secret, Settings()))
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()
    while any(each.name.startswith("bpsfast-ping") for each in threading.enumerate()):
        time.sleep(0.01)


def test_without_free_descriptors_nobody_is_let_in_for_a_while(serving, caplog):
    caplog.set_level(logging.WARNING)
    lines.connect("127.0.0.1", serving, KEY, 20.0, 20.0).close()  # it serves by now
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            client.connect(("127.0.0.1", serving))
            deadline = time.monotonic() + 20
            while "cannot be accepted" not in caplog.text:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    lines.connect("127.0.0.1", serving, KEY, 20.0, 20.0).close()


def test_strangers_get_nothing_and_keep_nobody_out(serving):
    with contextlib.ExitStack() as stack:
        for said in (b"", b"GET / HTTP/1.1\r\n", bytes(5000)):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", serving), 20.0))
            stranger.sendall(said)
        lines.connect("127.0.0.1", serving, KEY, 20.0, 20.0).close()


def test_more_strangers_than_there_is_room_for_keep_nobody_out(serving):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_PENDING_HANDSHAKES + 30):
            stack.enter_context(socket.create_connection(("127.0.0.1", serving), LIMIT_S))
        begin = time.monotonic()
        lines.connect("127.0.0.1", serving, KEY, LIMIT_S, LIMIT_S).close()
        assert time.monotonic() - begin < 4.0, "less than a stranger has for its handshake"


@contextlib.contextmanager
def asked_to_dial(serving):
    """Yields a socket that listens, and what the listener of ping answers who asks it to ping that."""
    with socket.create_server(("127.0.0.1", 0)) as target, \
            lines.connect("127.0.0.1", serving, KEY, LIMIT_S, LIMIT_S) as control:
        control.send(Ask("reach", {"host": "127.0.0.1", "port": target.getsockname()[1]}))
        yield target, lambda: control.receive(Answer, "what came of it").fields


@pytest.mark.parametrize("serving", ["public"], indirect=True)
def test_under_a_key_that_everybody_knows_it_dials_nobody(serving):
    """Else it would tell strangers which ports are open where only it can go."""
    with asked_to_dial(serving) as (target, answer):
        error = answer()["error"]
        assert "a listener does not ping for others" in error and "BPSFAST_JOB_KEY" in error
        assert not select.select([target], [], [], 0)[0], "nobody has knocked there"


def test_for_a_holder_of_the_key_it_pings_others(serving):
    with asked_to_dial(serving) as (target, answer):
        target.settimeout(LIMIT_S)
        target.accept()[0].close()
        assert "PeerLostError" in answer()["error"]
