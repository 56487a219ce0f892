"""perf on real devices: every operation, both loops, what a wrong option or a dead path looks like.

Runs in the guest: both sides in this process (rxe1 measures against rxe0), and once as commands of two hosts.
"""
from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bpsfast.base import settings
from bpsfast.hardware.host import Host
from bpsfast.hardware.rdma_route import choose
from bpsfast.hardware.verbs import provider
from bpsfast.orchestration.errors import BpsError, ConfigError, PeerLostError
from bpsfast.pyx.verbs import VerbsMissing
from bpsfast.tools.perf import control as lines, perf_plan as plans
from bpsfast.tools.perf.perf_run import PerfRun
from bpsfast.tools.perf.python_loop import ProviderLoop
from bpsfast.tools.perf.rdma import RdmaEnd

KEY = b"k" * 32
OPERATIONS = ("write_imm", "write", "send", "read")
#: 4 s: the emulated processors of a busy machine pause for longer than an acknowledgement takes.
PATIENT = {"ack_timeout": 20, "timeout_s": 60.0}


def measure(verb, given, server_given=None, **client_settings):
    """Run both sides, the client on rxe1; return the client's visit."""
    plan = plans.make(verb, PATIENT | given)

    def serve():
        loaded = settings.load({"rdma_devices": "=rxe0"}, {})
        with lines.accept(listener, KEY, 30.0, 60.0) as connection:
            PerfRun(connection, KEY, loaded, lambda row: None).as_server(server_given or {}, lambda: None)

    with lines.listen(0, "127.0.0.1") as listener, ThreadPoolExecutor(1) as executor:
        served = executor.submit(serve)
        loaded = settings.load({"rdma_devices": "=rxe1"} | client_settings, {})
        with lines.connect("127.0.0.1", listener.getsockname()[1], KEY, 30.0, 60.0) as connection:
            visit = PerfRun(connection, KEY, loaded, lambda row: None)
            try:
                visit.as_client(plan, lambda: None)
            finally:
                connection.close()
                server_error = served.exception(60)
        assert server_error is None
        return visit


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bandwidth(operation):
    visit = measure("bw", {"operation": operation, "sizes": (2, 8192, 300_000), "iterations": 40, "depth": 16})
    assert [(row["nbytes"], row["messages"], row["operation"]) for row in visit.rows] == [
        (nbytes, 40, operation) for nbytes in (2, 8192, 300_000)]
    for row in visit.rows:
        assert 0 < row["average_bytes_per_s"] <= row["peak_bytes_per_s"]
        for side, device in (("client", "rxe1"), ("server", "rxe0")):
            [counted] = row["counters"][side]
            assert counted["device"] == device and device in counted["line"]
            assert counted["changes"]["rcvd_pkts"] > 0
    assert visit.places["client"]["mtu"] == 4096


@pytest.mark.parametrize("operation", OPERATIONS)
def test_latency(operation):
    visit = measure("lat", {"operation": operation, "sizes": (1, 5000), "iterations": 100})
    for row in visit.rows:
        assert 0 < row["min_s"] <= row["typical_s"] <= row["max_s"] and len(row["samples_s"]) == 100


@pytest.mark.parametrize("given", [
    {"pairs": 3, "both_ways": True, "iterations": 30}, {"pairs": 2, "both_ways": True, "duration_s": 0.3},
    {"duration_s": 0.3, "sizes": (64,)}, {"events": True, "iterations": 40}, {"moderation": 7, "iterations": 40},
    {"inline_nbytes": 64, "sizes": (64,), "iterations": 40}, {"mtu": 1024, "iterations": 40},
], ids=str)
def test_options(given):
    [row] = measure("bw", {"sizes": (30_000,)} | given).rows
    assert row["messages"] == (given["iterations"] * given.get("pairs", 1) * (2 if given.get("both_ways") else 1)
                               if "iterations" in given else row["messages"]) > 0


def test_latency_by_events():
    [row] = measure("lat", {"events": True, "iterations": 100}).rows
    assert row["min_s"] > 0


def test_a_gid_that_is_not_there_ends_both_sides_in_words():
    with pytest.raises(ConfigError, match=r"rdma_gid_index=200 is an empty row"):
        measure("bw", {}, rdma_gid_index=200)


def test_an_mtu_above_the_port_s_is_refused():
    subprocess.run(["ip", "link", "set", "roce0", "mtu", "1500"], check=True)
    try:
        with pytest.raises(ConfigError, match=r"-m 4096: the active MTU of rxe1/1 is 4096, of the peer's port 1024"):
            measure("bw", {"mtu": 4096})
        assert measure("bw", {"iterations": 5}).places["client"]["mtu"] == 1024
    finally:
        subprocess.run(["ip", "link", "set", "roce0", "mtu", "4200"], check=True)


# -- the loop in Python ------------------------------------------------------------------------------------------

@contextlib.contextmanager
def connected(plan):
    """Yield an end on rxe1 and one on rxe0, brought up towards each other."""
    host = Host()
    with contextlib.ExitStack() as undo:
        ends = []
        for name in ("rxe1", "rxe0"):
            [rail] = choose(host, settings.Settings(rdma_devices=f"={name}")).require()
            ends.append(undo.enter_context(contextlib.closing(RdmaEnd(plan, rail, "native", host))))
        ends[0].connect(ends[1].offer())
        ends[1].connect(ends[0].offer())
        yield ends


def python_loop(end, peer, plan, nbytes, receives):
    """Return `ProviderLoop` over the end's queue pairs, as for another implementation."""
    pair, offer = end.pairs[0], peer.offer()
    base, stride = end.offer()["address"], end.offer()["stride"]
    loop = ProviderLoop(pair.send_cq, pair.recv_cq,
                        [(pair, base, base + stride, end._region.lkey, offer["address"] + stride, offer["rkey"])],
                        operation=plan.operation, nbytes=nbytes, depth=plan.depth, receive_depth=plan.receive_depth,
                        receive_nbytes=stride, receives=receives,
                        moderation=1 if plan.operation == "read" else plan.moderation_at(nbytes), stall_s=30.0)
    if receives:
        loop.post_receives()
    return loop


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_loop_in_python_does_what_the_native_one_does(operation):
    plan = plans.make("bw", PATIENT | {"operation": operation, "sizes": (20_000,), "depth": 16, "receive_depth": 32})
    with connected(plan) as (left, right), ThreadPoolExecutor(1) as executor:
        loops = [python_loop(left, right, plan, 20_000, False), python_loop(right, left, plan, 20_000, plan.two_sided)]
        other = executor.submit(loops[1].bandwidth, 0, 30) if plan.two_sided else None
        sent, _, seconds, posted_ns, completed_ns = loops[0].bandwidth(30, 0)
        assert sent == 30 and seconds > 0 and len(posted_ns) == len(completed_ns) == 240
        assert other is None or other.result(60)[1] == 30
    plan = plans.make("lat", PATIENT | {"operation": operation, "sizes": (8,), "receive_depth": 32})
    with connected(plan) as (left, right), ThreadPoolExecutor(1) as executor:
        loops = [python_loop(end, peer, plan, 8, plan.two_sided) for end, peer in ((left, right), (right, left))]
        other = executor.submit(loops[1].latency, 40, False) if operation != "read" else None
        assert len(loops[0].latency(40, True)) == 320
        assert other is None or len(other.result(60)) == 320


def test_a_peer_whose_memory_is_gone_is_named_with_the_completion_s_words():
    plan = plans.make("bw", PATIENT | {"operation": "write"})
    with connected(plan) as (left, right):
        left.prepare(100, receives=False)
        right._region.close()
        with pytest.raises(PeerLostError, match=r"write over rxe1/1 to queue pair \d+ at .*IBV_WC_REM_ACCESS_ERR"):
            left.bandwidth(5, 0, 0.0)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_both_implementations_side_by_side(operation):
    try:
        provider("pyverbs")
    except VerbsMissing as exc:
        pytest.skip(str(exc))
    given = {"operation": operation, "providers": ("native", "pyverbs"), "sizes": (4000,), "iterations": 30}
    for verb in plans.VERBS:
        rows = measure(verb, given).rows
        assert [(row["verbs"], row["nbytes"]) for row in rows] == [("native", 4000), ("pyverbs", 4000)]


# -- the commands ----------------------------------------------------------------------------------------------------

def on(host, *arguments):
    return subprocess.Popen(["on", str(host), sys.executable, "-m", "bpsfast", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


def test_two_hosts_measure_by_command():
    server = on(0, "perf", "lat", "-d", "rxe0")
    client = on(1, "perf", "lat", "10.9.1.1", "-d", "rxe1", "-n", "50", "-u", "20", "--json", "--wait", "90")
    try:
        shown, complaint = client.communicate(timeout=110)
        table, _ = server.communicate(timeout=60)
    finally:
        for process in (client, server):
            process.kill()
            process.wait()
    assert client.returncode == server.returncode == 0, complaint
    document = json.loads(shown)
    assert document["rows"][0]["iterations"] == 50 and document["places"]["server"]["device"] == "rxe0"
    assert "t_typical[usec]" in table


def test_a_server_with_other_options_says_so_on_both_sides():
    with pytest.raises(BpsError, match=r"--op: write_imm at the client, read here"):
        measure("bw", {}, {"operation": "read"})
