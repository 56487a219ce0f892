"""The connection of perf and ping: strangers, other keys, silence, death, and words for each."""
from __future__ import annotations

import contextlib
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from bpsfast.base.settings import load
from bpsfast.orchestration.errors import (
    BpsError,
    ConfigError,
    MismatchError,
    PeerLostError,
    ProtocolError,
    StallError,
)
from bpsfast.tools.perf import control as lines
from bpsfast.tools.perf.control import Agree, Alive, Done, Ready, Stop

KEY = b"k" * 32


@contextlib.contextmanager
def listening():
    with lines.listen(0, "127.0.0.1") as listener:
        yield listener, listener.getsockname()[1]


@pytest.fixture
def ends():
    with listening() as (listener, port), ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(lines.accept, listener, KEY, 10.0, 10.0)
        with lines.connect("127.0.0.1", port, KEY, 10.0, 10.0) as client, accepted.result(10) as server:
            yield client, server


def test_messages_arrive_whole_and_in_order(ends):
    client, server = ends
    done = Done(7, 0.5, None, [{"device": "x" * 100_000}])
    with ThreadPoolExecutor(1) as executor:
        sent = executor.submit(lambda: [client.send(Ready("a")), client.send(done)])
        assert server.receive(Ready, "a step") == Ready("a")
        assert server.receive((Done, Stop), "the end") == done
        sent.result(10)


def test_a_peer_that_stops_says_why(ends):
    client, server = ends
    client.stop("ConfigError: no such device")
    with pytest.raises(BpsError, match="stopped: ConfigError: no such device"):
        server.receive(Agree, "consent")


def test_the_reason_is_heard_by_one_who_was_about_to_send(ends):
    client, server = ends
    client.stop("because")
    client.close()
    with pytest.raises(BpsError, match=r"because|closed the connection"):
        for _ in range(10_000):
            server.send(Ready("x" * 10_000))


def test_a_peer_that_died_is_lost(ends):
    client, server = ends
    client.close()
    with pytest.raises(PeerLostError, match="closed the connection"):
        server.receive(Ready, "a step")


def test_silence_is_a_stall_unless_the_peer_says_it_lives(ends):
    client, server = ends
    server.timeout_s = 0.2
    client.send(Alive())
    with pytest.raises(StallError, match=r"said nothing for 0.2 s; expected: a step"):
        server.receive(Ready, "a step")


def test_a_pulse_is_sent_while_something_runs_here(ends):
    client, server = ends
    assert server.receive(Ready, "a step", pulse_s=0.01) is None
    server.send(Ready("a"))
    client.timeout_s = 5.0
    assert client.receive(Ready, "a step after a pulse").step == "a"


def test_another_message_than_expected_is_an_error(ends):
    client, server = ends
    client.send(Ready("a"))
    with pytest.raises(ProtocolError, match="sent Ready; expected: the end"):
        server.receive(Done, "the end")


def test_another_key_is_refused_on_both_sides():
    with listening() as (listener, port), ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(lines.accept, listener, KEY, 1.0, 10.0)
        with pytest.raises((MismatchError, PeerLostError), match="key"):
            lines.connect("127.0.0.1", port, b"other" * 8, 5.0, 10.0)
        with pytest.raises(StallError, match=r"no client came within 1 s.*does not have this job's key"):
            accepted.result(10)


def test_a_stranger_does_not_end_the_server():
    with listening() as (listener, port), ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(lines.accept, listener, KEY, 20.0, 10.0)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.0\r\n\r\n".ljust(64))
        with lines.connect("127.0.0.1", port, KEY, 10.0, 10.0) as client, accepted.result(20) as server:
            client.send(Ready("a"))
            assert server.receive(Ready, "a step").step == "a"


def test_nobody_there_names_what_was_tried():
    with listening() as (_, port):
        pass
    with pytest.raises(StallError, match=f"no process answers at 127.0.0.1:{port} within 0.2 s.*same -p"):
        lines.connect("127.0.0.1", port, KEY, 0.2, 1.0)


def test_a_port_in_use_is_an_error_in_words():
    with listening() as (_, port), pytest.raises(ConfigError, match=f"port {port}.*-p"):
        lines.listen(port, "127.0.0.1")


@pytest.mark.parametrize(("text", "expected"), [
    ("h0", ("h0", 7)), ("h0:12", ("h0", 12)), ("::1", ("::1", 7)), ("[::1]:12", ("::1", 12)), ("[::1]", ("::1", 7)),
])
def test_host_and_port(text, expected):
    assert lines.host_and_port(text, 7) == expected


@pytest.mark.parametrize("text", ["h0:", "h0:x", ":7", "h0:70000"])
def test_what_is_no_host_and_port(text):
    with pytest.raises(ConfigError):
        lines.host_and_port(text, 7)


def test_strangers_who_say_nothing_keep_no_client_waiting():
    with listening() as (listener, port), ThreadPoolExecutor(1) as executor, contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10.0))
        accepted = executor.submit(lines.accept, listener, KEY, 10.0, 10.0)
        with lines.connect("127.0.0.1", port, KEY, 10.0, 10.0), accepted.result(4.0):
            pass


SET = {"job_key": "ab" * 32}
LOOPBACK = ["127.0.0.1", "::1", "localhost"]


@pytest.mark.parametrize(("values", "hosts", "is_public"), [
    (SET, ["10.0.0.1"], False), (SET | {"insecure": True}, ["10.0.0.1"], False), (SET, LOOPBACK, False),
    ({}, LOOPBACK, False), ({"insecure": True}, LOOPBACK, False), ({"encryption": "on"}, LOOPBACK, False),
    ({"insecure": True}, ["10.0.0.1"], True), ({"insecure": True}, ["localhost", "gpu01"], True),
])
def test_with_which_key_one_measures(values, hosts, is_public):
    found = lines.secret_for(load(values, {}), hosts)
    assert found.is_public == is_public
    assert (found.key == bytes.fromhex(SET["job_key"])) == ("job_key" in values)


@pytest.mark.parametrize("hosts", [["10.0.0.1"], ["localhost", "gpu01"]])
def test_without_a_key_nobody_measures_with_other_machines(hosts):
    for choose, where in ((lines.secret_for, hosts), (lines.listen_address, hosts[-1])):
        with pytest.raises(ConfigError) as caught:
            choose(load({}, {}), where)
        for words in (hosts[-1], "BPSFAST_JOB_KEY", "openssl rand -hex 32", "BPSFAST_INSECURE=1"):
            assert words in str(caught.value)


@pytest.mark.parametrize(("values", "wished", "host", "is_public"), [
    ({}, "", "127.0.0.1", False), ({}, "localhost", "localhost", False), (SET, "", "", False),
    (SET, "10.0.0.1", "10.0.0.1", False), ({"insecure": True}, "", "", True),
])
def test_where_one_listens(values, wished, host, is_public):
    place = lines.listen_address(load(values, {}), wished)
    assert (place.host, place.secret.is_public) == (host, is_public)
    assert ("BPSFAST_JOB_KEY" in place.remark) == (not values and not wished)


@pytest.mark.parametrize("name", ["a..b", "x" * 70 + ".example", "no-such-host.invalid"])
def test_what_is_no_name_is_said_in_words(name):
    with pytest.raises(ConfigError, match=rf"host name '{name}' cannot be resolved: "):
        lines.connect(name, 1, b"key", 1.0, 1.0)
    with pytest.raises(ConfigError, match=rf"cannot listen on port 1 of '{name}': .*BPSFAST_NODE_HOST"):
        lines.listen(1, name)
