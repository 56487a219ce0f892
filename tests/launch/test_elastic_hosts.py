"""Tests the hosts of an elastic job: where workers are started, and what follows when hosts come, leave or are lost."""
from __future__ import annotations

import math
import selectors
import types
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from bpsfast.launch import elastic_hosts
from bpsfast.launch.elastic_hosts import HostWorkers, cooldown
from bpsfast.launch.elastic_service import ReplaceWorker, member_of
from bpsfast.launch.host_list import Host
from bpsfast.launch.processes import Command, Kind
from bpsfast.orchestration.elastic.coordinator import ElasticRules
from bpsfast.orchestration.errors import ConfigError, PeerLostError, StallError
from bpsfast.orchestration.wake_up import WakeUp

pytestmark = pytest.mark.timeout(60)


class Remote:
    """A host whose end the test decides."""

    def __init__(self, host):
        self.host, self.lost, self.why_lost = host, "", ""
        self.is_closing, self.has_ended, self.was_killed, self.has_running = False, False, False, False

    def begin_close(self):
        self.is_closing = True

    def kill(self):
        self.was_killed = True


class Connection:
    """A connection that comes up at once, unless its host has an error."""

    def __init__(self, host, error=None, is_slow=False):
        self.remote, self.error, self.address = Remote(host), error, "" if is_slow or error else "10.0.0.9"
        self.was_aborted = False

    @property
    def is_ready(self):
        return bool(self.address)

    def tick(self, now_s):
        return math.inf

    def abort(self):
        self.was_aborted = True


class Service:
    """An elastic service that only keeps what it is told."""

    def __init__(self):
        self.is_over = self.has_failed = False
        self.holders, self.alive, self.told, self.lost = set(), set(), [], []

    fileno = orders = give_up = None

    def holds_rank(self, member):
        return member in self.holders

    def started(self, member, instead_of, was_ordered):
        self.alive.add(member)

    def ended(self, member, how, is_own_failure=False):
        self.alive.discard(member)
        self.lost.append(member)

    def left(self, member):
        self.alive.discard(member)

    def leave(self, members):
        self.told += members

    def was_left_behind(self, member):
        return False


class Discovery:
    """Lists that the test gives."""

    def __init__(self):
        self.lists, self._wake = [], WakeUp()
        self.fileno = self._wake.fileno

    def take(self):
        found, self.lists = self.lists, []
        return found


class Job:
    """A `HostWorkers` whose hosts, clock and service are the test's."""

    def __init__(self, *hosts, policy="shrink", max_ranks=4, n=None, errors=None, slow=(), cooldown_s=60.0, **rules):
        self.service, self.discovery, self.said, self.forgotten = Service(), Discovery(), [], []
        self.errors, self.slow = errors or {}, slow
        self.connections: list[Connection] = []
        self.selector = selectors.EpollSelector()
        self.rules = ElasticRules(lost_worker=policy, max_ranks=max_ranks, **rules)
        self.pool = HostWorkers(self.service, self.rules, hosts, connect=self.connect, forget=self.forgotten.append,
                                command_of=lambda host, address: Command("", Kind.RANK, (host.name, address), {}),
                                selector=self.selector, say=self.said.append, cooldown_s=cooldown_s)
        self.now_s = 0.0
        self.running = {}
        if n is not None:
            commands, remotes = self.pool.first(self.pool.connect_first(n, 1.0))
            self.service.holders |= {member_of(command) for command in commands}
            self._begin(zip(commands, remotes))

    def connect(self, host):
        self.connections.append(Connection(host, self.errors.get(host.name), host.name in self.slow))
        return self.connections[-1]

    def _begin(self, launches):
        for command, remote in launches:
            assert not remote.lost and not remote.is_closing
            self.running[member_of(command)] = types.SimpleNamespace(
                command=command, remote=remote, code=None, is_lost=False, end_in_words=lambda: "is gone")

    def step(self, seconds=0.0):
        """Let *seconds* pass; return the numbers of the workers that are started, by host."""
        self.now_s += seconds
        self.pool.step(self.now_s)
        launches = self.pool.launches()
        self._begin(launches)
        return Counter(command.argv[0] for command, _ in launches)

    def list(self, *hosts):
        self.pool._lists.append(list(hosts))

    def on(self, name):
        return sorted(member for member, process in self.running.items() if process.command.argv[0] == name)

    def end(self, member, code=-9, is_lost=False):
        process = self.running.pop(member)
        process.code, process.is_lost = code, is_lost
        return self.pool.has_ended(process)

    def lose(self, name):
        """Lose a host with all that runs there."""
        remote = next(each.remote for each in reversed(self.connections) if each.remote.host.name == name)
        remote.lost, remote.why_lost = f"was lost with its host {name} (a cable)", "a cable"
        for member in self.on(name):
            assert self.end(member, 255, is_lost=True)
        return remote


A, B, C = Host("a", 2), Host("b", 2), Host("c", 2)


def test_workers_fill_hosts_in_their_order_and_further_slots_up_to_the_most():
    job = Job(A, B, C, n=3, max_ranks=5)
    assert (job.on("a"), job.on("b")) == ([0, 1], [2])
    assert job.running[2].command.argv == ("b", "10.0.0.9")
    assert job.step() == {"b": 1, "c": 1} and job.step() == {}


def test_no_more_hosts_are_connected_than_are_needed():
    job = Job(A, B, C, n=2, max_ranks=3)
    assert [each.remote.host for each in job.connections] == [A, B]


def test_without_a_number_all_slots_are_used():
    job = Job(A, B, max_ranks=3)
    assert job.pool.connect_first(None, 1.0) == 3


def test_a_host_of_a_list_that_cannot_be_used_is_an_error():
    with pytest.raises(PeerLostError, match="b: not reached"):
        Job(A, B, n=4, errors={"b": PeerLostError("b: not reached")})
    with pytest.raises(ConfigError, match="2 of 2 hosts cannot be used"):
        Job(A, B, n=4, errors={"a": PeerLostError("a: not reached"), "b": ConfigError("b: no folder")})
    with pytest.raises(ConfigError, match="-n 5 asks for more ranks than the hosts have slots"):
        Job(A, B, n=5, max_ranks=5)


def test_discovered_hosts_are_waited_for_until_the_deadline():
    job = Job(errors={"b": PeerLostError("b: not reached")})
    job.pool._discovery = job.discovery
    job.list(A, B)
    with pytest.raises(StallError, match=r"2 slots are connected after 0\.1 s \(--within\), and 3 ranks are to begin; "
                                         r"the script lists a:2, b:2 \(b: not reached\)"):
        job.pool.connect_first(3, 0.1)
    assert job.pool.connect_first(2, 0.1) == 2


def test_a_script_that_fails_at_first_is_an_error_and_later_a_warning():
    job = Job()
    job.pool._lists.append(ConfigError("the script ended with exit code 1"))
    with pytest.raises(ConfigError, match="exit code 1"):
        job.step()
    job = Job(A, n=1, max_ranks=1)
    job.pool._lists.append(ConfigError("the script ended with exit code 1"))
    assert job.step() == {}
    assert job.said[-1] == "the script ended with exit code 1: the last list of hosts is kept"


def test_a_new_host_gets_workers():
    job = Job(A, n=2)
    assert job.step() == {}
    job.list(A, B)
    job.step()
    assert job.step() == {"b": 2} and job.pool.adopted()[-1] is job.connections[-1].remote


def test_a_host_that_is_not_listed_any_more_is_released_once_its_workers_have_left():
    job = Job(A, B, n=4)
    job.list(A)
    assert job.step() == {} and job.service.told == [2, 3]
    assert "host b is not listed any more: worker 2, worker 3 will leave at the next commit" in job.said
    remote = job.connections[1].remote
    job.step(3600.0)
    assert not remote.is_closing, "they have ranks: until the next commit"
    job.service.holders -= {2, 3}
    job.step()
    assert job.end(2, 0) and job.service.lost == []
    job.step()
    assert not remote.is_closing
    assert job.end(3, 0)
    assert job.step() == {} and remote.is_closing and job.pool.released() == []
    remote.has_ended = remote.has_running = True
    assert job.pool.released() == [], "its processes are not known to have ended yet"
    remote.has_running = False
    assert job.pool.released() == [remote] == job.forgotten


@pytest.mark.parametrize("policy", ["shrink", "wait"])
def test_a_worker_that_outlives_its_end_keeps_its_slot_and_is_replaced_once(policy):
    job = Job(A, B, n=4, policy=policy)
    job.pool.outlives(job.running.pop(1))
    job.service.holders.discard(1) if policy == "shrink" else None
    assert job.step() == {}
    if policy == "wait":
        job.pool.take(ReplaceWorker(1))
        assert sum(job.step().values()) <= 1 and job.step() == {}


def test_a_worker_that_was_let_go_and_does_not_end_is_ended_with_its_host():
    job = Job(A, B, n=4)
    job.list(A)
    job.step()
    job.service.holders -= {2, 3}
    job.step()
    remote = job.connections[1].remote
    job.step(elastic_hosts._LEAVE_S - 1.0)
    assert not remote.is_closing
    job.step(2.0)
    assert remote.is_closing
    job.lose("b")
    assert job.service.lost == [], "they were not needed any more"
    job.step(elastic_hosts._END_S + 1.0)
    assert remote.was_killed


def test_a_host_that_is_listed_again_gets_new_workers_and_one_with_fewer_slots_fewer():
    job = Job(A, B, n=4)
    job.list(A)
    job.step()
    job.list(A, Host("b", 1))
    assert job.step() == {}
    job.service.holders -= {2, 3}
    for member in (2, 3):
        assert job.end(member, 0)
    assert job.step() == {"b": 1}
    job.list(Host("a", 1), Host("b", 1))
    assert job.step() == {} and job.service.told[2:] == [1]


def test_a_lost_host_is_blacklisted_and_then_connected_again():
    job = Job(A, B, n=4)
    for cooldown_s in (60.0, 120.0):
        remote = job.lose("b")
        assert job.step() == {} and remote.is_closing
        assert job.said[-1] == f"host b is lost (a cable): no worker is started there for {cooldown_s:g} s"
        n_before = len(job.connections)
        assert job.step(cooldown_s - 1.0) == {} and len(job.connections) == n_before
        job.step(1.0)
        assert job.step() == {"b": 2}


def test_without_a_cooldown_a_lost_host_is_not_used_again():
    job = Job(A, B, n=4, cooldown_s=0.0)
    job.lose("b")
    job.step()
    assert job.said[-1].endswith("no worker is started there for the rest of the job")
    assert job.step(1e9) == {} and len(job.connections) == 2


@pytest.mark.parametrize(("first_s", "n_failures", "expected"), [
    (60.0, 1, 60.0), (60.0, 3, 240.0), (60.0, 99, 3600.0), (0.0, 1, math.inf), (7200.0, 5, 7200.0)])
def test_cooldown(first_s, n_failures, expected):
    assert cooldown(first_s, n_failures) == expected


def test_a_lost_worker_is_replaced_on_its_host_or_on_another_one_if_that_is_gone():
    job = Job(A, B, C, policy="wait", n=4, max_ranks=4)
    job.end(0)
    assert job.step() == {}, "no newcomer takes its place"
    job.pool.take(ReplaceWorker(0))
    assert job.step() == {"a": 1}
    job.lose("b")
    for member in (2, 3):
        job.pool.take(ReplaceWorker(member))
    job.step()
    assert job.step() == {"c": 2}, "which was not needed before"


def test_a_replacement_waits_for_a_free_slot_unless_it_is_not_needed_any_more():
    job = Job(A, B, policy="wait", n=4)
    job.lose("b")
    for member in (2, 3):
        job.pool.take(ReplaceWorker(member))
    assert job.step() == {}
    job.service.holders.discard(3)  # a newcomer has its rank
    job.step(60.0)
    assert job.step() == {"b": 2} and job.pool._to_replace == [], "one instead of worker 2, and one more"


def test_a_worker_that_fails_is_not_started_again_and_again():
    job = Job(A, n=2, max_ranks=2)
    job.end(1, 1)
    assert [job.step(1.0) for _ in range(5)] == [{}] * 5
    job.lose("a")
    job.step()
    job.step(60.0)
    assert job.step() == {"a": 2}, "a host that is connected anew is as a new one"


def test_nothing_is_started_once_the_training_is_over():
    job = Job(A, B, n=2, max_ranks=4)
    job.service.is_over = True
    assert job.step() == {}


@pytest.mark.parametrize("is_slow", [False, True])
def test_a_host_that_is_not_listed_any_more_is_not_connected(is_slow):
    job = Job(A, n=2, slow=("b",) if is_slow else ())
    job.list(A, B)
    job.step()
    job.list(A)
    assert job.step() == {} and job.connections[1].was_aborted is is_slow and job.connections[1].remote.is_closing
    assert job.step(100.0) == {} and len(job.connections) == 2


DEEDS = st.lists(st.tuples(st.sampled_from(["list", "lose", "kill", "fail", "end", "order", "form", "time", "connect"]),
                           st.integers(0, 999)), max_size=60)


@given(st.sampled_from(["shrink", "wait"]), st.integers(1, 5), DEEDS)
def test_whatever_happens_no_slot_has_two_workers_and_there_are_not_too_many(policy, max_ranks, deeds):
    hosts = [Host(name, slots) for name, slots in zip("abcd", (1, 2, 3, 1))]
    job = Job(*hosts, policy=policy, max_ranks=max_ranks, n=1, slow=("d",))
    listed, ordered = {host.name for host in hosts}, set()
    for kind, number in [*deeds, ("time", 7200), ("time", 0), ("time", 0)]:
        living = sorted(job.running)
        who = living[number % len(living)] if living else None
        if kind == "list":
            listed = {name for index, name in enumerate("abcd") if number >> index & 1}
            job.list(*(host for host in hosts if host.name in listed))
        elif kind == "lose" and (name := "abcd"[number % 4]) and job.on(name):
            job.lose(name)
        elif kind in ("kill", "fail", "end") and who is not None:
            assert job.end(who, {"kill": -9, "fail": 1, "end": 0}[kind])
        elif kind == "order" and policy == "wait":
            for member in job.service.lost:
                if member in job.service.holders and member not in ordered and member not in job.service.told:
                    ordered.add(member)
                    job.pool.take(ReplaceWorker(member))
        elif kind == "form":
            job.service.holders = set(job.running) - set(job.service.told)
        elif kind == "connect":
            for connection in job.connections:
                connection.address = connection.address or ("" if connection.error else "10.0.0.9")
        started = job.step(number if kind == "time" else 0.0)
        assert set(started) <= listed, "workers are started on listed hosts only"
        for host in hosts:
            assert len(job.on(host.name)) <= host.slots
        assert len(set(job.running) - set(job.service.told)) <= max_ranks
