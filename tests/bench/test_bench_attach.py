"""bench --attach: the numbers of a real job are right, and error messages are helpful."""
from __future__ import annotations

import json
import socket
import threading

import numpy as np
import pytest
from click.testing import CliRunner

import bpsfast
from bpsfast.bench.push_pull import attach
from bpsfast.cli import cli
from bpsfast.launch import daemons
from bpsfast.orchestration.errors import ConfigError, PeerLostError

N_STEPS, NBYTES = 6, 400_000


def train():
    for _ in range(N_STEPS):
        bpsfast.push_pull(np.ones(NBYTES // 4, np.float32), True, "w")
    bpsfast.barrier()


@pytest.fixture
def port():
    """A free port whose next port is free, too."""
    for _ in range(100):
        with daemons.reserve_port("127.0.0.1") as first, socket.socket() as second:
            number = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", number + 1))
            except (OSError, OverflowError):
                continue
        return number
    raise AssertionError("no two free ports beside each other")


@pytest.mark.slow
def test_a_running_job_is_read_while_it_trains(job, port, tmp_path, capsys):
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    started = job(ranks=(2, 1), transport="tcp", metrics_port=port)
    started.run(train)
    path = tmp_path / "out.jsonl"
    addresses = f"127.0.0.1:{port},127.0.0.1:{port + 1}"
    attach.run({"attach": addresses, "json_path": str(path)}, pause=lambda seconds: started.run(train))
    manifest, *records = [json.loads(line) for line in path.read_text().splitlines()]
    assert manifest["bench"] == "attach" and manifest["options"] == {"attach": addresses}
    nodes = [record["measured"] for record in records if record["section"] == "node"]
    ranks = [record for record in records if record["section"] == "rank"]
    places = [(record["chosen"]["node"], record["chosen"]["rank"]) for record in ranks]
    assert places == [("0", "0"), ("0", "1"), ("1", "2")]
    for record in ranks:
        assert record["measured"]["pushed"] * record["measured"]["elapsed_s"] == pytest.approx(N_STEPS * NBYTES)
        assert record["measured"]["steps"] * record["measured"]["elapsed_s"] == pytest.approx(N_STEPS)
    for node, other in zip(nodes, nodes[::-1]):
        moved = node["sent"] * node["elapsed_s"]
        assert N_STEPS * NBYTES <= moved <= 1.1 * N_STEPS * NBYTES, "of two nodes each sends an array's bytes a step"
        assert moved == pytest.approx(other["received"] * other["elapsed_s"], rel=0.02)
        assert node["published"] * node["elapsed_s"] == pytest.approx(N_STEPS * NBYTES)
        assert 0 < node["cpu_share"] < 8
    shown = capsys.readouterr().out
    assert "node 1, 127.0.0.1" in shown and max(map(len, shown.splitlines())) <= 80


def test_refusals_say_what_to_do():
    with daemons.reserve_port("127.0.0.1") as reserved:
        port = reserved.getsockname()[1]
    with pytest.raises(PeerLostError, match="metrics_port"):
        attach.run({"attach": f"127.0.0.1:{port}"})
    with socket.create_server(("127.0.0.1", 0)) as another, pytest.raises(ConfigError, match="does not speak HTTP"):
        def answer():
            stream, _ = another.accept()
            with stream:
                stream.recv(4096)
                stream.sendall(b"SSH-2.0-other\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            attach.run({"attach": f"127.0.0.1:{another.getsockname()[1]}"})
        finally:
            thread.join()
    for options in ({"attach": "x"}, {"attach": " ,"}, {"attach": "a:1", "n_ranks": 2}):
        with pytest.raises(ConfigError):
            attach.run(options)
    for given in (["-n", "2"], ["--nodes", "2"], ["-H", "far"], ["-x", "A=1"], ["--ssh-port", "22"], ["--sizes", "4K"]):
        done = CliRunner().invoke(cli, ["bench", "push_pull", "--attach", "127.0.0.1:1", *given])
        name = "--num-ranks" if given[0] == "-n" else given[0]
        assert done.exit_code == 2 and f"leave out {name}\n" in done.output
    done = CliRunner().invoke(cli, ["bench", "push_pull", "--seconds", "1"])
    assert done.exit_code == 2 and "--attach" in done.output
