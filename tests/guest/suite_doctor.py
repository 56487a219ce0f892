"""The doctor, devices and gids on live devices: what is well, what was broken on purpose, and two hosts that compare.

Runs in the guest. What a test breaks, it breaks in a mount namespace or on a device of its own.
"""
from __future__ import annotations

import glob
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from click.testing import CliRunner

from bpsfast.cli import cli
from bpsfast.hardware.verbs import PROVIDERS, provider
from bpsfast.pyx.verbs import VerbsMissing
from tests.guest.hosts import DEVICES, GID_INDEX, HOSTS, MTU

DOCTOR = [sys.executable, "-m", "bpsfast", "doctor"]
TIMEOUT_S = 100


def here(*arguments: str, code: int = 0) -> str:
    """Run a command of bpsfast in this process, which spares the emulated processor a start of Python."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == code, f"{arguments}: {done.exit_code}\n{done.output}"
    return done.stdout


def run(command: list[str], code: int = 0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def findings(*arguments: str, prefix: list[str] | None = None, code: int = 0) -> dict[str, dict[str, Any]]:
    """Return the doctor's findings by code; with *prefix*, of a doctor that is started by that command."""
    told = json.loads(run([*prefix, *DOCTOR, "--json", *arguments], code) if prefix
                      else here("doctor", "--json", *arguments, code=code))
    assert not any("itself failed" in each["found"] for each in told["findings"]), told
    return {each["code"]: each for each in told["findings"]}


def broken(shell: str) -> dict[str, dict[str, Any]]:
    """Return the findings in a mount namespace where *shell* was done before; some check must fail."""
    return findings(prefix=["unshare", "--mount", "sh", "-ec", f'{shell}; exec "$@"', "sh"], code=1)


def test_a_guest_that_is_well_has_no_problem():
    text = here("doctor")
    assert "No problem found. Transport that would be used now: rdma (rxe0/1, rxe1/1)" in text
    assert not any(word in text for word in ("FAIL", "WARN", "itself failed")), text
    assert "rxe0, rxe1 registered 64 MiB" in text and f"rxe0/1 GID {GID_INDEX} RoCE v2 10.9.0.1" in text
    assert f"rxe0/1 path MTU {MTU} (roce0 mtu 4200)" in text


def test_devices_and_gids_are_the_guest_s():
    told = json.loads(here("devices", "--json"))
    assert [device["name"] for device in told["devices"]] == list(DEVICES)
    for device, host in zip(told["devices"], HOSTS):
        [port] = device["ports"]
        assert (device["driver"], port["netdev"], port["state"]) == ("rxe", host.netdev, "ACTIVE")
        assert port["roce_mtu"] == MTU
    rows = json.loads(here("gids", "--json", "--peer", HOSTS[1].device_address))
    assert [(row["device"], row["ipv4"], row["version"]) for row in rows if row["index"] == GID_INDEX] == [
        (host.device, host.device_address, "v2") for host in HOSTS]
    assert [(row["device"], row["index"]) for row in rows if row["used"]] == [(name, GID_INDEX) for name in DEVICES]


@pytest.mark.parametrize("name", PROVIDERS)
def test_the_library_agrees_with_the_kernel(name: str):
    try:
        provider(name)
    except VerbsMissing as exc:
        pytest.skip(str(exc))
    told = json.loads(here("devices", "--json", "--verbs", name))
    assert [device["ports"][0]["active_mtu"] for device in told["devices"]] == [MTU, MTU]
    assert {row["verbs"] for row in json.loads(here("gids", "--json", "--verbs", name))} == {"same"}
    assert findings("--verbs", name)["RD03"]["found"].endswith(f"({name}) lists rxe0, rxe1")


def test_locked_memory_without_the_capability_fails_by_trial():
    prefix = ["setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock",
              "bash", "-c", 'ulimit -l 64; exec "$@"', "sh"]
    found = findings(prefix=prefix, code=1)["RD01"]
    assert found["status"] == "FAIL" and found["found"].startswith("64 KiB")
    refused = "rxe0, rxe1 registered nothing, then: ibv_reg_mr of 1 MiB: Cannot allocate memory"
    assert found["found"].splitlines()[1] == refused


def test_device_files_that_are_missing_fail():
    found = broken("mount -t tmpfs none /dev/infiniband")
    assert found["RD04"]["status"] == "FAIL" and "/dev/infiniband/uverbs0 (rxe0): not there" in found["RD04"]["found"]


def test_a_provider_that_is_missing_fails():
    folders = "/etc/libibverbs.d /usr/lib/*/libibverbs"  # what names the provider, and the provider
    found = broken(f"for i in {folders}; do mount -t tmpfs none $i; done")
    assert found["RD03"]["status"] == "FAIL" and "does not list them: the provider for rxe" in found["RD03"]["found"]
    assert "ibverbs-providers" in found["RD03"]["actions"][0]["command"]


def test_a_library_that_is_missing_fails():
    libraries = [*glob.glob("/usr/lib/*/libibverbs.so.1.*"), *glob.glob("/lib64/libibverbs.so.1.*")]
    found = broken("; ".join(f"mount --bind /dev/null {shlex.quote(path)}" for path in libraries))
    assert found["RD03"]["status"] == "FAIL" and "libibverbs" in found["RD03"]["found"]


def test_a_pinned_row_that_reaches_this_wire_only_fails_and_the_right_one_is_named():
    found = findings("--set", "rdma_gid_index=0", code=1)["RD05"]
    assert found["status"] == "FAIL" and found["actions"][0]["command"].startswith(f"use index {GID_INDEX}:")


@pytest.fixture
def third_device() -> Iterator[str]:
    """Make rxe9 on an interface of its own, of 1500 bytes and without an address; it is down at first."""
    run(["ip", "link", "add", "dt0", "type", "veth", "peer", "name", "dt1"])
    try:
        run(["rdma", "link", "add", "rxe9", "type", "rxe", "netdev", "dt0"])
        yield "dt0"
    finally:
        run(["ip", "link", "del", "dt0"])  # and the device with it


def test_a_port_that_is_down_and_then_an_interface_that_nobody_set_up(third_device: str):
    down = findings("--set", "rdma_devices=rxe0,rxe9")["RD13"]
    assert down["status"] == "WARN" and "rxe9/1 DOWN" in down["found"]
    run(["ip", "link", "set", "dt1", "up"])
    run(["ip", "link", "set", third_device, "up"])
    found = findings("--set", "rdma_devices==rxe9")
    assert found["RD13"]["status"] == "PASS" and "rxe9/1 ACTIVE" in found["RD13"]["found"]
    assert found["RD05"]["status"] == "WARN" and "link-local" in found["RD05"]["found"]
    assert found["RD08"]["status"] == "WARN" and "rxe9/1 path MTU 1024 (dt0 mtu 1500)" in found["RD08"]["found"]
    assert found["RD07"]["status"] == "WARN" and "dt0 (rxe9/1) has no IP address" in found["RD07"]["found"]


class Listening:
    """A doctor that listens on host 0 with its device, for one asker."""

    def __init__(self, *arguments: str, devices: str = f"={HOSTS[0].device}") -> None:
        command = HOSTS[0].on(*DOCTOR, "--listen", "0", "--once", "--host", HOSTS[0].address, "--timeout", "30",
                              "--set", f"rdma_devices={devices}", *arguments)
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        first = self.process.stdout.readline()
        assert first.startswith(f"listening on {HOSTS[0].address} port "), first
        self.place = first.split()[-1]  # HOST:PORT of the command that it proposes
        self.place = self.place.replace("HOST", HOSTS[0].address)

    def end(self) -> str:
        return self.process.communicate(timeout=TIMEOUT_S)[0]

    def __enter__(self) -> Listening:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(10)
        self.process.stdout.close()


def ask(place: str, *arguments: str, devices: str = f"={HOSTS[1].device}",
        code: int = 0) -> dict[str, dict[str, Any]]:
    return findings("--peer", place, "--timeout", "30", "--set", f"rdma_devices={devices}", *arguments,
                    prefix=HOSTS[1].on(), code=code)


def test_two_hosts_compare_and_a_queue_pair_carries_data():
    with Listening() as listening:
        found = ask(listening.place)
        said = listening.end()
    assert said == f"{HOSTS[1].address}: sent the report; queue pair from rxe1/1 to rxe0/1 was tried\n"
    assert listening.process.returncode == 0
    way = f"TCP to and from {HOSTS[0].address} works; a queue pair to it carried data"
    assert found["RD14"]["status"] == "PASS" and found["RD14"]["found"].startswith(way)
    assert found["RD05"]["status"] == "PASS"
    # the devices' interfaces are not the hosts' own, so the route leaves by eth0
    assert found["RD07"]["status"] == "WARN" and "reached by eth0, but rxe1/1" in found["RD07"]["found"]


def test_each_pair_of_ports_gets_a_queue_pair():
    with Listening(devices="rxe") as listening:
        found = ask(listening.place, devices="rxe")
        said = listening.end()
    assert found["RD06"]["status"] == "PASS"
    assert "queue pair from rxe0/1 to rxe0/1 was tried; queue pair from rxe1/1 to rxe1/1 was tried\n" in said
    assert found["RD14"]["status"] == "PASS" and "carried data" in found["RD14"]["found"]


def test_ends_of_different_kinds_of_gid_are_found_and_the_queue_pair_says_the_same():
    with Listening("--set", "rdma_gid_index=0") as listening:
        found = ask(listening.place, code=1)
        listening.end()
    assert found["RD05"]["status"] == "FAIL" and "fe80::" in found["RD05"]["found"]


def test_a_host_without_a_doctor_is_said_in_words():
    found = ask(f"{HOSTS[0].address}:1")
    assert found["RD14"]["status"] == "WARN" and "Connection refused" in found["RD14"]["found"]
