"""tune rdma on real devices: every load, what cannot be, a machine that dies, and a profile kept and taken back.

Runs in the guest: in this process rxe1 measures with listeners on rxe0; by command host 1 with host 0.
"""
from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading

import msgspec
import pytest

from bpsfast.base import settings
from bpsfast.orchestration.errors import BpsError
from bpsfast.tools.perf import control as lines
from bpsfast.tools.tune.search import ConfigRefusedError
from bpsfast.tools.tune.testbed import TuneServer, TuneTestbed
from bpsfast.tools.tune.tunables import INCAST, LATENCY, ONE_WAY, TWO_WAY
from bpsfast.tools.tune.tuning_run import TuningRun

KEY = b"k" * 32
OWN = settings.load({"rdma_devices": "=rxe1", "partition_bytes": 65536, "credit_bytes": 262144}, {})


@contextlib.contextmanager
def listening(n):
    """Have *n* listeners on rxe0; yield their addresses."""
    loaded = settings.load({"rdma_devices": "=rxe0"}, {})
    with contextlib.ExitStack() as undo:
        threads, where = [], []
        for _ in range(n):
            sock = undo.enter_context(lines.listen(0, "127.0.0.1"))
            partner = TuneServer(sock, KEY, loaded, lambda words: None)
            threads.append(threading.Thread(target=partner.serve, args=(120.0,)))
            threads[-1].start()
            where.append(("127.0.0.1", sock.getsockname()[1]))
        try:
            yield where
        finally:
            TuneTestbed(where, KEY, loaded, 10.0, 60.0).ask("end")
            for thread in threads:
                thread.join(30)
            assert not any(thread.is_alive() for thread in threads)


def session(where, goal=None, **more):
    field = TuneTestbed(where, KEY, OWN, 30.0, 60.0)
    return TuningRun(field, "127.0.0.1", OWN, goal, 40.0, 60.0, **more)


@pytest.mark.timeout(300)
def test_every_load_is_measured_and_counted():
    with listening(2) as where:
        found = session(where, INCAST)
        assert found.loads == (ONE_WAY, TWO_WAY, INCAST, LATENCY)
        for load in found.loads:
            assert found.measure(found.start, load) > 0
        assert [len(found.ways(found.start, load)) for load in found.loads] == [1, 1, 2, 1]
        ports = {delta.device.split()[1]: delta for delta in found.counted(found.start, INCAST)}
        assert set(ports) == {"rxe0", "rxe1"} and all(delta.changes["rcvd_pkts"] > 0 for delta in ports.values())
        plan, _ = found.effective(found.start, INCAST)
        assert plan.reversed and plan.depth == 4 and plan.sizes == (65536,)


@pytest.mark.timeout(300)
def test_every_setting_can_be_measured_and_makes_a_difference():
    with listening(1) as where:
        found = session(where)
        for change in ({"rdma_queue_pairs": 2}, {"rdma_signal_every": 4}, {"rdma_mtu": 1024}, {"huge_pages": "off"},
                       {"rdma_traffic_class": 106}, {"rdma_service_level": 3}, {"rdma_relaxed_ordering": True},
                       {"rdma_cores": "1"}, {"rdma_inline_bytes": 64}, {"rdma_queue_depth": 1}):
            config = found.start | change
            assert found.effective(config, ONE_WAY) != found.effective(found.start, ONE_WAY), change
            assert found.measure(config, LATENCY if "rdma_inline_bytes" in change else ONE_WAY) > 0, change


@pytest.mark.timeout(300)
def test_settings_that_cannot_be_are_refused_and_the_next_measurement_works():
    with listening(1) as where:
        found = session(where)
        with pytest.raises(ConfigRefusedError, match="max_inline=1000000"):
            found.measure(found.start | {"rdma_inline_bytes": 1_000_000}, ONE_WAY)
        with pytest.raises(ConfigRefusedError, match=r"rdma_cores=4000: this process may run on none of them"):
            found.measure(found.start | {"rdma_cores": "4000"}, ONE_WAY)
        assert found.measure(found.start, ONE_WAY) > 0


@pytest.mark.timeout(300)
def test_present_settings_that_cannot_be_measured_are_an_error():
    with listening(1) as where:
        found = session(where)
        found.start["rdma_inline_bytes"] = 1_000_000
        with pytest.raises(BpsError, match=r"the current settings cannot be measured.*max_inline"):
            found.search(lambda step: None, 1)


@pytest.mark.timeout(300)
def test_knobs_name_what_cannot_be_tried():
    with listening(1) as where:
        choice = session(where).choice
    assert {"partition_bytes", "credit_bytes", "rdma_queue_pairs", "rdma_mtu"} <= {
        each.name for each in choice.tunables}
    assert "has one usable port" in choice.untried["rdma_devices"]
    assert "the driver rxe ignores it" in choice.untried["rdma_relaxed_ordering"]
    assert "--traffic-class" in choice.untried["rdma_traffic_class"]


# -- the commands ----------------------------------------------------------------------------------------------------

def on(host, *arguments):
    return subprocess.Popen(["on", str(host), sys.executable, "-m", "bpsfast", *arguments], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@contextlib.contextmanager
def ended(*processes):
    """Kill at the end what has not ended."""
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.timeout(560)
def test_a_profile_is_kept_read_by_perf_and_taken_back(tmp_path):
    profile = tmp_path / "job.toml"
    before = "# of the cellar\nrdma_mtu = 256  # far too small\npartition_bytes = 65536\ncredit_bytes = 262144\n"
    profile.write_text(before)
    listener = on(0, "tune", "rdma", "-d", "rxe0", "--wait", "400")
    driver = on(1, "tune", "rdma", "10.9.1.1", "-d", "rxe1", "--wait", "90", "--budget", "100s", "--goal",
                "one-way", "--only", "rdma_mtu", "--profile", str(profile), "--apply",
                "--json", "--timeout", "60")
    with ended(listener, driver):
        shown, progress = driver.communicate(timeout=400)
        assert driver.returncode == 0, progress
        assert listener.wait(60) == 0
    found = json.loads(shown)
    assert found["changed"] and found["changes"]["rdma_mtu"] != 256, found["steps"]
    assert found["loads"][ONE_WAY]["verdict"] == "better" and found["seconds"] <= 100 + 10
    assert found["loads"][ONE_WAY]["after"]["median"] > found["loads"][ONE_WAY]["before"]["median"]
    assert set(found["loads"]) == {ONE_WAY, TWO_WAY, LATENCY}
    ports = {port["port"] for port in found["loads"][ONE_WAY]["counters"]["before"]}
    assert ports == {"h1 rxe1/1", "h0 rxe0/1"}
    after = msgspec.toml.decode(profile.read_text())
    assert after == {"partition_bytes": 65536, "credit_bytes": 262144, "rdma_mtu": 256} | found["changes"]
    assert profile.read_text().startswith("# of the cellar\n")

    perf_server = on(0, "perf", "bw", "-d", "rxe0")
    perf = on(1, "perf", "bw", "10.9.1.1", "-d", "rxe1", "-n", "20", "-u", "20", "--json", "--wait", "90", "--set",
              f"profile={profile}")
    with ended(perf_server, perf):
        shown, complaint = perf.communicate(timeout=110)
        assert perf.returncode == 0, complaint
        assert json.loads(shown)["places"]["client"]["mtu"] == (found["changes"]["rdma_mtu"] or 4096)

    undo = subprocess.run([sys.executable, "-m", "bpsfast", "tune", "rdma", "--undo", "--profile", str(profile)],
                          capture_output=True, text=True, timeout=60, check=True)
    assert str(profile) in undo.stdout and "restored" in undo.stdout
    assert profile.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["job.toml"]


@pytest.mark.timeout(300)
def test_a_machine_that_dies_is_an_error_in_words_and_changes_nothing(tmp_path):
    profile = tmp_path / "job.toml"
    listener = on(0, "tune", "rdma", "-d", "rxe0")
    driver = on(1, "tune", "rdma", "10.9.1.1", "-d", "rxe1", "--wait", "90", "--budget", "300s", "--goal",
                "one-way", "--only", "rdma_mtu,rdma_queue_pairs", "--profile", str(profile), "--apply", "--set",
                "partition_bytes=65536", "--set", "credit_bytes=262144")
    with ended(listener, driver):
        for line in iter(driver.stdout.readline, ""):
            if line.startswith("  ") and ": " in line and "->" in line and "rxe1:1 ->" not in line:
                break  # the first value was tried: it is in the middle of it
        assert driver.poll() is None
        listener.kill()
        _, complaint = driver.communicate(timeout=120)
    assert driver.returncode == 1, complaint
    assert "PeerLostError" in complaint and "does not listen any more" in complaint, complaint
    assert not list(tmp_path.iterdir())


def test_a_field_without_a_listener_is_told():
    with pytest.raises(BpsError, match="no process answers"):
        TuneTestbed([("127.0.0.1", 1)], KEY, OWN, 0.5, 5.0).ask("facts")
