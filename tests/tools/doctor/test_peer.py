"""Two doctors that talk: what each learns, who is refused, and that nothing hangs or leaks."""
from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from bpsfast.orchestration import security
from bpsfast.pyx import verbs
from bpsfast.tools.doctor import peer
from bpsfast.tools.doctor.facts import Facts
from bpsfast.tools.perf.control import Secret
from tests.sysfs_trees.machine import Machine

LOCAL = ipaddress.ip_address("127.0.0.1")
SECRET = "ab" * 32


def secret_of(text: str) -> Secret:
    """The key that is given as *text*, "": one of this machine."""
    return Secret(security.job_key(text, "doctor"))


class Answering:
    """A listener in a thread, with the facts of a recorded machine; `said` is what it reports of its one asker."""

    def __init__(self, machine: Machine, secret: str = "", provider: object = None, timeout_s: float = 5.0) -> None:
        self.said = ""
        self._machine = machine
        self.listener = peer.Listener("127.0.0.1", 0, secret_of(secret), self._facts, provider, timeout_s)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _facts(self, _: object) -> Facts:
        return self._machine.facts()

    def _serve(self) -> None:
        self.said = self.listener.serve(20)

    @property
    def port(self) -> int:
        return self.listener.port

    def end(self) -> str:
        self._thread.join(20)
        assert not self._thread.is_alive()
        self.listener.close()
        return self.said


@pytest.fixture
def answering(recorded_machine: Callable[[str], Machine], no_leaks: None) -> Iterator[Callable[..., Answering]]:
    started: list[Answering] = []

    def start(name: str, *arguments: object, **values: object) -> Answering:
        started.append(Answering(recorded_machine(name), *arguments, **values))
        return started[-1]

    yield start
    for each in started:
        each.end()


def ask(facts: Facts, port: int, secret: str = "", provider: object = None, timeout_s: float = 5.0) -> Facts:
    peer.ask(facts, LOCAL, port, secret_of(secret).key, timeout_s, provider)
    return facts


def test_the_asker_learns_the_ports_and_that_it_is_reached(answering: Callable[..., Answering],
                                                          recorded_machine: Callable[[str], Machine]) -> None:
    other = answering("mlx5_roce")
    facts = ask(recorded_machine("rxe").facts(), other.port)
    report = facts.peer_report
    assert report is not None and report.hostname == "gpu07" and report.reached == "open"
    assert [(port.name, port.gid, port.gid_version, port.mtu, port.path_mtu) for port in report.used] == [
        ("mlx5_0/1", "10.1.0.7", "v2", 9000, 4096), ("mlx5_1/1", "10.2.0.7", "v2", 1500, 1024)]
    assert not report.spare
    assert facts.peer_silence == "" and facts.trial_error is None
    assert other.end() == "127.0.0.1: sent the report"


def test_infiniband_is_told_by_lid_and_rejected_ports_with_reasons(
        answering: Callable[..., Answering], recorded_machine: Callable[[str], Machine]) -> None:
    report = ask(recorded_machine("rxe").facts(), answering("infiniband").port).peer_report
    assert report is not None and report.used[0].lid == 42 and report.used[0].address is None
    assert report.rejected == {"mlx5_1/1": "the port is DOWN (Polling), not ACTIVE"}


def test_a_secret_that_both_have_lets_them_talk(answering: Callable[..., Answering],
                                                recorded_machine: Callable[[str], Machine]) -> None:
    assert ask(recorded_machine("rxe").facts(), answering("rxe", SECRET).port, SECRET).peer_report is not None


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, ""), ("", SECRET), (SECRET, "cd" * 32)])
def test_who_has_another_secret_learns_nothing(theirs: str, ours: str, answering: Callable[..., Answering],
                                               recorded_machine: Callable[[str], Machine]) -> None:
    other = answering("mlx5_roce", theirs)
    facts = ask(recorded_machine("rxe").facts(), other.port, ours)
    assert facts.peer_report is None and "key" in facts.peer_silence and "--listen" in facts.peer_silence
    assert "does not have this job's key" in other.end()


def test_under_a_key_that_everybody_knows_no_connection_back_is_tried(recorded_machine: Callable[[str], Machine],
                                                                      no_leaks: None) -> None:
    """Whoever asks names the port: he would learn which ports of a host are open that trusts the listener."""
    public = Secret(secret_of("").key, is_public=True)
    with peer.Listener("127.0.0.1", 0, public, lambda _: recorded_machine("mlx5_roce").facts()) as listener:
        thread = threading.Thread(target=listener.serve, args=(20,))
        thread.start()
        report = ask(recorded_machine("rxe").facts(), listener.port).peer_report
        thread.join(20)
    assert report is not None and report.reached == ""


def test_strangers_who_say_nothing_keep_no_doctor_waiting(answering: Callable[..., Answering],
                                                          recorded_machine: Callable[[str], Machine]) -> None:
    other = answering("mlx5_roce", timeout_s=30.0)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection(("127.0.0.1", other.port), 5))
        assert ask(recorded_machine("rxe").facts(), other.port).peer_report is not None
        assert other.end() == "127.0.0.1: sent the report"


def test_nobody_there_is_said_in_words(recorded_machine: Callable[[str], Machine], no_leaks: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    facts = ask(recorded_machine("rxe").facts(), port)
    assert facts.peer_report is None
    assert facts.peer_silence == (f"no doctor answers at 127.0.0.1 port {port}: Connection refused; run `bpsfast "
                                  "doctor --listen` there")


def test_somebody_who_says_nothing_costs_the_time_limit_only(recorded_machine: Callable[[str], Machine],
                                                             no_leaks: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        facts = ask(recorded_machine("rxe").facts(), silent.getsockname()[1], timeout_s=0.3)
    assert facts.peer_report is None and "0.3 s" in facts.peer_silence


@pytest.mark.parametrize("noise", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100, b"BPSFAST1" + b"\xff" * 200])
def test_strangers_are_sent_away_and_named(noise: bytes, answering: Callable[..., Answering]) -> None:
    other = answering("rxe", timeout_s=1.0)
    with socket.create_connection(("127.0.0.1", other.port), 5) as sock:
        with contextlib.suppress(OSError):  # it may have hung up at the first byte
            sock.sendall(noise)
            sock.shutdown(socket.SHUT_WR)
        assert other.end().startswith("127.0.0.1: not answered: ")


def test_nobody_who_asks_is_a_timeout(recorded_machine: Callable[[str], Machine], no_leaks: None) -> None:
    machine = recorded_machine("rxe")
    with (peer.Listener("127.0.0.1", 0, secret_of(""), lambda _: machine.facts()) as listener,
          pytest.raises(TimeoutError, match=r"no doctor asked within 0\.05 s")):
        listener.serve(0.05)


def test_a_queue_pair_that_cannot_be_made_here_is_told(answering: Callable[..., Answering],
                                                       recorded_machine: Callable[[str], Machine]) -> None:
    other = answering("rxe")
    facts = recorded_machine("mlx5_roce").facts()  # mlx5_0, which the machine of this test does not have
    ask(facts, other.port, provider=verbs)
    assert facts.peer_report is not None and facts.trial_error and "mlx5_0" in facts.trial_error
    assert other.end() == "127.0.0.1: sent the report"


class _Opened:
    """What a queue pair is made of, without a device."""

    address = rkey = lkey = number = psn = 1

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __enter__(self) -> _Opened:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def port(self, number: int) -> dict[str, object]:
        return {"link_layer": "InfiniBand", "lid": number, "active_mtu": 4096}

    def to_init(self, port: int, pkey_index: int) -> None:
        assert port == 1 and pkey_index == 0

    def to_rtr(self, *_: object, **__: object) -> None:
        raise AssertionError("ports of different partitions were connected")


def test_ports_of_different_partitions_are_named(answering: Callable[..., Answering],
                                                 recorded_machine: Callable[[str], Machine]) -> None:
    """Both ends have a port with one partition key, each another one: no queue pair is connected."""
    made = SimpleNamespace(**dict.fromkeys(
        ("Device", "ProtectionDomain", "MemoryRegion", "CompletionQueue", "QueuePair"), _Opened))

    other, here = answering("infiniband", provider=made), recorded_machine("mlx5_roce")
    for machine, key in ((other._machine, "0x8002"), (here, "0x8001")):
        machine.write("sys/class/infiniband/mlx5_0/ports/1/pkeys/0", f"{key}\n")
    facts = ask(here.facts(), other.port, provider=made)
    assert facts.trial_error is not None
    assert "at the peer: mlx5_0/1 has the partition key 0x8002, the peer's port 0x8001" in facts.trial_error
    assert "the queue pair did not connect" in other.end()
