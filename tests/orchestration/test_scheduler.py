"""The scheduler and its clients over real sockets on loopback.

Longer than other files: the tests share one fixture of scheduler and nodes, and one way to wait.
"""
from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time

import msgspec
import pytest
import zmq
import zmq.utils.monitor

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import ConfigError, StallError
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.failover.scheduler import Scheduler
from bpsfast.orchestration.failover.scheduler_state import SchedulerState
from bpsfast.orchestration.job.admission import JobSettings
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.orchestration.scheduler_client import SchedulerClient

KEY = secrets.token_bytes(32)  # of this process alone: a test beside this one may get a port that was just ours
LIMIT_S = 20.0


def join(host="a", n_ranks=1, **fields):
    base = dict(version=m.VERSION, package="1.0", host=host, pid=1, index=-1, ranks=(-1,) * n_ranks, server_processes=0,
                address=f"{host}:1", shm_name="", nic_rate_bytes=0.0, settings={})
    return m.Join(**{**base, **fields})


class Node:
    """A node's control loop, reduced to waiting for a message."""

    def __init__(self, port, key=KEY, **fields):
        self.membership = SchedulerClient("127.0.0.1", port, key, now=time.monotonic(),
                                     **{"heartbeat_s": 0.1, "start_timeout_s": LIMIT_S, **fields})
        self.poller = zmq.Poller()
        for each in self.membership.sockets:
            self.poller.register(each, zmq.POLLIN)
        self.received = []

    def send(self, message):
        self.membership.send(message)

    def wait(self, kind):
        """The next message of *kind*; raises what the membership raises."""
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            for i, message in enumerate(self.received):
                if isinstance(message, kind):
                    return self.received.pop(i)
            self.poller.poll(50)
            self.received += self.membership.recv_nowait(time.monotonic())
            if not any(isinstance(message, kind) for message in self.received):
                self.membership.tick(time.monotonic())
        raise AssertionError(f"no {kind} within {LIMIT_S} s, got {self.received}")


def until(happened):
    deadline = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def start():
    """start(**settings) -> (scheduler in a thread, function that waits for its exit code); start.node(port) -> Node."""
    running, nodes = [], []

    def begin(key=KEY, shutdown_notice_s=0.1, **fields):
        fields = {"num_nodes": 2, "heartbeat_s": 0.1, "start_timeout_s": LIMIT_S, **fields}
        scheduler = Scheduler(JobSettings(**fields), key, bind_host="127.0.0.1", shutdown_notice_s=shutdown_notice_s,
                              tick_s=0.05)
        codes = []
        thread = threading.Thread(target=lambda: codes.append(scheduler.run()), daemon=True)
        thread.start()
        running.append((scheduler, thread))

        def exit_code():
            thread.join(LIMIT_S)
            assert not thread.is_alive()
            return codes[0]

        return scheduler, exit_code

    def node(*args, **fields):
        nodes.append(Node(*args, **fields))
        return nodes[-1]

    begin.node = node
    yield begin
    for each in nodes:
        each.membership.close(0)
    for scheduler, thread in running:
        if thread.is_alive():
            scheduler.stop("the test is over")
        thread.join(LIMIT_S)
        assert not thread.is_alive()


def test_a_job_from_join_to_finish(start):
    scheduler, exit_code = start(num_helpers=1, lease_s=2.0)  # nobody hangs up
    nodes = [start.node(scheduler.port) for _ in range(3)]
    for host, node, n_ranks in zip("abc", nodes, (1, 1, 0)):
        node.send(join(host, n_ranks))
    welcomes = [node.wait(m.Welcome) for node in nodes]
    assert sorted(welcome.index for welcome in welcomes) == [0, 1, 2] and len({w.nodes for w in welcomes}) == 1
    ranks = [(node, rank) for node, w in zip(nodes, welcomes) for rank in w.nodes[w.index].ranks]
    for node, rank in ranks:
        node.send(m.Declare(rank=rank, tensors=(TensorSpec(name="a", dtype="int8", shape=(5,)),)))
    plans = [node.wait(m.Plan) for node in nodes]
    assert plans[0] == plans[1] == plans[2]
    for node in nodes:
        node.send(m.Ready(generation=1))
    assert [node.wait(m.Commit).order for node in nodes] == [(0,)] * 3
    for node, rank in ranks:
        node.send(m.BarrierEnter(rank=rank, sequence=1))
    assert [node.wait(m.BarrierDone).sequence for node in nodes] == [1, 1, 1]
    for node, rank in ranks:
        node.send(m.RankLeft(rank=rank))
    assert all(node.wait(m.Finish) == m.Finish() for node in nodes)
    for node in nodes:
        node.send(m.FinishAck())
    assert exit_code() == 0
    for node in nodes:  # the scheduler's going is not news after its last word
        assert node.membership.recv_nowait(time.monotonic()) == []
        node.membership.tick(time.monotonic() + 100)


def test_what_goes_to_all_nodes_is_encoded_once(start, monkeypatch):
    """A plan of 16,000 tensors for 512 nodes took 6 s and 2 GB."""
    encoded, encode = [], m.encode

    def counted(message):
        encoded.append(type(message))
        return encode(message)

    monkeypatch.setattr(m, "encode", counted)
    scheduler, _ = start(num_helpers=3, lease_s=20.0)
    nodes = [start.node(scheduler.port) for _ in range(5)]
    for host, node, n_ranks in zip("abcde", nodes, (1, 1, 0, 0, 0)):
        node.send(join(host, n_ranks))
    welcomes = [node.wait(m.Welcome) for node in nodes]
    tensors = tuple(TensorSpec(name=f"{i:0100}", dtype="int8", shape=(5,)) for i in range(2000))
    for node, welcome in zip(nodes, welcomes):
        for rank in welcome.nodes[welcome.index].ranks:
            node.send(m.Declare(rank=rank, tensors=tensors))
    plans = [node.wait(m.Plan) for node in nodes]
    assert all(plan == plans[0] for plan in plans) and len(plans[0].units) == len(tensors)
    assert encoded.count(m.Plan) == 1


def test_a_node_that_has_missed_the_end_comes_back_for_it(start):
    """One hangs up before the last rank leaves; the scheduler goes on until it has heard, and then not for long."""
    scheduler, exit_code = start(num_nodes=2, lease_s=LIMIT_S)
    here, away = start.node(scheduler.port), start.node(scheduler.port)
    here.send(join("a", index=0))
    away.send(join("b", index=1))
    control_log = ControlLog("1.0", {})
    control_log.heard(away.wait(m.Welcome))
    here.wait(m.Welcome)
    away.send(m.RankLeft(rank=1))
    here.wait(m.FirstRankLeft)
    away.membership.close()
    until(lambda: scheduler._handshake_limiter.n_known == 1)  # whom it takes for there it tells the end, and then goes
    here.send(m.RankLeft(rank=0))
    here.wait(m.Finish)
    here.send(m.FinishAck())
    here.membership.close()
    back = start.node(scheduler.port)
    for message in control_log.report():
        back.send(message)
    assert back.wait(m.Finish) == m.Finish()
    back.send(m.FinishAck())
    back.membership.close()
    assert exit_code() == 0


def test_a_node_whose_connection_ends_with_the_last_word_on_it_comes_back_for_it(start):
    """The scheduler could send it, so it knows only by the node's answer that it was read."""
    scheduler, exit_code = start(num_nodes=1, lease_s=LIMIT_S)
    node = start.node(scheduler.port)
    node.send(join())
    control_log = ControlLog("1.0", {})
    control_log.heard(node.wait(m.Welcome))
    left = m.RankLeft(rank=0)
    node.send(left)
    control_log.said(left)
    node.poller.poll(1000 * LIMIT_S)  # the last word is there, and nobody reads it
    until(lambda: scheduler._state.job.finished)
    node.membership.close()
    until(lambda: scheduler._handshake_limiter.n_known == 0)
    back = start.node(scheduler.port)
    for message in control_log.report():
        back.send(message)
    assert back.wait(m.Finish) == m.Finish()
    back.send(m.FinishAck())
    back.membership.close()
    assert exit_code() == 0


def test_a_scheduler_goes_when_all_have_gone(start):
    """A long lease does not keep it."""
    scheduler, exit_code = start(num_nodes=1, lease_s=10 * LIMIT_S)
    node = start.node(scheduler.port)
    node.send(join())
    node.wait(m.Welcome)
    node.send(m.RankLeft(rank=0))
    node.wait(m.Finish)
    node.send(m.FinishAck())
    node.membership.close()
    assert exit_code() == 0


def test_heartbeats_go_on_while_very_many_messages_come(start, monkeypatch):
    receive = SchedulerState.receive
    n_read = itertools.count()

    def think(self, now, sender, message):
        if isinstance(message, m.Heartbeat):
            next(n_read)
            time.sleep(0.01)
        return receive(self, now, sender, message)

    monkeypatch.setattr(SchedulerState, "receive", think)
    scheduler, _ = start(num_nodes=2, lease_s=LIMIT_S)
    node, talker = start.node(scheduler.port), start.node(scheduler.port)
    node.send(join("a", index=0))
    talker.send(join("b", index=1))
    node.wait(m.Welcome)
    n_messages = 2000
    for number in range(n_messages):
        talker.send(m.Heartbeat(sequence=number))
    sockets = node.membership.sockets
    while next(n_read) < 50:
        time.sleep(0)
    while sockets[0].poll(0):  # what came before
        sockets[0].recv()
    for _ in range(3):
        assert sockets[0].poll(LIMIT_S * 1000)
        sockets[0].recv()
    assert next(n_read) < n_messages // 2


def test_a_node_may_be_earlier_than_its_scheduler(start):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = start.node(port)
    node.send(join())
    node.poller.poll(100)
    scheduler = Scheduler(JobSettings(num_nodes=1, heartbeat_s=0.1), KEY, bind_host="127.0.0.1", port=port, tick_s=0.05)
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    try:
        assert node.wait(m.Welcome).index == 0
    finally:
        scheduler.stop()
        thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_wrong_key_gets_nothing(start):
    scheduler, _ = start()
    node = start.node(scheduler.port, bytes(32), start_timeout_s=1.5)
    node.send(join())
    with pytest.raises(StallError, match=f"wrong job key or no scheduler at 127.0.0.1:{scheduler.port}.*another job"):
        node.wait(m.Message)
    assert scheduler.aborted is None


def test_the_schedulers_public_key_is_not_enough(start):
    """Who has the server's key, but not the job's client key, is turned away by ZAP."""
    from bpsfast.orchestration.security import curve_pair

    scheduler, _ = start()
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        monitor = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        client.linger = 0
        client.curve_serverkey = curve_pair(KEY, "scheduler")[0]
        client.curve_publickey, client.curve_secretkey = zmq.curve_keypair()
        client.connect(f"tcp://127.0.0.1:{scheduler.port}")
        client.send(m.encode(join()))
        assert monitor.poll(LIMIT_S * 1000)
        assert zmq.utils.monitor.recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH
        client.disable_monitor()
        monitor.close()


def test_a_plain_client_gets_nothing(start):
    scheduler, _ = start(num_nodes=1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.connect(f"tcp://127.0.0.1:{scheduler.port}")
        with contextlib.suppress(zmq.Again):  # a client refused before it speaks has nobody to send to
            client.send(m.encode(join("intruder")), zmq.NOBLOCK)
        node = start.node(scheduler.port)
        node.send(join("honest"))
        assert [each.host for each in node.wait(m.Welcome).nodes] == ["honest"]


@pytest.mark.parametrize("listens", [False, True])
def test_a_wrong_port_is_named(start, listens):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        if listens:
            other.listen()
        port = other.getsockname()[1]
        node = start.node(port, start_timeout_s=1.0)
        node.send(join())
        words = "another job key or is no scheduler" if listens else "nobody listens there"
        with pytest.raises(StallError, match=f"no scheduler at 127.0.0.1:{port}.*= 1 s.*{words}"):
            node.wait(m.Message)


def test_a_version_mismatch_ends_the_job_for_all(start):
    scheduler, exit_code = start()
    good, bad = start.node(scheduler.port), start.node(scheduler.port)
    good.send(join("good"))
    bad.send(join("bad", version=m.VERSION + 1))
    refuse = bad.wait(m.Refuse)
    assert refuse.error == "MismatchError" and f"protocol version differs: {m.VERSION + 1} on host bad" in refuse.reason
    assert good.wait(m.Abort).reason == refuse.reason
    assert exit_code() == 1


def running(start, **fields):
    """A scheduler and the nodes of a job that runs: two with ranks, and a helper."""
    scheduler, exit_code = start(num_helpers=1, **fields)
    nodes = [start.node(scheduler.port) for _ in range(3)]
    for index, (host, node) in enumerate(zip("abc", nodes)):
        node.send(join(host, int(index < 2), index=index if index < 2 else -1))
    for node in nodes:
        node.wait(m.Welcome)
    return scheduler, exit_code, nodes


def goes_on(nodes):
    """Have the job of *nodes*, which hold ranks 0 and 1, do something."""
    for rank, node in enumerate(nodes):
        node.send(m.BarrierEnter(rank=rank, sequence=1))
    for node in nodes:
        assert node.wait(m.BarrierDone).sequence == 1


@pytest.mark.parametrize("said", [
    {"type": "Join", "version": 77, "package": "9", "host": "h", "pid": "12-abc", "ranks": []},
    {"type": "Join", "version": 77, "package": "9", "host": "h", "pid": "12-abc", "ranks": [0]},
    {"type": "Greeting", "version": 77},
], ids=["a helper", "a node with ranks", "an unknown type"])
def test_a_node_of_a_newer_version_that_dials_a_running_job_is_refused_alone(start, caplog, said):
    scheduler, _, nodes = running(start)
    node = start.node(scheduler.port)
    node.membership.sockets[0].send(msgspec.msgpack.encode(said))
    refuse = node.wait(m.Refuse)
    assert refuse.error == "MismatchError"
    assert f"protocol version differs: 77 on a node, {m.VERSION} on the scheduler" in refuse.reason
    goes_on(nodes[:2])
    assert not scheduler.aborted and not any(node.received for node in nodes)
    assert "a message from 127.0.0.1:" in caplog.text


def test_a_helper_of_a_newer_version_is_refused_alone_while_the_job_gathers(start):
    scheduler, _ = start(num_helpers=0)
    node, first = start.node(scheduler.port), start.node(scheduler.port)
    first.send(join("first", index=0))
    node.membership.sockets[0].send(msgspec.msgpack.encode({"type": "Join", "version": 77, "new_field": [1]}))
    refuse = node.wait(m.Refuse)
    assert refuse.error == "MismatchError" and "protocol version differs: 77 on a node" in refuse.reason
    second = start.node(scheduler.port)
    second.send(join("second", index=1))
    for each in (first, second):
        each.wait(m.Welcome)


def test_a_gathering_job_that_waits_for_ranks_of_a_newer_version_is_told_at_once(start):
    scheduler, exit_code = start()
    first, node = start.node(scheduler.port), start.node(scheduler.port)
    first.send(join("first", index=0))
    first.send(m.Heartbeat(sequence=1))
    until(lambda: scheduler._state.job.joins)
    node.membership.sockets[0].send(msgspec.msgpack.encode({"type": "Join", "version": 77, "ranks": [1], "pid": "x"}))
    assert node.wait(m.Refuse).reason == first.wait(m.Abort).reason
    assert exit_code() == 1


rubbish = pytest.mark.parametrize("frames", [
    [b"rubbish"], [b"two", b"frames"], [], [b"\x81\xa4type\xa4\xff\xff\xff\xff"], [b"\x81\xa1a" * 70_000],
], ids=["rubbish", "frames", "nothing", "letters", "nested"])


@rubbish
def test_rubbish_of_who_is_no_member_costs_nobody_else_anything(start, frames):
    scheduler, _, nodes = running(start)
    node = start.node(scheduler.port)
    node.membership.sockets[0].send_multipart(frames or [b""])
    assert node.wait(m.Refuse).error == "ProtocolError"
    goes_on(nodes[:2])
    assert not scheduler.aborted


@rubbish
def test_rubbish_of_a_helper_costs_the_job_the_helper(start, frames):
    scheduler, _, nodes = running(start)
    nodes[2].membership.sockets[0].send_multipart(frames or [b""])
    abort = nodes[2].wait(m.Abort)
    assert abort.goes_on and "a message of helper 0 (node 2, host c) cannot be read" in abort.reason
    assert [node.wait(m.Freeze).lost for node in nodes[:2]] == [(2,), (2,)]
    assert not scheduler.aborted


@rubbish
def test_rubbish_of_a_node_with_ranks_ends_the_job_and_names_it(start, frames):
    _, exit_code, nodes = running(start)
    nodes[1].membership.sockets[0].send_multipart(frames or [b""])
    abort = nodes[0].wait(m.Abort)
    assert abort.error == "ProtocolError" and "a message of node 1 (host b, rank 1) cannot be read" in abort.reason
    assert exit_code() == 1


def test_a_silent_node_loses_its_lease(start):
    scheduler, exit_code = start(lease_s=2.0)
    alive, silent = start.node(scheduler.port), start.node(scheduler.port)
    alive.send(join("alive", index=0))
    silent.send(join("silent", index=1))
    alive.wait(m.Welcome)
    abort = alive.wait(m.Abort)
    assert abort.error == "PeerLostError" and "node 1 (host silent, rank 1) has been silent" in abort.reason
    assert exit_code() == 1


def test_a_process_that_is_gone_is_noticed_long_before_the_lease(start):
    scheduler, _ = start(lease_s=10 * LIMIT_S)
    alive, dead = start.node(scheduler.port), start.node(scheduler.port)
    alive.send(join("alive", index=0))
    dead.send(join("dead", index=1))
    dead.wait(m.Welcome)
    dead.membership.close(0)
    for _ in range(2):
        assert alive.wait(m.ProbeRequest) == m.ProbeRequest(node=1)
        alive.send(m.ProbeResult(node=1, outcome="refused"))
    assert "node 1 (host dead, rank 1) closed its connection" in alive.wait(m.Abort).reason


def test_a_connection_that_is_reset_has_the_lease_to_come_back(start):
    scheduler, _ = start(lease_s=LIMIT_S)
    alive, away = start.node(scheduler.port), start.node(scheduler.port)
    control_log = ControlLog("1.0", {})
    alive.send(join("alive", index=0))
    away.send(join("away", index=1))
    control_log.heard(away.wait(m.Welcome))
    away.membership.close(0)
    for _ in range(5):  # longer than a process has that is dead
        assert alive.wait(m.ProbeRequest) == m.ProbeRequest(node=1)
        alive.send(m.ProbeResult(node=1, outcome="silent"))
    back = start.node(scheduler.port)
    for message in control_log.report():
        back.send(message)
    alive.wait(m.RejoinRequest)
    assert not scheduler.aborted


def test_the_start_deadline_reaches_who_is_there(start):
    scheduler, exit_code = start(start_timeout_s=1.5)
    node = start.node(scheduler.port)
    node.send(join("a", 2))
    abort = node.wait(m.Abort)
    assert abort.error == "StallError" and "have node 0 (a, 2 ranks); missing node 1 (never joined)" in abort.reason
    assert exit_code() == 1


def test_a_scheduler_that_nobody_finds_says_so_itself(start, caplog):
    _, exit_code = start(start_timeout_s=0.2, shutdown_notice_s=0.1)
    assert exit_code() == 1
    assert "the job is aborted: StallError: " in caplog.text and "missing node 0 (never joined)" in caplog.text


def test_a_latecomer_hears_why(start):
    scheduler, _ = start(start_timeout_s=0.2, shutdown_notice_s=LIMIT_S)
    early = start.node(scheduler.port)
    early.send(join("early"))
    abort = early.wait(m.Abort)
    late = start.node(scheduler.port)
    late.send(join("late"))
    assert late.wait(m.Abort) == abort


def test_stop_aborts_in_words(start):
    scheduler, exit_code = start()
    node = start.node(scheduler.port)
    node.send(join())
    node.send(m.Heartbeat(sequence=1))
    scheduler.stop("interrupted")
    assert exit_code() == 1
    assert scheduler.aborted == m.Abort(error="ClosedError", reason="interrupted")


@pytest.mark.parametrize("fields", [{}, {"is_replaced": False}, {"min_workers": 0}], ids=str)
def test_a_scheduler_whose_host_ends_leaves_a_running_job_to_the_next_one(start, fields):
    fields_here = {"num_nodes": 1, "has_others": True, "is_replaced": True, "min_workers": 1, **fields}
    scheduler, exit_code = start(**fields_here)
    node = start.node(scheduler.port)
    node.send(join())
    node.wait(m.Welcome)
    scheduler.stop("the host ends", is_host_ending=True)
    assert exit_code() == 1
    assert scheduler.has_given_up == (not fields)
    if fields:
        assert node.wait(m.Abort).reason == "the host ends"


def test_a_scheduler_whose_host_ends_while_nodes_gather_tells_them(start):
    scheduler, exit_code = start(num_nodes=2, has_others=True, is_replaced=True, min_workers=1)
    node = start.node(scheduler.port)
    node.send(join())
    node.send(m.Heartbeat(sequence=1))
    scheduler.stop("the host ends", is_host_ending=True)
    assert exit_code() == 1 and not scheduler.has_given_up


def test_an_address_in_use_is_named(start):
    scheduler, _ = start()
    words = rf"cannot listen on tcp://127.0.0.1:{scheduler.port}: .* after 0.5 s .* MASTER_PORT .* BPSFAST_SCHEDULER"
    with pytest.raises(ConfigError, match=words):
        Scheduler(JobSettings(num_nodes=1, heartbeat_s=0.1, lease_s=0.5), KEY, bind_host="127.0.0.1",
                  port=scheduler.port)


def test_the_port_of_a_job_that_ends_is_waited_for(caplog):
    caplog.set_level("INFO", "bpsfast.scheduler")
    before = Scheduler(JobSettings(num_nodes=1), KEY, bind_host="127.0.0.1")
    after = []
    waits = threading.Thread(daemon=True, target=lambda: after.append(
        Scheduler(JobSettings(num_nodes=1, lease_s=LIMIT_S), KEY, bind_host="127.0.0.1", port=before.port)))
    waits.start()
    deadline = time.monotonic() + LIMIT_S
    while "on which another process listens" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not after
    before.close()
    waits.join(LIMIT_S)
    assert after[0].port == before.port
    after[0].close()


def test_closing_twice_does_nothing():
    scheduler = Scheduler(JobSettings(num_nodes=1), KEY, bind_host="127.0.0.1")
    scheduler.close()
    scheduler.close()
    scheduler.stop("too late")
