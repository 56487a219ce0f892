"""Numbers for Prometheus: a real job, a real GET, read by Prometheus' own parser; and the file."""
from __future__ import annotations

import socket
import urllib.error
import urllib.request

import msgspec
import numpy as np
import pytest

import bpsfast
from bpsfast.launch import daemons
from bpsfast.node import metrics
from bpsfast.node.event_loop import EventLoop
from bpsfast.orchestration.errors import ConfigError
from bpsfast.orchestration.messages import LagRow
from bpsfast.settings import Settings
from bpsfast.top.sample import rank_samples
from bpsfast.top.scrape import Scrape, scrape

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


def found(table, name, **labels):
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


READING = metrics.Reading(
    {"engine": {"sums": 1, "bytes_summed": 2, "published_bytes": 3},
     "dispatch": {"queued": 4, "peak_queued": 5, "in_flight_nbytes": 6}},
    {"input": 7}, {1: "shm"}, (LagRow(rank=0, count=4, total_ns=2 * 10**9, n_last=1),))


@pytest.fixture
def loop():
    errors = []
    made = EventLoop(errors.append)
    yield made
    made.close()
    assert not errors


def settings(**values):
    return msgspec.structs.replace(Settings(), **values)


def test_a_loop_that_is_busy_fails_the_scrape_and_not_the_job(loop, port, monkeypatch, no_leaks):
    monkeypatch.setattr(metrics, "_ANSWER_S", 0.1)
    exporter = metrics.Exporter(settings(metrics_port=port), 0, 0, loop, lambda: READING)
    with pytest.raises((urllib.error.HTTPError, ConnectionError)):
        get(port)
    exporter.close()
    exporter.close()


def test_a_port_that_is_taken_is_named(loop, port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(ConfigError, match=rf"cannot serve its numbers on 127\.0\.0\.1:{port}: .*in use"):
            metrics.Exporter(settings(metrics_port=port), 0, 0, loop, lambda: READING)


def test_a_file_is_written_again_and_what_hinders_it_told_once(loop, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_TEXTFILE_S", 0.01)
    path = tmp_path / "x.prom"
    exporter = metrics.Exporter(settings(metrics_textfile=str(path)), 3, 0, loop, lambda: READING)
    table = samples(path.read_text())
    assert found(table, "bpsfast_lag_seconds_sum", node="3", rank="0") == 2.0
    assert found(table, "bpsfast_lag_last_ratio", node="3", rank="0") == 0.25
    path.unlink()
    while not path.exists():
        loop.run_once(1.0)
    path.unlink()
    path.mkdir()  # nothing can be renamed onto it
    (path / "x").touch()
    for _ in range(3):
        loop.run_once(1.0)
    exporter.close()
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1


def test_two_nodes_of_a_host_need_two_files(loop, tmp_path):
    with pytest.raises(ConfigError, match=r"put \{node\} into the name"):
        metrics.Exporter(settings(metrics_textfile=str(tmp_path / "x")), 1, 1, loop, lambda: READING)


def test_what_cannot_be_exported_is_refused_before_anything_starts(monkeypatch, tmp_path):
    metrics.check(settings())
    metrics.check(settings(metrics_port=9400, metrics_textfile=str(tmp_path / "x")))
    with pytest.raises(ConfigError, match=r"the folder '.*nowhere' does not exist"):
        metrics.check(settings(metrics_textfile=str(tmp_path / "nowhere" / "x")))
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"BPSFAST_METRICS_PORT = 9400 needs .* pip install 'bpsfast\[metrics\]'"):
        metrics.check(settings(metrics_port=9400))
