"""Both sides of perf, over tcp and shared memory: numbers that fit together, and an end when the other side ends."""
from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from bpsfast.base import settings
from bpsfast.orchestration.errors import BpsError
from bpsfast.tools.perf import control as lines, perf_plan as plans, results
from bpsfast.tools.perf.perf_run import PerfRun
from tests.support import measurement_schemas as schemas

KEY = b"k" * 32


def measure(verb, given, server_given=None, loaded=None):
    """Run both sides in this process; return the client's and the server's visit."""
    plan = plans.make(verb, given | {"timeout_s": 20.0})
    loaded = loaded or settings.load({}, {})

    def serve():
        with lines.accept(listener, KEY, 10.0, 20.0) as connection:
            visit = PerfRun(connection, KEY, loaded, lambda row: None)
            visit.as_server(server_given or {}, lambda: None)
            return visit

    began = threading.Event()
    with lines.listen(0, "127.0.0.1") as listener, ThreadPoolExecutor(1) as executor:
        served = executor.submit(serve)
        try:
            with lines.connect("127.0.0.1", listener.getsockname()[1], KEY, 10.0, 20.0) as connection:
                client = PerfRun(connection, KEY, loaded, lambda row: None)
                client.as_client(plan, began.set)
        finally:
            error = served.exception(30)
        if error is not None:
            raise error
        assert began.is_set()
        return client, served.result()


def by_schema(client, row):
    shown = msgspec.json.encode(results.data(client.plan, client.places, client.rows))
    for each in msgspec.json.decode(shown, type=schemas.Perf, strict=True).rows:
        msgspec.convert(each, row, strict=True)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("given", [
    {"iterations": 50, "sizes": (1, 1000, 70_000)}, {"duration_s": 0.05}, {"iterations": 20, "depth": 1},
])
def test_bandwidth(transport, given):
    client, server = measure("bw", given | {"transport": transport})
    by_schema(client, schemas.Perf.Bandwidth)
    assert [row["nbytes"] for row in client.rows] == list(given.get("sizes", (65536,)))
    for row in client.rows:
        assert row["messages"] == given["iterations"] if "iterations" in given else row["messages"] > 0
        assert row["average_bytes_per_s"] == pytest.approx(row["nbytes"] * row["messages"] / row["seconds"])
        assert row["counters"] == {"client": [], "server": []}
        if row["peak_bytes_per_s"] is not None:
            assert row["peak_bytes_per_s"] >= row["average_bytes_per_s"]
    assert server.rows == client.rows


@pytest.mark.parametrize("given", [{"iterations": 50}, {"duration_s": 0.1}])
def test_both_ways_over_several_streams(given):
    client, _ = measure("bw", given | {"transport": "tcp", "both_ways": True, "pairs": 3, "sizes": (5000,)})
    [row] = client.rows
    assert row["messages"] == 300 if "iterations" in given else row["messages"] > 1


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_latency(transport):
    client, server = measure("lat", {"transport": transport, "iterations": 200, "sizes": (8, 4096)})
    by_schema(client, schemas.Perf.Latency)
    for row in client.rows:
        assert 0 < row["min_s"] <= row["typical_s"] <= row["p99_s"] <= row["p999_s"] <= row["max_s"]
        assert len(row["samples_s"]) == 200 and row["n_warmup"] == 20
    assert [row["nbytes"] for row in server.rows] == [8, 4096]
    assert client.places["client"] and client.places["server"]


def test_options_that_contradict_end_both_sides():
    with pytest.raises(BpsError, match=r"MismatchError.*-t: 16 at the client, 8 here"):
        measure("bw", {"transport": "tcp"}, {"depth": 8})


def test_without_a_device_both_sides_hear_so():
    if os.path.isdir("/sys/class/infiniband") and os.listdir("/sys/class/infiniband"):
        pytest.skip("there are RDMA devices here")
    with pytest.raises(BpsError, match="no RDMA port can be used"):
        measure("bw", {})


@pytest.fixture
def start():
    """Start ``bpsfast perf`` with the arguments. It ends with the test, and so do the pipes, whatever happens."""
    with contextlib.ExitStack() as undo:

        def start(*arguments):
            process = undo.enter_context(subprocess.Popen([sys.executable, "-m", "bpsfast", "perf", *arguments],
                                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
            undo.callback(process.kill)
            return process

        yield start


@pytest.mark.parametrize("point", ["before", "in there"])
def test_ctrl_c_while_a_loop_starts(point, monkeypatch):
    """Whether the thread exists already or not: it ends, and what it uses is closed afterwards."""
    plan = plans.make("bw", {"transport": "tcp", "duration_s": 60.0, "timeout_s": 20.0})
    start = threading.Thread.start

    def interrupted(thread):
        if thread.name == "bpsfast-perf" and threading.current_thread() is threading.main_thread():
            if point == "in there":
                start(thread)
            raise KeyboardInterrupt
        start(thread)

    told = []

    def serve():
        with lines.accept(listener, KEY, 10.0, 20.0) as connection, pytest.raises(BpsError) as caught:
            PerfRun(connection, KEY, settings.load({}, {}), lambda row: None).as_server({}, lambda: None)
        told.append(str(caught.value))

    with lines.listen(0, "127.0.0.1") as listener:
        served = threading.Thread(target=serve)
        start(served)
        with lines.connect("127.0.0.1", listener.getsockname()[1], KEY, 10.0, 20.0) as connection:
            client = PerfRun(connection, KEY, settings.load({}, {}), lambda row: None)
            with pytest.raises(KeyboardInterrupt):
                client.as_client(plan, lambda: monkeypatch.setattr(threading.Thread, "start", interrupted))
        served.join(20)
        assert not served.is_alive()
    assert "it was interrupted (Ctrl-C)" in told[0]
    assert not [thread for thread in threading.enumerate() if thread.name == "bpsfast-perf"]


def both_running(start, *arguments):
    """Return a client and a server between which a run of a minute has begun."""
    with lines.listen(0, "127.0.0.1") as free:
        port = str(free.getsockname()[1])
    server = start("bw", "-p", port, *arguments)
    client = start("bw", "127.0.0.1", "-p", port, "-D", "60", "--wait", "30", *arguments)
    while "BW average" not in client.stdout.readline():
        assert client.poll() is None, client.stderr.read()
    return client, server


def test_ctrl_c_ends_both_sides(start):
    client, server = both_running(start, "--transport", "tcp")
    client.send_signal(signal.SIGINT)
    _, complaint = client.communicate(timeout=20)
    _, told = server.communicate(timeout=20)
    assert client.returncode == 130 and "the other side has been told" in complaint
    assert server.returncode == 1 and "it was interrupted (Ctrl-C)" in told


def test_a_killed_client_ends_the_server(start):
    client, server = both_running(start, "--transport", "shm")
    client.kill()
    client.communicate(timeout=20)
    _, told = server.communicate(timeout=20)
    assert server.returncode == 1 and "closed the connection" in told
