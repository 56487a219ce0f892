"""The guest is what `hosts` and the package's docstring say: devices, addresses, hosts apart, this working tree."""
from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import bpsfast
from bpsfast.pyx import verbs
from tests.guest.hosts import DEVICES, GID_INDEX, HOSTS, MTU


def output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def test_the_working_tree_is_the_one_outside():
    assert Path(bpsfast.__file__).resolve() == Path(__file__).resolve().parents[2] / "bpsfast" / "__init__.py"
    assert os.environ["BPSTEST_GUEST"] == "1"


def test_devices_are_active_with_the_largest_mtu():
    assert verbs.devices() == list(DEVICES)
    for host in HOSTS:
        with verbs.Device(host.device) as device:
            port = device.port(1)
            assert (port["state"], port["link_layer"], port["active_mtu"]) == ("ACTIVE", "Ethernet", MTU)
            assert device.gid(1, GID_INDEX) == bytes(10) + b"\xff\xff" + socket.inet_aton(host.device_address)


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: f"h{host.number}")
def test_a_host_has_a_name_a_network_and_shared_memory_of_its_own(host):
    assert output(host.on("hostname")) == f"h{host.number}"
    assert output(host.on("hostname", "-I")).split() == [host.address]
    output(host.on("touch", f"/dev/shm/of{host.number}"))
    assert output(host.on("ls", "/dev/shm")) == f"of{host.number}"
    output(host.on("rm", f"/dev/shm/of{host.number}"))
    assert output(host.on("ls", "/sys/class/infiniband")).split() == list(DEVICES)


def test_hosts_reach_each_other():
    for host, other in zip(HOSTS, reversed(HOSTS)):
        code = f"import socket; s = socket.create_server(('{host.address}', 0)); s.settimeout(30); " \
               "print(s.getsockname()[1], flush=True); print(s.accept()[0].recv(9).decode())"
        server = subprocess.Popen(host.on(sys.executable, "-c", code), stdout=subprocess.PIPE, text=True)
        try:
            port = int(server.stdout.readline())
            code = f"import socket; socket.create_connection(('{host.address}', {port}), 30).sendall(b'hello')"
            output(other.on(sys.executable, "-c", code))
            assert server.communicate(timeout=30)[0] == "hello\n"
        finally:
            server.kill()
            server.wait(10)
            server.stdout.close()


def test_locked_memory_is_not_limited():
    assert output(["sh", "-c", "ulimit -l"]) == "unlimited"
