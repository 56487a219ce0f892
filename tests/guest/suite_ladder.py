"""The ladder between two hosts and between two devices of one: every variant of every model moves the right bytes.

Runs in the guest. Nothing here asserts a time: on an emulated processor only the structure means something.
"""
from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.bench.paper.ladder.shares import VARIANTS
from tests.guest.hosts import HOSTS

LADDER = [sys.executable, "-m", "bpsfast", "bench", "ladder"]
TIMEOUT_S = 300.0

pytestmark = pytest.mark.timeout(TIMEOUT_S)


def run(*arguments: str | Path, on: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command, on a host or in the namespace of the suite."""
    command = [*LADDER, *map(str, arguments)]
    return subprocess.run(command if on is None else HOSTS[on].on(*command), capture_output=True, text=True,
                          timeout=TIMEOUT_S, check=False)


def rows_of(path: Path, section: str) -> list[dict]:
    return [row for row in map(json.loads, path.read_text().splitlines()) if row.get("section") == section]


def per_step(row: dict) -> dict[str, float]:
    """Return the worker's counters per step, as shares of the partitions."""
    n = sum(row["chosen"]["n_per_round"]) * row["chosen"]["n_partitions"]
    return {name: value / n for name, value in row["measured"]["counters"].items()}


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory) -> tuple[Path, str]:
    """The result file and the tables of a quick run, the service on host 0, the worker on host 1."""
    path = tmp_path_factory.mktemp("ladder") / "out.jsonl"
    service = subprocess.Popen(HOSTS[0].on(*LADDER, "--listen", "--devices", HOSTS[0].device),
                               stderr=subprocess.PIPE, text=True)
    try:
        done = run(HOSTS[0].address, "--devices", HOSTS[1].device, "--quick", "--json", path, on=1)
        assert done.returncode == 0, done.stderr
        words = service.communicate(timeout=60)[1]
        assert service.returncode == 0, words
    finally:
        service.kill()
        service.wait()
    return path, done.stdout


def test_every_rung_of_every_model_moves_the_right_bytes(two_hosts):
    rows = rows_of(two_hosts[0], "ladder")
    models = ("vgg19", "resnet50", "inception-bn")
    assert [(row["chosen"]["model"], row["chosen"]["rung"]) for row in rows] == [
        (model, variant.name) for model in models for variant in VARIANTS]
    for row in rows:
        assert row["measured"]["n_wrong"] == 0, row["chosen"]
        assert len(row["measured"]["samples_s"]) == sum(row["chosen"]["n_per_round"])
        assert row["chosen"]["n_partitions"] > 30 and row["measured"]["goodput"] > 0
        assert row["measured"]["cpu_s_per_gigabyte"] > 0


def test_each_rung_does_exactly_its_one_thing(two_hosts):
    for row in rows_of(two_hosts[0], "ladder"):
        found, rung = per_step(row), row["chosen"]["rung"]
        if rung.startswith("tcp"):
            assert found == {}
            continue
        # the share of the other host; with the NIC's loopback also both hops of the own one
        assert 0 < found["writes"] < 1 if rung not in ("loopback through NIC", "vanilla") else found["writes"] > 1
        shares = {name: value / found["writes"] for name, value in found.items()}
        wanted = {"writes": 1, "sges": 1, "requests": 0, "registrations": 0, "copies": 0}
        wanted |= {"register per step": {"registrations": 1}, "rendezvous per step": {"requests": 1},
                   "memcpy at both ends": {"copies": 2}, "two SGEs": {"sges": 2},
                   "vanilla": {"registrations": 1, "requests": 1, "copies": 2, "sges": 2}}.get(rung, {})
        assert shares == pytest.approx(wanted), row["chosen"]


def test_the_verdict_follows_from_the_rows(two_hosts):
    path, text = two_hosts
    medians = {(row["chosen"]["model"], row["chosen"]["rung"]): row["measured"]["median_s"]
               for row in rows_of(path, "ladder")}
    verdicts = rows_of(path, "verdict")
    assert len(verdicts) == 3
    for verdict in verdicts:
        model, found = verdict["chosen"]["model"], verdict["measured"]
        assert found["vanilla_loses"] == (medians[model, "vanilla"] > medians[model, "tcp"])
        assert found["sentence"] in text


def test_the_file_tells_machines_latency_and_memcpy(two_hosts):
    manifest = json.loads(two_hosts[0].read_text().splitlines()[0])
    assert manifest["bench"] == "ladder" and manifest["same_kernel"]
    assert (manifest["worker"]["device"], manifest["service"]["device"]) == ("rxe1/1", "rxe0/1")
    assert "TCG" in manifest["worker"]["cpu"]
    [measured] = [row["measured"] for row in rows_of(two_hosts[0], "machine")]
    assert set(measured) == {"write_8_bytes_s", "worker_memcpy", "service_memcpy"} and min(measured.values()) > 0


def test_both_ends_on_one_machine_with_one_model(tmp_path):
    path = tmp_path / "out.jsonl"
    done = run("--models", "inception-bn/512", "--rounds", 2, "--devices", "rxe1,rxe0", "--json", path)
    assert done.returncode == 0, done.stderr
    rows = rows_of(path, "ladder")
    assert len(rows) == len(VARIANTS) and all(row["measured"]["n_wrong"] == 0 for row in rows)
    assert {row["chosen"]["n_rounds"] for row in rows} == {2}
    assert json.loads(path.read_text().splitlines()[0])["service"]["device"] == "rxe0/1"


def test_a_device_that_is_not_there_is_a_wrong_option():
    done = run("--devices", "rxe7")
    assert done.returncode == 2 and "rxe7" in done.stderr and len(done.stderr.splitlines()) == 1
