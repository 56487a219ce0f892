"""``bpsfast top``: a real job read over HTTP, its helper killed, its node stopped, its end; screens; what is no job."""
from __future__ import annotations

import http.server
import io
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import msgspec
import numpy as np
import psutil
import pytest
from click.testing import CliRunner, Result

import bpsfast
from bpsfast.cli import cli
from bpsfast.launch import daemons
from bpsfast.node.metrics import Collector, Member, Reading, Status
from bpsfast.orchestration.errors import StallError
from bpsfast.tools.commands import top as command
from bpsfast.tools.top import screen
from bpsfast.tools.top.sample import NodeSample, RankSample, Sample
from bpsfast.tools.top.scrape import NotBpsfastError, scrape
from bpsfast.tools.top.watch import MetricsAddress, Watch
from tests.support.terminal import on_terminal

prometheus_client = pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")

NBYTES = 400_000


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["top", *arguments])


def train(stop: str) -> int:
    """Push until rank 0 finds the file *stop*; rank 2 is late each time. Return the number of rounds."""
    rounds, going = 0, 1.0
    while going:
        if bpsfast.rank() == 2:
            time.sleep(0.03)
        mine = np.full(1, float(bpsfast.rank() == 0 and not os.path.exists(stop)), np.float32)
        going = bpsfast.push_pull(mine, average=False, name="going")[0]
        bpsfast.push_pull(np.ones(NBYTES // 4, np.float32), name="w")
        rounds += 1
    return rounds


@pytest.fixture
def port() -> int:
    """A port with two free ones behind it."""
    for _ in range(100):
        with daemons.reserve_port("127.0.0.1") as first, socket.socket() as second, socket.socket() as third:
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
                third.bind(("127.0.0.1", number + 2))
            except (OSError, OverflowError):
                continue
        return int(number)
    raise AssertionError("no three free ports beside each other")


def until(watch: Watch, holds: Callable[[Sample], bool], seconds: float = 20.0) -> Sample:
    """Return the first sample of which *holds* is true."""
    deadline = time.monotonic() + seconds
    for sample in command.sampled(watch, 0.2):
        if holds(sample):
            return sample
        assert time.monotonic() < deadline, sample
    raise AssertionError("the job has ended")


def state_of(sample: Sample, number: int) -> str:
    """Return the state of a node, "" if nothing is known of it."""
    return next((node.state for node in sample.nodes if node.node == number), "")


@pytest.mark.slow
def test_a_job_from_its_first_step_to_its_end(job, port: int, no_leaks, tmp_path: Path) -> None:
    started = job(ranks=(2, 1), helpers=1, transport="tcp", metrics_port=port, helper_lease_s=1.0)
    setting = ("--set", f"metrics_port={port}")
    stop = tmp_path / "stop"
    started.begin(train, str(stop))
    with Watch([MetricsAddress("127.0.0.1", port)]) as watch:  # kernels are compiled, memory is faulted in
        watch.find()
        found = until(watch, lambda sample: len(sample.ranks) == 3 and all(
            rank.steps_per_s and rank.pushed_bytes_per_s and rank.lag_s is not None for rank in sample.ranks))
        assert all(rank.stalls == 0 for rank in found.ranks)
        found = until(watch, lambda sample: all(node.sent_bytes_per_s and node.sums_per_s and node.credit_bytes
                                                for node in sample.nodes[:2]))
        assert all((node.sent_bytes_per_s or 0) > NBYTES / 10 for node in found.nodes[:2])
        found = until(watch, lambda sample: (late := screen.latest(sample)) is not None and late.rank == 2)
        assert (found.ranks[2].lag_s or 0) > 0.005
    done = invoke("--once", "--json", *setting)
    assert done.exit_code == 0, done.output
    sample = msgspec.json.decode(done.stdout, type=Sample)
    assert [(node.node, node.is_helper) for node in sample.nodes] == [(0, False), (1, False), (2, True)]
    assert {(rank.rank, rank.node) for rank in sample.ranks} <= {(0, 0), (1, 0), (2, 1)}  # a busy node may be silent
    plain = invoke("--samples", "1", "--interval", "0.2", *setting)
    assert plain.exit_code == 0 and "helpers 1 of 1" in plain.output
    one = msgspec.json.decode(invoke(f"127.0.0.1:{port + 1}", "--once", "--json", "-i", "0.2").stdout, type=Sample)
    if one.nodes[-1].state == "unseen":  # node 1 has answered in time
        assert [node.state for node in one.nodes] == ["unseen", "up", "unseen"] and [r.rank for r in one.ranks] == [2]

    with Watch([MetricsAddress("127.0.0.1", port)], timeout_s=0.5) as watch:
        watch.find()
        started.daemons["helper 0"].kill()
        lost = until(watch, lambda sample: state_of(sample, 2) == "lost" and sample.nodes[0].recoveries == 1)
        assert lost.nodes[2].is_helper and not watch.missed
        stop.touch()
        started.outcomes()
        node = started.daemons["node 1"]
        os.kill(node.pid, signal.SIGSTOP)
        try:
            until(watch, lambda sample: state_of(sample, 1) == "silent")
            with Watch([MetricsAddress("127.0.0.1", port + 1, is_one=True)], timeout_s=0.2) as other:
                with pytest.raises(StallError, match="no metrics within"):
                    other.find()
        finally:
            os.kill(node.pid, signal.SIGCONT)
        back = until(watch, lambda sample: state_of(sample, 1) == "up")
        assert any("node 1" in remark and "is there" in remark for remark in back.remarks)
        started.daemons.pop("helper 0").wait(10)
        started.close()
        assert watch.sample() is None
    done = invoke("--once", *setting)
    assert done.exit_code == 1 and "BPSFAST_METRICS_PORT=9400" in done.stderr


class Nodes:
    """Exporters of nodes 0 and 1 at *port* and the next one, of a job that does nothing; each can be stopped."""

    def __init__(self, job: str, port: int) -> None:
        self._servers = {}
        members = tuple(Member(index, f"m{index}", False, True) for index in (0, 1))
        groups = {"engine": {"sums": 1}, "dispatch": {"credit_nbytes": 1 << 20}, "rank_0": {"pushed_bytes": 5}}
        for index in (0, 1):
            registry = prometheus_client.CollectorRegistry()
            reading, status = Reading(groups, {}, {}, (), members=members), Status(index, job, "", True, 0.0)
            registry.register(Collector(lambda status=status: status, lambda reading=reading: (0.0, reading)))
            self._servers[index] = prometheus_client.start_http_server(port + index, "127.0.0.1", registry)

    def stop(self, index: int) -> None:
        server, thread = self._servers.pop(index)
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_node_that_is_gone_alone_is_missed_and_the_next_job_is_found(port: int, no_leaks) -> None:
    nodes = Nodes("a", port)
    with Watch([MetricsAddress("127.0.0.1", port)]) as watch:
        watch.find()
        sample = watch.sample()
        assert sample is not None and [node.state for node in sample.nodes] == ["up", "up"] and sample.ranks
        nodes.stop(1)
        samples = [watch.sample() for _ in range(3)]
        assert samples[0] is not None and samples[2] is not None
        assert samples[0].remarks == ("node 1 (m1) does not listen any more",) and not samples[2].remarks
        assert samples[2].nodes[1].state == "gone" and watch.missed == {1}
        nodes.stop(0)
        assert watch.sample() is None and not watch.find_next(0.0)
        nodes = Nodes("b", port)
        assert watch.find_next(20.0)
        later = watch.sample()
        assert later is not None and later.job == "b" and [node.state for node in later.nodes] == ["up", "up"]
    done = invoke("--samples", "2", "--json", "-i", "0.2", "--set", f"metrics_port={port}")
    assert done.exit_code == 0
    assert [msgspec.json.decode(line, type=Sample).job for line in done.stdout.splitlines()] == ["b", "b"]
    code, screen_text = on_terminal(["top", "-n", "2", "-i", "0.2", "--set", f"metrics_port={port}"], width=80)
    assert code == 0 and "\x1b[?1049h" in screen_text, "the alternate screen"
    *_, left = screen_text.split("\x1b[?1049l")
    lines = click.unstyle(left).splitlines()
    assert [line.split()[1] for line in lines if line.split()[2:3] == ["ranks"]] == ["m0", "m1"]
    assert max(map(len, lines)) <= 80
    for index in (0, 1):
        nodes.stop(index)


class _Stranger(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>not a metric</html>\n")

    def log_message(self, *arguments: object) -> None:
        """Be quiet."""


@pytest.fixture
def stranger() -> Iterator[int]:
    with http.server.HTTPServer(("127.0.0.1", 0), _Stranger) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_another_program_s_answer_is_no_job(stranger: int) -> None:
    done = invoke(f"127.0.0.1:{stranger}", "--once", "--json")
    assert done.exit_code == 1
    assert msgspec.json.decode(done.stdout)["error"]["class"] == "PeerLostError"


def test_its_connection_is_closed_while_its_error_is_kept(stranger: int) -> None:
    """Its answer tells no length, so nothing but we can end it here."""
    with pytest.raises(NotBpsfastError) as caught:
        scrape("127.0.0.1", stranger, 10.0)
    held = [each for each in psutil.Process().net_connections("tcp") if each.raddr and each.raddr.port == stranger]
    assert caught.value and not held


SAMPLE = Sample(
    time=1.7e9, seconds=1.0, job="0123456789abcdef", version="0.1.0", remarks=("helper 2 (cpu01) is there",),
    nodes=(*(NodeSample(node=i, state="up", is_helper=False, host=f"gpu{i:02}.example", sent_bytes_per_s=1.2345e9,
                        received_bytes_per_s=999.9e6, goodput_bytes_per_s=1e9, sums_per_s=12345, queued=1024,
                        in_flight_bytes=16 << 20, credit_bytes=16 << 20, segment_bytes=12 << 30) for i in range(2)),
           NodeSample(node=2, state="lost", is_helper=True, host="cpu01")),
    ranks=tuple(RankSample(rank=i, node=i // 8, steps=123456, steps_per_s=12.34, step_s=0.0812, exposed=1.0,
                           overlap=0.5, pushed_bytes_per_s=1.2e9, stalls=12, lag_s=0.1234 if i == 11 else 0.001,
                           last_share=0.7 if i == 11 else 0.02) for i in range(16)))


@pytest.mark.parametrize("width", [80, 120])
def test_a_screen_is_as_wide_and_as_high_as_the_terminal(width: int) -> None:
    lines = screen.text(SAMPLE, width).splitlines()
    assert max(map(len, lines)) <= width and "late: rank 11, 123.4 ms on average, last in 70% of units" in lines
    assert ("RELINKED" in lines[4]) == (width == 120) and len([line for line in lines if "1.2 GB" in line]) == 16
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    console = rich.Console(width=width, height=24, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen.picture(SAMPLE, width, 24, SAMPLE.remarks))
    shown = console.file.getvalue().splitlines()
    assert len(shown) <= 24 and max(map(len, shown)) <= width
    assert "the 11 latest of 16 ranks" in "\n".join(shown) and "helper 2 (cpu01) is there" in shown[-1]


@pytest.mark.parametrize("n_ranks", [0, 3, 16])
@pytest.mark.parametrize("n_nodes", [1, 8, 14, 15, 60])
def test_nodes_leave_room_for_ranks_and_remarks(n_nodes: int, n_ranks: int) -> None:
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    nodes = tuple(msgspec.structs.replace(SAMPLE.nodes[0], node=i, sent_bytes_per_s=float(i)) for i in range(n_nodes))
    lost = msgspec.structs.replace(nodes[0], state="lost")
    many = msgspec.structs.replace(SAMPLE, nodes=(lost, *nodes[1:]), ranks=SAMPLE.ranks[:n_ranks],
                                   remarks=("the last",))
    console = rich.Console(width=120, height=24, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen.picture(many, 120, 24, many.remarks))
    shown = console.file.getvalue().splitlines()
    assert len(shown) <= 24 and shown[-1] == "the last" and "lost" in "\n".join(shown)
    nodes_shown, *ranks_shown = screen.tables(many, 120, 23)
    assert sum(len(each.rows) for each in ranks_shown) >= min(n_ranks, 5)
    if len(nodes_shown.rows) < n_nodes:
        assert f"{len(nodes_shown.rows)} of {n_nodes} nodes" in "\n".join(shown)
        assert {row[0] for row in nodes_shown.rows[1:]} >= {row[0] for row in screen.tables(many, 120)[0].rows[-3:]}
    assert len(screen.tables(many, 120)[0].rows) == n_nodes


@pytest.mark.parametrize(("width", "n_ranks"), [(80, 4), (120, 8)])
def test_remarks_of_former_samples_find_room_on_the_screen(width: int, n_ranks: int) -> None:
    rich = pytest.importorskip("rich.console", reason="rich is not installed")
    later = msgspec.structs.replace(SAMPLE, remarks=())
    remarks = [f"node {i} (gpu{i:02}.cluster.example.org) is in the job, but serves no metrics at these addresses"
               for i in range(4)]
    console = rich.Console(width=width, height=24, file=io.StringIO(), force_terminal=True, color_system=None)
    console.print(screen.picture(later, width, 24, remarks))
    shown = console.file.getvalue().splitlines()
    assert len(shown) == 24 and shown[-1].endswith("addresses")
    assert f"the {n_ranks} latest of 16 ranks" in "\n".join(shown)


@pytest.mark.parametrize(("arguments", "words"), [
    (("--once", "-n", "2"), "--once is --samples 1"), (("--json", "--plain"), "choose one"),
    (("--interval", "0.01"), "0.2"), (("host:port",), "expected host:port"),
    (("--set", "metrics_por=1"), "metrics_port?"),
])
def test_wrong_arguments_are_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    done = invoke(*arguments)
    assert done.exit_code == 2 and words in done.output


def test_places() -> None:
    assert command.metrics_address("gpu01", 9400) == MetricsAddress("gpu01", 9400)
    assert command.metrics_address("gpu01:9", 9400) == MetricsAddress("gpu01", 9, is_one=True)
    assert command.metrics_address("[::1]:9", 9400) == MetricsAddress("::1", 9, is_one=True)
    assert command.metrics_address("::1", 9400) == MetricsAddress("::1", 9400)
