"""``bpsfast ping --listen``: what strangers and a lack of descriptors do to it, which is nothing for long."""
from __future__ import annotations

import contextlib
import logging
import resource
import socket
import threading
import time

import pytest

from bpsfast.perf import control as lines, listener as listeners
from bpsfast.settings import Settings

KEY = bytes(range(32))


@pytest.fixture
def serving(no_leaks):
    """The port that it listens on, in a thread of its own."""
    with lines.listen(0, "127.0.0.1") as sock:
        thread = threading.Thread(target=listeners.serve, args=(sock, KEY, Settings()))
        thread.start()
        yield sock.getsockname()[1]
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        assert not thread.is_alive()
    while any(each.name == "bpsfast-ping" for each in threading.enumerate()):
        time.sleep(0.01)


def test_without_free_descriptors_nobody_is_let_in_for_a_while(serving, monkeypatch, caplog):
    monkeypatch.setattr(listeners, "_DEAF_S", 0.05)
    caplog.set_level(logging.WARNING)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as client:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        try:
            client.connect(("127.0.0.1", serving))
            deadline = time.monotonic() + 20
            while "nobody can be let in" not in caplog.text:
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
