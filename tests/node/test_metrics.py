"""Numbers for Prometheus: a real job, a real GET, read by Prometheus' own parser; and the file."""
from __future__ import annotations

import contextlib
import os
import platform
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.base.settings import Settings
from bpsfast.launch import daemons
from bpsfast.node import metrics
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.metrics import Reading, Status
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import VERSION, LagRow
from bpsfast.tools.top.sample import rank_samples
from bpsfast.tools.top.scrape import Scrape, scrape

parser = pytest.importorskip("prometheus_client.parser", reason="prometheus_client is not installed")

N_STEPS, NBYTES = 5, 40_000


def train():
    for _ in range(N_STEPS):
        bpsfast.push_pull(np.ones(NBYTES // 4, np.float32), True, "w")
    bpsfast.barrier()


def samples(text):
    """Return value by (name, labels)."""
    return {(sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in parser.text_string_to_metric_families(text) for sample in family.samples}


def found(table, name, /, **labels):
    return table[name, tuple(sorted(labels.items()))]


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return samples(answer.read().decode())


@pytest.fixture
def port():
    """A port with a free one behind it."""
    for _ in range(100):
        with daemons.reserve_port("127.0.0.1") as first, socket.socket() as second:
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
            except (OSError, OverflowError):
                continue
        return number
    raise AssertionError("no two free ports beside each other")


def test_a_job_is_read_over_http_and_from_files(job, port, tmp_path):
    started = job(ranks=(2, 1), transport="tcp", metrics_port=port, metrics_textfile=str(tmp_path / "node{node}.prom"))
    started.run(train)
    tables = [get(port + node) for node in (0, 1)]
    for node, ranks in ((0, (0, 1)), (1, (2,))):
        table, here = tables[node], {"node": str(node)}
        for rank in ranks:
            mine = here | {"rank": str(rank)}
            assert found(table, "bpsfast_pushed_bytes_total", **mine) == N_STEPS * NBYTES
            assert found(table, "bpsfast_steps_total", **mine) == N_STEPS - 2
            assert found(table, "bpsfast_step_seconds_total", **mine) > 0
            assert found(table, "bpsfast_stalls_total", **mine) == 0
            assert found(table, "bpsfast_lag_seconds_count", **mine) == N_STEPS
        assert found(table, "bpsfast_published_bytes_total", **here) == N_STEPS * NBYTES
        assert found(table, "bpsfast_queued_partitions", **here) == 0
        peer = {"peer": str(1 - node), "transport": "tcp"}
        assert found(table, "bpsfast_sent_bytes_total", **here, **peer) >= N_STEPS * NBYTES
        assert found(table, "bpsfast_segment_bytes", kind="input", **here) >= NBYTES
        assert found(table, "bpsfast_credit_bytes", **here) == Settings().credit_bytes
        assert found(table, "bpsfast_ready", **here) == found(table, "bpsfast_scheduler_connected", **here) == 1
        assert found(table, "bpsfast_epoch", **here) == 1 and found(table, "bpsfast_generation", **here) >= 1
        assert 0 <= found(table, "bpsfast_last_round_age_seconds", **here) < 60
        assert found(table, "bpsfast_recoveries_total", **here) == found(table, "bpsfast_joined_total", **here) == 0
        members = [dict(labels)["member"] for (name, labels), value in table.items()
                   if name == "bpsfast_member_up" and value == 1]
        assert sorted(members) == ["0", "1"]
    asked = started.call("stats", True)[0].job_lags
    scrapes = {node: (Scrape(0.0, {}), scrape("127.0.0.1", port + node, 20.0)) for node in (0, 1)}
    for seen, lag in zip(rank_samples(scrapes), asked, strict=True):  # bpsfast top puts them together as ranks are told
        assert (seen.rank, seen.last_share) == (lag.rank, lag.last_share) and seen.lag_s == pytest.approx(lag.mean_s)
    assert sum(found(tables[0], "bpsfast_lag_last_ratio", node="0", rank=str(rank)) for rank in (0, 1)) == 1.0
    started.run(train)
    started.close()
    for node, rank in ((0, 0), (1, 2)):
        last = samples((tmp_path / f"node{node}.prom").read_text())
        assert found(last, "bpsfast_pushed_bytes_total", node=str(node), rank=str(rank)) == 2 * N_STEPS * NBYTES
        with pytest.raises(urllib.error.URLError):
            get(port + node)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node0.prom", "node1.prom"]


READING = Reading(
    {"engine": {"sums": 1, "bytes_summed": 2, "published_bytes": 3},
     "dispatch": {"queued": 4, "peak_queued": 5, "in_flight_nbytes": 6}},
    {"input": 7}, {1: "shm"}, (LagRow(rank=0, count=4, total_ns=2 * 10**9, n_last=1),), epoch=2, generation=5)
READY = Status(3, "0123", "", True, 0.1)


@pytest.fixture
def loop():
    errors = []
    made = EventLoop(errors.append)
    yield made
    made.close()
    assert not errors


def settings(**values):
    return msgspec.structs.replace(Settings(), **values)


class Node:
    """What an exporter asks of a node: change it at will."""

    def __init__(self, loop: EventLoop, n_before: int = 0, **values: object) -> None:
        self.status: Status = READY
        self.reading: Reading | None = READING
        self.progress = 0, 0
        self.exporter = metrics.Exporter(settings(**values), loop, lambda: self.status, lambda: self.reading,
                                         lambda: self.progress, n_before)


@pytest.fixture
def node(loop):
    made = []

    def make(**values):
        made.append(Node(loop, **values))
        return made[-1]

    yield make
    for each in made:
        each.exporter.close()
        each.exporter.close()


def asked(loop, port, path, accept=""):
    """Return status, words and content type of an answer, while the loop runs."""
    with ThreadPoolExecutor(1) as executor:
        found = executor.submit(unturned, port, path, accept)
        while not found.done():
            loop.run_once(0.02)
    return found.result()


def unturned(port, path, accept=""):
    """The same while the loop does not run."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode(), answer.headers["Content-Type"]
    except urllib.error.HTTPError as exc:
        with exc:
            return exc.code, exc.read().decode(), exc.headers["Content-Type"]


def test_it_answers_before_there_is_a_job(node, loop, port):
    made = node(metrics_port=port)
    made.reading = None
    made.status = Status(-1, "", "waits for the scheduler at 10.0.0.1:7700", False, 0.0)
    assert unturned(port, "/healthz")[0] == 200
    assert unturned(port, "/readyz")[:2] == (503, "waits for the scheduler at 10.0.0.1:7700\n")
    code, text, _ = asked(loop, port, "/metrics")
    table = samples(text)
    assert code == 200 and found(table, "bpsfast_ready", node="") == 0
    assert found(table, "bpsfast_scheduler_connected", node="") == 0
    assert not [name for name, _ in table if name in ("bpsfast_job", "bpsfast_job_info", "bpsfast_sums_total")]
    with ThreadPoolExecutor(1) as executor:
        looked = executor.submit(scrape, "127.0.0.1", port, 20.0)
        while not looked.done():
            loop.run_once(0.02)
    with pytest.raises(TimeoutError, match="has no metrics yet: its job is starting"):
        looked.result()


def test_a_node_in_its_job_is_ready_and_names_job_and_epoch(node, loop, port):
    node(metrics_port=port)
    assert unturned(port, "/readyz")[:2] == (200, "in the job, and connected\n")
    table = samples(asked(loop, port, "/metrics")[1])
    here = {"node": "3"}
    assert found(table, "bpsfast_ready", **here) == found(table, "bpsfast_scheduler_connected", **here) == 1
    for name in ("bpsfast_job_info", "bpsfast_job"):  # the second one is the old name
        assert found(table, name, **here, name="0123", version=bpsfast.__version__) == 1
    assert found(table, "bpsfast_build_info", **here, version=bpsfast.__version__, protocol=str(VERSION),
                 python=platform.python_version()) == 1
    assert (found(table, "bpsfast_epoch", **here), found(table, "bpsfast_generation", **here)) == (2, 5)
    assert ("process_open_fds", ()) in table


def test_open_metrics_is_spoken_where_it_is_asked_for(node, loop, port):
    from prometheus_client.openmetrics.parser import text_string_to_metric_families

    node(metrics_port=port)
    code, text, kind = asked(loop, port, "/metrics", "application/openmetrics-text; version=1.0.0")
    assert code == 200 and kind.startswith("application/openmetrics-text")
    assert {"bpsfast_job_info", "bpsfast_sums"} <= {each.name for each in text_string_to_metric_families(text)}


def test_the_age_of_the_last_round(node, loop, port, monkeypatch):
    monkeypatch.setattr(metrics, "_LOOK_S", 0.01)
    made = node(metrics_port=port)
    before = samples(asked(loop, port, "/metrics")[1])
    assert not [name for name, _ in before if name.startswith("bpsfast_last_round")], "there was none"
    made.progress = 1, 100
    now = time.time()
    first = samples(asked(loop, port, "/metrics")[1])
    assert 0 <= found(first, "bpsfast_last_round_age_seconds", node="3") < 10
    assert now <= found(first, "bpsfast_last_round_timestamp_seconds", node="3") < now + 10
    later = samples(asked(loop, port, "/metrics")[1])
    assert found(later, "bpsfast_last_round_age_seconds", node="3") > found(
        first, "bpsfast_last_round_age_seconds", node="3")
    assert found(later, "bpsfast_last_round_timestamp_seconds", node="3") == found(
        first, "bpsfast_last_round_timestamp_seconds", node="3")


def test_a_loop_that_is_busy_tells_the_numbers_that_it_had(node, loop, port, monkeypatch, no_leaks):
    monkeypatch.setattr(metrics, "_ANSWER_S", 0.1)
    made = node(metrics_port=port)
    assert found(samples(asked(loop, port, "/metrics")[1]), "bpsfast_sums_total", node="3") == 1
    made.reading = READING._replace(groups=READING.groups | {"engine": dict.fromkeys(READING.groups["engine"], 9)})
    code, text, _ = unturned(port, "/metrics")
    stale = samples(text)
    assert code == 200 and found(stale, "bpsfast_sums_total", node="3") == 1
    assert found(stale, "bpsfast_reading_age_seconds", node="3") >= 0.1
    assert found(samples(asked(loop, port, "/metrics")[1]), "bpsfast_sums_total", node="3") == 9
    made.exporter.close()


def test_a_loop_that_is_stuck_does_not_live(node, port):
    made = node(metrics_port=port)
    for age_s, code in ((59.0, 200), (61.0, 503)):
        made.status = READY._replace(loop_age_s=age_s)
        assert unturned(port, "/healthz")[:2] == (code, f"the control loop ran {age_s} s ago\n")


def test_what_cannot_be_read_fails_the_scrape_and_not_the_job(node, loop, port):
    made = node(metrics_port=port)
    made.reading = 5
    assert asked(loop, port, "/metrics")[0] == 500
    assert unturned(port, "/nowhere")[0] == 404
    assert unturned(port, "/readyz?verbose=1")[0] == 200


def test_a_port_that_is_taken_is_named_and_tried_again(node, loop, port, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_LOOK_S", 0.01)
    monkeypatch.setattr(metrics, "_TAKEN_S", 0.05)
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        node(metrics_port=port)
        while not caplog.messages:
            loop.run_once(1.0)
    assert re.match(rf"the node cannot serve its numbers on 127\.0\.0\.1:{port}: .*in use", caplog.messages[0])
    while True:
        loop.run_once(1.0)
        with contextlib.suppress(urllib.error.URLError):
            assert unturned(port, "/healthz")[0] == 200
            break
    assert len(caplog.messages) == 1


def test_nodes_of_a_host_take_ports_in_their_order_whoever_comes_first(node, loop, port, monkeypatch):
    """Both begin with the first port; the one that had it makes room."""
    monkeypatch.setattr(metrics, "_LOOK_S", 0.01)
    second, first = node(metrics_port=port), node(metrics_port=port)
    second.status = READY._replace(node=4)
    second.exporter.welcomed(4, 1)
    first.exporter.welcomed(3, 0)
    for _ in range(3):
        loop.run_once(1.0)
    for number, at in ((3, port), (4, port + 1)):
        assert found(samples(asked(loop, at, "/metrics")[1]), "bpsfast_ready", node=str(number)) == 1


def test_a_file_is_written_again_and_what_hinders_it_told_once(node, loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_TEXTFILE_S", 0.01)
    path = tmp_path / "x.prom"
    made = node(metrics_textfile=str(path))
    assert not path.exists()
    made.progress = 1, 1
    made.exporter.welcomed(3, 0)
    table = samples(path.read_text())
    assert found(table, "bpsfast_lag_seconds_sum", node="3", rank="0") == 2.0
    assert found(table, "bpsfast_lag_last_ratio", node="3", rank="0") == 0.25
    assert found(table, "bpsfast_scheduler_connected", node="3") == 1
    assert found(table, "bpsfast_last_round_age_seconds", node="3") >= 0
    assert not [name for name, _ in table if name.startswith("process_")], "node-exporter has a process of its own"
    path.unlink()
    while not path.exists():
        loop.run_once(1.0)
    path.unlink()
    path.mkdir()  # nothing can be renamed onto it
    (path / "x").touch()
    for _ in range(3):
        loop.run_once(1.0)
    made.exporter.close()
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1


def test_two_nodes_of_a_host_need_two_files(node, tmp_path):
    with pytest.raises(ConfigError, match=r"put \{node\} into the name"):
        node(metrics_textfile=str(tmp_path / "x")).exporter.welcomed(1, 1)


def test_what_cannot_be_written_is_refused_before_anything_starts(tmp_path, caplog):
    metrics.check(settings())
    metrics.check(settings(metrics_port=9400, metrics_textfile=str(tmp_path / "x")))
    with pytest.raises(ConfigError, match=r"the folder '.*nowhere' does not exist"):
        metrics.check(settings(metrics_textfile=str(tmp_path / "nowhere" / "x")))
    assert not caplog.messages


def test_without_the_library_a_job_goes_on_without_numbers(node, loop, port, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    path = tmp_path / "x.prom"
    metrics.check(settings(metrics_port=port, metrics_textfile=str(path)))
    assert len(caplog.messages) == 1 and re.match(
        rf"BPSFAST_METRICS_PORT = {port}: the library prometheus_client is not installed, so the job goes on without "
        r".*pip install 'bpsfast\[metrics\]'", caplog.messages[0])
    made = node(metrics_port=port, metrics_textfile=str(path))
    made.exporter.welcomed(3, 0)
    assert unturned(port, "/healthz")[0] == unturned(port, "/readyz")[0] == 200
    code, words, _ = asked(loop, port, "/metrics")
    assert code == 501 and "pip install 'bpsfast[metrics]'" in words
    made.exporter.close()
    assert not path.exists() and len(caplog.messages) == 1


@pytest.mark.slow
def test_a_node_whose_ranks_do_not_come_lives_and_is_not_ready(port):
    """From the first second of a real node on, while it waits for its ranks; then SIGTERM ends it in silence."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("BPSFAST_", "DMLC_"))}
    with daemons.reserve_port("127.0.0.1") as scheduler, subprocess.Popen(
            [sys.executable, "-m", "bpsfast", "node", "--local-size", "2", "--scheduler",
             f"127.0.0.1:{scheduler.getsockname()[1]}"], stderr=subprocess.PIPE, text=True,
            env={**environ, "BPSFAST_METRICS_PORT": str(port), "BPSFAST_JOB_KEY": "ab" * 32}) as process:
        deadline = time.monotonic() + 30.0
        while True:
            with contextlib.suppress(urllib.error.URLError):
                assert unturned(port, "/healthz")[0] == 200
                break
            assert process.poll() is None and time.monotonic() < deadline
        code, words, _ = unturned(port, "/readyz")
        assert code == 503
        assert words == "waits for ranks of this machine: local rank 0, 1 has not attached yet\n"
        assert found(get(port), "bpsfast_ready", node="") == 0
        process.terminate()
        assert process.wait(20.0) == 1 and process.stderr.read() == ""
