"""Tests clusters of network namespaces with real links, counters and rate limits."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.launch.namespaces import Cluster, CpuMeter, netns
from bpsfast.orchestration.errors import ConfigError, StallError

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")]

_MEGABYTE = 10**6


@pytest.fixture
def pair():
    with Cluster(["a", "b"]) as cluster:
        yield cluster


def test_machines_reach_each_other(pair):
    text = "import socket, sys; socket.create_server((sys.argv[1], 7000)); print(len(socket.if_nameindex()))"
    done = pair["a"].run([sys.executable, "-c", text, pair["a"].address], timeout_s=30)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
    listen = "import socket; s = socket.create_server(('', 7000)); print(flush=True); s.accept()"
    listener = pair["a"].popen([sys.executable, "-c", listen], stdout=subprocess.PIPE)
    with listener:
        listener.stdout.readline()
        connect = f"import socket; socket.create_connection(({pair['a'].address!r}, 7000), timeout=10)"
        assert pair["b"].run([sys.executable, "-c", connect], timeout_s=30).returncode == 0
        assert listener.wait(timeout=30) == 0


@pytest.mark.parametrize("ip_version", [4, 6])
def test_many_machines_need_no_entries_of_the_kernels_table(ip_version):
    """It has 1,024 for all namespaces together; every pair of machines would need two."""
    with Cluster(12, ip_version=ip_version) as cluster:
        for machine in (cluster.hub, cluster["m0"], cluster["m11"]):
            known = netns.ip("-n", machine.namespace, "neigh", "show", "nud", "permanent").splitlines()
            assert len([line for line in known if "lladdr" in line and not line.startswith(("ff02", "224."))]) == 12
        probe = f"import socket; socket.create_connection(({cluster['m11'].address!r}, 7000), timeout=10)"
        listen = f"import socket; s = socket.create_server(({cluster['m11'].address!r}, 7000), " \
                 f"family=socket.AF_INET{'6' if ip_version == 6 else ''}); print(flush=True); s.accept()"
        with cluster["m11"].popen([sys.executable, "-c", listen], stdout=subprocess.PIPE) as listener:
            listener.stdout.readline()
            assert cluster["m0"].run([sys.executable, "-c", probe], timeout_s=30).returncode == 0
            assert listener.wait(timeout=30) == 0


def test_the_hosts_own_interfaces_stay_as_they_are():
    before = socket.if_nameindex()
    with Cluster(["a", "b"], rates="1gbit"):
        assert socket.if_nameindex() == before


def test_the_hub_is_a_place_too(pair):
    done = pair.hub.run(["ip", "-br", "addr"], timeout_s=30)
    assert pair.hub.address in done.stdout


def test_a_machine_sees_its_own_environment_and_exit_code(pair):
    done = pair["a"].run(
        [sys.executable, "-c", "import os; print(os.environ['X']); raise SystemExit(5)"], 30, env={"X": "y"}
    )
    assert (done.returncode, done.stdout) == (5, "y\n")


def test_a_program_that_does_not_end_is_killed_at_its_deadline(pair):
    with pytest.raises(StallError, match="sleep 600 on machine a"):
        pair["a"].run(["sleep", "600"], timeout_s=0.3)


@pytest.mark.slow
def test_bytes_are_counted_and_limited_each_way(pair):
    rates = {"a": ("200mbit", "100mbit"), "b": "1gbit"}
    with Cluster(["a", "b"], rates=rates) as cluster:
        before = cluster["a"].traffic(), cluster["b"].traffic()
        found = cluster.calibrate("a", "b")
        moved = cluster["a"].traffic() - before[0], cluster["b"].traffic() - before[1]
    # headers cost 4.5 %; the bucket's burst adds a little
    reached = 0.85 if found.cpu_busy < 0.8 else 0.1  # a busy CPU is the limit then, not the link
    assert reached * 25 * _MEGABYTE < found.forth < 1.05 * 25 * _MEGABYTE
    assert reached * 12.5 * _MEGABYTE < found.back < 1.05 * 12.5 * _MEGABYTE
    assert found.rate_bytes == found.back
    assert 0.0 <= found.cpu_busy <= 1.0
    assert moved[0].tx == pytest.approx(moved[1].rx, rel=0.01), (
        "what one sends the other gets (and neighbour discovery)"
    )
    assert moved[0].tx > 25 * _MEGABYTE
    assert moved[0].rx > 12.5 * _MEGABYTE


def test_close_kills_what_runs_and_leaves_no_namespace():
    with Cluster(2) as cluster:
        process = cluster["m1"].popen(["sleep", "600"])
        namespaces = [machine.namespace for machine in (*cluster, cluster.hub)]
        assert all((Path("/run/netns") / name).exists() for name in namespaces)
    assert process.returncode is not None and process.returncode < 0
    assert not any((Path("/run/netns") / name).exists() for name in namespaces)
    cluster.close()


def test_two_clusters_live_beside_each_other(pair):
    with Cluster(["a", "b"]) as other:
        assert other["a"].namespace != pair["a"].namespace
        assert other["a"].run(["true"], 30).returncode == 0
    assert pair["a"].run(["true"], 30).returncode == 0


@pytest.mark.parametrize(
    "machines, rates, text",
    [
        ([], None, "1 to 249"),
        (["a", "a"], None, "different"),
        (["hub"], None, "hub"),
        (["a/b"], None, "a/b"),
        (["a"], {"b": "1gbit"}, "no machines"),
        (["a"], "fast", "no rate"),
    ],
)
def test_impossible_arguments_are_errors(machines, rates, text):
    with pytest.raises(ConfigError, match=text):
        Cluster(machines, rates=rates)


def test_what_is_missing_is_one_line(monkeypatch):
    monkeypatch.setattr(netns, "missing", lambda: "network namespaces need root")
    with pytest.raises(ConfigError, match=r"^network namespaces need root$"):
        Cluster(1)


def test_a_failed_start_leaves_nothing(monkeypatch):
    def ours() -> set[str]:
        return {path.name for path in Path("/run/netns").glob(f"{netns._owner_prefix()}*")}

    before = ours()

    def refuse(*args: object) -> None:
        raise ConfigError("no more links")

    monkeypatch.setattr(netns, "plug", refuse)
    with pytest.raises(ConfigError, match="no more links"):
        Cluster(2)
    assert ours() <= before


def test_the_cpu_meter_sees_work():
    with CpuMeter() as meter:
        sum(range(3_000_000))
    assert 0.0 < meter.busy <= 1.0
