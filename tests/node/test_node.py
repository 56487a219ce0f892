"""The node process: who may come in, what it refuses, what it counts, how it ends."""
from __future__ import annotations

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.base import message_socket
from bpsfast.base.exit_codes import ABORTED, FAILED, TIMEOUT, USAGE
from bpsfast.base.settings import Settings, fingerprint
from bpsfast.node import local_listener, main as node
from bpsfast.orchestration.messages import VERSION, Attach, Refuse

KEY = secrets.token_bytes(16)


def settings_for(**changes):
    values = {"scheduler": "127.0.0.1:9", "job_key": KEY.hex(), "start_timeout_s": 20.0, "local_size": 2}
    return Settings(**values | changes)


def introduce(of_node, local_rank=0, key=KEY, **changes):
    """Connect to the node with settings *of_node* and introduce a rank; return its channel."""
    link = message_socket.connect(message_socket.address(KEY, of_node.node_id), 20)
    fields = {
        "version": VERSION, "package": bpsfast.__version__, "pid": os.getpid(), "local_rank": local_rank,
        "local_size": 2, "rank": local_rank, "size": 2, "settings": fingerprint(of_node),
        "proof": message_socket.attach_proof(key, os.getpid(), local_rank)}
    pidfd = os.pidfd_open(os.getpid())
    link.send(Attach(**fields | changes), [pidfd])
    os.close(pidfd)
    return link


class RunningNode:
    """A node in a thread of this process; no scheduler answers it."""

    def __init__(self, awaits_ranks=False, **changes):
        self.settings = settings_for(node_id=secrets.token_hex(8), **changes)
        self._awaits_ranks = awaits_ranks
        self.code = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        self.code = node.main(self.settings, awaits_ranks=self._awaits_ranks)

    def attach(self, local_rank=0, **changes):
        """Connect and introduce a rank; return its channel."""
        return introduce(self.settings, local_rank, **changes)

    def join(self):
        self._thread.join(30)
        assert not self._thread.is_alive()
        return self.code


def refusal(link):
    """Return what the node refused with."""
    with link:
        message, _ = link.recv(20)
        assert isinstance(message, Refuse)
        return message.error, message.reason


@pytest.fixture
def lonely():
    """A node that waits for two ranks; one has attached, so that it ends when that one goes away."""
    made = RunningNode()
    first = made.attach(0)
    yield made
    first.close()
    assert made.join() == ABORTED


@pytest.mark.parametrize(("changes", "error", "text"), [
    ({"local_rank": 1, "key": b"another key"}, "ConfigError", "has another job key"),
    ({"local_rank": 1, "version": VERSION + 1}, "MismatchError", f"has {VERSION + 1}, its node has {VERSION}"),
    ({"local_rank": 1, "package": "9.9"}, "MismatchError", "runs bpsfast 9.9, its node " + bpsfast.__version__),
    ({"local_rank": 1, "settings": fingerprint(Settings(partition_bytes=8192))}, "MismatchError",
     "setting partition_bytes: local rank 1 .* has '8192', its node has '4096000'"),
    ({"local_rank": 1, "local_size": 3}, "ConfigError", "says 3, the node of this machine expects 2"),
    ({"local_rank": 0}, "ConfigError", "local rank 0 is process .* BPSFAST_NODE_ID"),
    ({"local_rank": 5}, "MismatchError", "claims to be one of 2"),
])
def test_ranks_that_do_not_fit_are_refused_in_words(lonely, changes, error, text):
    name, reason = refusal(lonely.attach(**changes))
    assert name == error

    assert re.search(text, reason)


def test_a_second_node_of_the_machine_leaves_quietly(lonely):
    assert node.main(lonely.settings) == 0


def test_a_missing_rank_is_named_to_those_who_wait():
    made = RunningNode(start_timeout_s=0.5)
    error, reason = refusal(made.attach(1))
    assert error == "StallError" and "local rank 0 did not attach" in reason and "0.5 s" in reason
    assert "Nobody answers at the scheduler's address 127.0.0.1:9" in reason
    assert made.join() == TIMEOUT


def test_a_node_that_its_launcher_ends_waits_for_the_first_rank_as_long_as_it_takes():
    """A program may load data for minutes before it joins the job; then the others have their time."""
    made = RunningNode(start_timeout_s=0.5, awaits_ranks=True)
    message_socket.connect(message_socket.address(KEY, made.settings.node_id), 20).close()  # it is up
    threading.Event().wait(1.5)  # three times its deadline
    error, reason = refusal(made.attach(1))
    assert error == "StallError" and "local rank 0 did not attach" in reason and "0.5 s" in reason
    assert made.join() == TIMEOUT


def test_no_scheduler_is_told_to_the_ranks():
    made = RunningNode(start_timeout_s=1.0)
    links = [made.attach(local_rank) for local_rank in (0, 1)]
    for link in links:
        error, reason = refusal(link)
        assert error == "StallError" and "no scheduler at 127.0.0.1:9" in reason
    assert made.join() == TIMEOUT


def test_rubbish_on_the_local_socket_harms_nobody(lonely):


    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
        stranger.connect(message_socket.address(KEY, lonely.settings.node_id))
        stranger.sendall(b"\x05\0\0\0hello")
        stranger.settimeout(20)
        assert b"are no message" in stranger.recv(4096)
    name, _ = refusal(lonely.attach(1, package="9.9"))  # it still answers
    assert name == "MismatchError"


def test_explicit_rdma_is_an_error_that_says_why(caplog, monkeypatch):
    assert node.main(settings_for(transport="rdma", node_id=secrets.token_hex(8))) == USAGE
    assert "transport='rdma' was asked for, but there is no RDMA device here" in caplog.text


def test_a_server_process_beside_the_node_ends_with_it():
    made = RunningNode()
    first = made.attach(0)
    codes = []
    server = threading.Thread(target=lambda: codes.append(
        local_listener.attach_server(KEY, made.settings.node_id, os.getpid(), 20)))
    server.start()
    first.close()
    assert made.join() == ABORTED
    server.join(30)
    assert codes == [ABORTED]


def test_sigterm_ends_a_node_in_words():
    program = ("import sys; from bpsfast.base import settings; from bpsfast.node import main\n"
               "sys.exit(main.main(settings.load()))")
    name = secrets.token_hex(8)
    environ = {"PATH": os.environ["PATH"], "BPSFAST_SCHEDULER": "127.0.0.1:9", "BPSFAST_JOB_KEY": KEY.hex(),
               "BPSFAST_NODE_ID": name, "BPSFAST_LOCAL_SIZE": "1", "BPSFAST_LOG_LEVEL": "INFO"}
    process = subprocess.Popen([sys.executable, "-c", program], env=environ, stderr=subprocess.PIPE, text=True)
    refusal(introduce(settings_for(node_id=name), package="9.9"))  # it is in its loop
    process.terminate()
    _, err = process.communicate(timeout=20)
    assert process.returncode == FAILED and "INFO" in err and "was stopped by SIGTERM" in err
    assert "ERROR" not in err, "whoever sent the signal knows"


# -- whole jobs ---------------------------------------------------------------------------------------------


def steps(n_steps):
    """Push one tensor *n_steps* times; return the node's counters before and after."""
    x = bpsfast.empty((1 << 20,), "float32")
    x[:] = 1.0
    bpsfast.push_pull(x, average=False, name="steady")
    bpsfast.barrier()
    before = bpsfast.counters()
    for _ in range(n_steps):
        total = bpsfast.push_pull(x, average=False, name="steady")
        assert np.all(total == bpsfast.size())
    return before, bpsfast.counters()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_step_costs_no_message_no_registration_and_no_allocation(job, transport):
    for before, after in job(ranks=(1, 1), helpers=1, transport=transport).run(steps, 50):
        assert after["control_messages"] - before["control_messages"] <= 4  # the questions themselves, both ways
        for name in ("registrations", "engine_allocations", "memory_segments"):
            assert after[name] == before[name]
        if transport == "tcp":
            assert after["dispatch_partitions"] > before["dispatch_partitions"]


def too_much():
    """Push more than the node may hold, then less."""
    try:
        bpsfast.push_pull(np.zeros(64 << 20, "uint8"), name="large")
    except bpsfast.CapacityError as exc:
        text = str(exc)
    return text, float(bpsfast.push_pull(np.ones(1000, "float32"), average=False, name="small")[0])


def test_what_does_not_fit_is_refused_and_the_job_goes_on(job):
    started = job(ranks=(2, 1), transport="tcp", max_bytes=48 << 20)
    for text, total in started.run(too_much):
        assert "BPSFAST_MAX_BYTES=50331648" in text and "needs" in text and "leaves" in text
        assert total == 3.0


def once(name):
    return float(bpsfast.push_pull(np.ones(5_000_000, "float32"), average=False, name=name)[0])


def test_traces_of_all_processes_are_written(job, tmp_path):
    started = job(ranks=(2, 1), helpers=1, transport="tcp", trace_dir=str(tmp_path))
    assert started.run(once, "traced") == [3.0, 3.0, 3.0]
    started.close()
    kinds = {}
    for path in tmp_path.glob("*.trace.json"):
        data = json.loads(path.read_text())
        kinds[data["otherData"]["role"]] = {event["cat"] for event in data["traceEvents"] if "cat" in event}
    assert set(kinds) == {"node 0", "node 1", "node 2", "rank 0", "rank 1", "rank 2"}
    assert {"sum", "queue", "gather", "wire"} <= kinds["node 0"]
    names = json.loads(next(tmp_path.glob("node-0-*")).read_text())["traceEvents"]
    assert any("traced[" in event["name"] for event in names)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_rest_ends_soon_after_a_node_was_killed(job, transport):
    started = job(ranks=(1, 1), helpers=1, transport=transport)
    started.begin(for_ever)
    started.kill_daemon("node 1")
    began = time.monotonic()
    for outcome in started.outcomes(20):
        assert outcome.error == "PeerLostError"
    codes = {name: process.wait(20) for name, process in started.daemons.items() if name != "node 1"}
    assert time.monotonic() - began < 15
    assert set(codes.values()) == {ABORTED}
    started.kill()


def for_ever():
    while True:
        bpsfast.push_pull(np.ones(1_000_000, "float32"), name="for ever")
