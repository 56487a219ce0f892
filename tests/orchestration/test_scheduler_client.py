"""A node's side of the control plane: when it believes that the scheduler is gone, and dials anew."""
from __future__ import annotations

import secrets
import socket
import threading
import time

import pytest
import zmq

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import CapacityError, PeerLostError, ProtocolError, StallError
from bpsfast.orchestration.scheduler_client import SchedulerClient
from bpsfast.orchestration.security import curve_pair

KEY = secrets.token_bytes(32)  # of this process alone: ports come back
LIMIT_MS = 20_000


class FakeScheduler:
    """A scheduler's socket whose every word is the test's."""

    def __init__(self):
        self.context = zmq.Context()
        self.router = self.context.socket(zmq.ROUTER)
        self.router.linger = 1000
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = curve_pair(KEY, "scheduler")
        self.port = self.router.bind_to_random_port("tcp://127.0.0.1")
        self.client = b""

    def hear(self):
        assert self.router.poll(LIMIT_MS)
        self.client, data = self.router.recv_multipart()
        return m.decode(data, "node")

    def say(self, *spoken):
        for message in spoken:
            self.router.send_multipart([self.client, m.encode(message)])

    def close(self):
        self.router.close()
        self.context.term()


@pytest.fixture
def fake():
    fake = FakeScheduler()
    yield fake
    if not fake.router.closed:
        fake.close()


@pytest.fixture
def membership(fake):
    membership = SchedulerClient("127.0.0.1", fake.port, KEY, now=0.0, heartbeat_s=1.0, lease_s=10.0,
                                 start_timeout_s=60.0)
    yield membership
    membership.close(0)


def receive(membership, now):
    """What the next arrival brings."""
    assert membership.sockets[0].poll(LIMIT_MS)
    return membership.recv_nowait(now)


def tick_until_dialled(membership, now):
    """Tick, as a node does after every event, until it has dialled anew."""
    until = time.monotonic() + LIMIT_MS / 1000
    while not membership.tick(now):
        assert time.monotonic() < until
        membership.sockets[1].poll(100)
        membership.recv_nowait(now)


def test_heartbeats_are_sent_when_due_and_not_handed_on(fake, membership):
    for now in (0.5, 1.0, 1.5, 2.0):
        membership.tick(now)
    assert [fake.hear(), fake.hear()] == [m.Heartbeat(sequence=1), m.Heartbeat(sequence=2)]
    fake.say(m.Heartbeat(sequence=1), m.BarrierDone(sequence=4))
    received = receive(membership, 3.0)
    while not received:
        received = receive(membership, 3.0)
    assert received == [m.BarrierDone(sequence=4)]
    assert not fake.router.poll(0)


def greeted(fake, membership, now):
    """The scheduler has spoken, at *now*; return who it has spoken to."""
    membership.send(m.Ready(generation=1))
    while not isinstance(fake.hear(), m.Ready):
        pass
    fake.say(m.Heartbeat(sequence=1))
    assert receive(membership, now) == []
    return fake.client


def pass_time(membership, begin, end):
    """Tick as time passes, several times a heartbeat; return when it has dialled anew."""
    return [now for now in [begin + i / 4 for i in range(int((end - begin) * 4) + 1)] if membership.tick(now)]


def test_after_half_a_lease_of_silence_another_connection_is_made(fake, membership):
    before = greeted(fake, membership, 100.0)
    sockets = membership.sockets
    assert pass_time(membership, 100.0, 105.0) == [105.0]
    assert all(sock.closed for sock in sockets) and membership.sockets != sockets
    membership.send(m.Ready(generation=2))
    while fake.hear() != m.Ready(generation=2):
        pass
    assert fake.client != before, "nothing that is meant for the one is taken for the other's"
    fake.say(m.BarrierDone(sequence=1))
    assert receive(membership, 105.5) == [m.BarrierDone(sequence=1)]
    assert pass_time(membership, 105.5, 110.0) == []


def test_connections_that_nobody_answers_are_made_anew_until_the_deadline(fake, membership):
    greeted(fake, membership, 100.0)
    assert pass_time(membership, 100.0, 115.0) == [105.0, 107.5, 110.0, 112.5, 115.0]
    with pytest.raises(PeerLostError, match=rf"127.0.0.1:{fake.port} is gone: it has been silent for 5.0 s .*"
                                            r"none has answered there since, for 60.0 s \(start_timeout_s = 60\)"):
        pass_time(membership, 115.0, 160.0)


def test_whoever_slept_blames_nobody(fake, membership):
    greeted(fake, membership, 100.0)
    assert not membership.tick(150.0)
    assert pass_time(membership, 150.0, 154.0) == []
    assert pass_time(membership, 154.0, 156.0) == [155.0]


def test_silence_from_the_start_is_a_stall(fake, membership):
    membership.send(m.Ready(generation=1))
    fake.hear()
    membership.tick(59.9)
    with pytest.raises(StallError, match=r"start_timeout_s = 60 s \(connected, but the scheduler never answered"):
        membership.tick(60.0)


def test_a_connection_that_is_closed_is_made_anew_at_once(fake, membership):
    greeted(fake, membership, 0.0)
    fake.router.unbind(fake.router.last_endpoint)
    fake.close()
    tick_until_dialled(membership, 0.5)
    with pytest.raises(PeerLostError, match="the connection closed without a last message, and none has answered"):
        pass_time(membership, 0.5, 60.5)


@pytest.mark.parametrize("word", [m.Abort(error="StallError", reason="x"), m.Finish(), m.Refuse(error="E", reason="x")])
def test_a_last_word_is_read_before_the_loss_is_believed(fake, membership, word):
    membership.send(m.Ready(generation=1))
    fake.hear()
    fake.say(word)
    fake.close()
    assert membership.sockets[1].poll(LIMIT_MS)
    membership.tick(5.0)
    assert receive(membership, 5.0) == [word]
    for now in (6.0, 600.0):
        membership.tick(now)


def test_what_is_no_message_is_a_protocol_error(fake, membership):
    membership.send(m.Ready(generation=1))
    fake.hear()
    fake.router.send_multipart([fake.client, b"rubbish"])
    with pytest.raises(ProtocolError, match="7 bytes from a scheduler"):
        receive(membership, 1.0)


def test_closing_twice_does_nothing(membership):
    membership.close(0)
    membership.close(0)


def test_heartbeats_ask_for_the_time_and_answers_say_how_far_the_clock_is_ahead(fake):
    asking = SchedulerClient("127.0.0.1", fake.port, KEY, now=0.0, asks_time=True)
    try:
        asking.tick(0.0)  # the first one is not waited for
        for _ in range(8):
            heartbeat = fake.hear()
            assert 0 < heartbeat.sent_ns <= time.monotonic_ns()
            fake.say(m.Echo(sent_ns=heartbeat.sent_ns, there_ns=time.monotonic_ns() + 10**12))
            assert receive(asking, 0.1) == []
        assert asking.clock.n_samples == 8 and not fake.router.poll(0)  # the next one comes with the next heartbeat
        (point,) = asking.clock.points
        assert abs(point.offset_ns - 10**12) <= point.uncertainty_ns < 20 * 10**9
        asking.tick(1.0)
        assert fake.hear().sequence == 9
    finally:
        asking.close(0)


def test_the_first_word_over_another_connection_is_a_short_one(fake, membership):
    """Whoever says all at once before it is known would be cut off as a stranger."""
    before = greeted(fake, membership, 100.0)
    assert pass_time(membership, 100.0, 105.0) == [105.0]
    membership.send(m.Ready(generation=2))
    while True:
        message = fake.hear()
        if fake.client != before:
            break
    assert isinstance(message, m.Heartbeat)
    while isinstance(message, m.Heartbeat):  # a slow machine's is not the only one
        message = fake.hear()
    assert message == m.Ready(generation=2)


class Resolver:
    """The system's resolver: `says` an address, several, an error, or, while it is None, nothing."""

    def __init__(self):
        self.says = None
        self.changed = threading.Condition()
        self.asked = 0

    def answer(self, says):
        with self.changed:
            self.says = says
            self.changed.notify_all()

    def getaddrinfo(self, host, *arguments, **keywords):
        assert host == "scheduler.example"
        with self.changed:
            self.asked += 1
            assert self.changed.wait_for(lambda: self.says is not None, LIMIT_MS / 1000)
            if isinstance(self.says, OSError):
                raise self.says
            said = self.says if isinstance(self.says, list) else [self.says]
            said.append(said.pop(0))  # in another order each time, as resolvers do
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in said]


@pytest.fixture
def resolver(monkeypatch):
    found = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    yield found
    found.answer(OSError("the test is over"))


@pytest.fixture
def named(fake, resolver):
    """The membership of a node that knows the scheduler by name; the resolver has not answered yet."""
    begin = time.monotonic()
    made = SchedulerClient("scheduler.example", fake.port, KEY, now=0.0, lease_s=10.0, start_timeout_s=60.0)
    assert time.monotonic() - begin < 5.0
    yield made
    made.close(0)


def test_what_is_said_before_the_schedulers_name_is_resolved_goes_out_then(fake, resolver, named):
    named.send(m.RankLeft(rank=7))
    begin = time.monotonic()
    for now in (0.1, 0.5):
        assert not named.tick(now) and not named.recv_nowait(now)
    assert time.monotonic() - begin < 5.0, "the resolver's thread waits, and nobody else"
    resolver.answer("127.0.0.1")
    until = time.monotonic() + LIMIT_MS / 1000
    while not fake.router.poll(10):
        assert not named.tick(0.6) and time.monotonic() < until
    assert fake.hear() == m.RankLeft(rank=7)


def test_a_name_that_is_not_found_is_looked_up_again_and_named_in_the_end(resolver, named):
    resolver.answer(socket.gaierror(socket.EAI_NONAME, "Name or service not known"))
    until = time.monotonic() + LIMIT_MS / 1000
    while resolver.asked < 3:
        assert time.monotonic() < until
        named.tick(time.monotonic() % 50.0)
    with pytest.raises(StallError, match=r"the name 'scheduler\.example' was not resolved"):
        named.tick(60.0)


def test_during_an_outage_of_the_resolver_its_last_answer_counts(fake, resolver, named):
    resolver.answer("127.0.0.1")
    named.send(m.Heartbeat(sequence=1))
    until = time.monotonic() + LIMIT_MS / 1000
    while not fake.router.poll(10):
        assert not named.tick(0.2) and time.monotonic() < until
    fake.hear()
    fake.say(m.BarrierDone(sequence=1))
    assert receive(named, 0.3)
    resolver.answer(None)
    assert [named.tick(0.5 * i) for i in range(1, 12)] == [False] * 10 + [True], "silent for half of the lease"
    assert isinstance(fake.hear(), m.Heartbeat), "over another connection, while the resolver says nothing"


def test_a_scheduler_that_has_another_address_by_now_is_dialled_there(fake, resolver, named):
    resolver.answer("127.0.0.2")  # nobody listens there
    until = time.monotonic() + LIMIT_MS / 1000
    while named._connected_to != ("127.0.0.2", fake.port):
        assert not named.tick(0.2) and time.monotonic() < until
    resolver.answer("127.0.0.1")
    while not named.tick(1.5):
        assert time.monotonic() < until
    named.send(m.RankLeft(rank=7))
    assert isinstance(fake.hear(), m.Heartbeat) and fake.hear() == m.RankLeft(rank=7)


def test_a_name_with_several_addresses_is_not_dialled_anew_for_their_order(resolver, named):
    resolver.answer(["127.0.0.2", "127.0.0.3"])
    until = time.monotonic() + LIMIT_MS / 1000
    while not named._connected_to:
        assert not named.tick(0.2) and time.monotonic() < until
    while resolver.asked < 6:  # it looks again and again, since nobody answers
        assert not named.tick(1.0 + resolver.asked) and time.monotonic() < until


def test_all_addresses_of_a_name_are_dialled_in_turn(resolver, named):
    resolver.answer(["127.0.0.2", "127.0.0.3"])
    until = time.monotonic() + LIMIT_MS / 1000
    while not named._connected_to:
        assert not named.tick(0.2) and time.monotonic() < until
    found = []
    for now in range(1, 25):
        if named.tick(float(now)):
            found.append(named._connected_to[0])
    assert found[:3] in (["127.0.0.2", "127.0.0.3", "127.0.0.2"], ["127.0.0.3", "127.0.0.2", "127.0.0.3"])


def test_a_message_that_is_longer_than_the_scheduler_reads_is_refused_where_it_is_made(membership):
    with pytest.raises(CapacityError, match=r"a Publish of \d+ bytes is longer than the scheduler reads \(16777216\)"):
        membership.send(m.Publish(rank=0, key="k", question=1, value=bytes(m.LONGEST_NBYTES)))


@pytest.fixture
def another():
    found = FakeScheduler()
    yield found
    found.close()


@pytest.fixture
def listed(fake, another):
    """The membership of a node that knows two addresses."""
    made = SchedulerClient("127.0.0.1", fake.port, KEY, now=0.0, lease_s=10.0, start_timeout_s=60.0,
                           further=[("127.0.0.1", another.port)])
    yield made
    made.close(0)


def test_the_same_address_is_tried_first_and_then_the_next(fake, another, listed):
    greeted(fake, listed, 0.0)
    fake.close()
    tick_until_dialled(listed, 0.5)
    assert listed._connected_to == ("127.0.0.1", fake.port), "it may be started again there"
    (dialled,) = pass_time(listed, 0.5, 3.25)
    assert dialled <= 3.0 and listed._connected_to == ("127.0.0.1", another.port)
    listed.send(m.Ready(generation=7))
    while another.hear() != m.Ready(generation=7):
        pass


def test_an_address_that_refuses_costs_less_patience(fake, another, listed):
    greeted(fake, listed, 0.0)
    fake.close()
    tick_until_dialled(listed, 0.5)
    until = time.monotonic() + LIMIT_MS / 1000
    while not listed.tick(1.6):  # a tenth of the lease later
        assert time.monotonic() < until
        listed.sockets[1].poll(100)
    assert listed._connected_to == ("127.0.0.1", another.port)


def test_after_the_last_address_comes_the_first_until_the_deadline(fake, another, listed):
    greeted(fake, listed, 0.0)
    fake.close()
    another.router.unbind(another.router.last_endpoint)
    tick_until_dialled(listed, 0.5)
    ports = []
    for now in range(1, 60):
        if listed.tick(float(now)):
            ports.append(listed._connected_to[1])
    assert ports[:4] == [another.port, fake.port] * 2
    with pytest.raises(PeerLostError, match=rf"127.0.0.1:{fake.port}, 127.0.0.1:{another.port} is gone: .*, and none "
                                            r"has answered there since, for 60.* \(start_timeout_s = 60\)"):
        pass_time(listed, 60.0, 62.0)


def test_the_job_starts_at_the_first_address_even_if_that_is_late(fake, another, listed):
    """But a node that comes to a running job finds its scheduler, too."""
    assert pass_time(listed, 0.0, 9.75) == []
    assert pass_time(listed, 10.0, 10.0) == [10.0] and listed._connected_to[1] == another.port


@pytest.fixture
def mixed(fake, another, resolver):
    """The membership of a node whose list has a name before an address; the resolver has not answered yet."""
    made = SchedulerClient("scheduler.example", fake.port, KEY, now=0.0, lease_s=10.0, start_timeout_s=60.0,
                           further=[("127.0.0.1", another.port)])
    yield made
    made.close(0)


def test_a_name_before_an_address_is_dialled_first(fake, another):
    found = SchedulerClient("localhost", fake.port, KEY, now=0.0, lease_s=10.0, further=[("127.0.0.1", another.port)])
    try:
        assert found._connected_to[1] == fake.port
        assert pass_time(found, 0.0, 9.75) == [], "the job starts there, perhaps later than this node"
    finally:
        found.close(0)


def test_a_name_that_is_resolved_late_is_dialled_as_soon_as_that(fake, another, resolver, mixed):
    assert mixed._connected_to == ("127.0.0.1", another.port)
    resolver.answer("127.0.0.2")
    tick_until_dialled(mixed, 0.2)
    assert mixed._connected_to == ("127.0.0.2", fake.port)
    assert pass_time(mixed, 0.2, 10.0) == [], "as long as if it had been the first connection"
    assert pass_time(mixed, 10.25, 10.25) == [10.25] and mixed._connected_to == ("127.0.0.1", another.port)


def test_a_name_that_is_not_resolved_delays_nobody(fake, another, resolver, mixed):
    """A scheduler answers at the next address: the first one is not dialled any more."""
    greeted(another, mixed, 0.0)
    resolver.answer("127.0.0.2")
    until = time.monotonic() + LIMIT_MS / 1000
    while mixed._addresses.unresolved:
        assert not mixed.tick(0.2) and time.monotonic() < until
        mixed._addresses.take_answers(0.1)
    assert pass_time(mixed, 0.2, 4.0) == [] and mixed._connected_to == ("127.0.0.1", another.port)


def test_a_scheduler_without_a_majority_is_left_for_the_next(fake, another, listed):
    greeted(fake, listed, 0.0)
    fake.say(m.Heartbeat(sequence=2, is_short=True))
    assert receive(listed, 1.0) == []
    assert pass_time(listed, 1.0, 3.75) == []
    left = next(now for now in (4.0 + i / 4 for i in range(14)) if listed.tick(now))
    assert left <= 7.25 and listed._connected_to == ("127.0.0.1", another.port)


def test_a_scheduler_that_hears_a_majority_meanwhile_is_not_left(fake, another, listed):
    greeted(fake, listed, 0.0)
    for now in (1.0, 3.5):
        fake.say(m.Heartbeat(sequence=2, is_short=now == 1.0))
        assert receive(listed, now) == []
        assert pass_time(listed, now, now + 2.0) == []
    fake.say(m.Heartbeat(sequence=4))
    receive(listed, 6.0)
    assert pass_time(listed, 6.0, 10.0) == []


def test_the_only_scheduler_is_not_left(fake, membership):
    greeted(fake, membership, 0.0)
    for now in range(1, 20):
        fake.say(m.Heartbeat(sequence=now, is_short=True))
        assert receive(membership, float(now)) == []
        assert not membership.tick(float(now))


def test_if_no_scheduler_takes_over_a_node_ends_though_some_answer(fake, another, listed):
    greeted(fake, listed, 0.0)
    fake.say(m.Welcome(index=0, epoch=1, nodes=()), m.RejoinRequest(number=1))
    while len(receive(listed, 1.0)) == 0:
        pass
    with pytest.raises(PeerLostError, match=r"no scheduler there has taken over since, for 9[01].* none hears"):
        for now in range(1, 200):
            for each in (fake, another):
                if each.router.poll(20):
                    each.hear()
                    each.say(m.Heartbeat(sequence=now, is_short=True))
            listed.sockets[0].poll(20)
            listed.recv_nowait(float(now))
            listed.tick(float(now))
    assert now in (91, 92)


def test_clocks_of_two_hosts_are_not_mixed(fake, another):
    asking = SchedulerClient("127.0.0.1", fake.port, KEY, now=0.0, asks_time=True)
    try:
        asking._connected_to = ("127.0.0.1", 1)
        asking._take_time(m.Echo(sent_ns=time.monotonic_ns(), there_ns=10**12))
        asking._connected_to = ("127.0.0.2", 1)
        asking._take_time(m.Echo(sent_ns=time.monotonic_ns(), there_ns=10**15))
        assert asking.clock.n_samples == 1
    finally:
        asking.close(0)
