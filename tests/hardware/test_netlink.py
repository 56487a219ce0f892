"""Questions by netlink: this machine's own answers, and answers written down."""
from __future__ import annotations

import ipaddress
import os
import struct
import subprocess
import sys

import pytest

from bpsfast.hardware import kernel


def _attribute(kind: int, payload: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(payload), kind) + payload + b"\0" * (-len(payload) % 4)


def test_the_route_to_this_machine_is_local() -> None:
    route = kernel.Kernel().route(ipaddress.ip_address("127.0.0.1"))
    assert route.local and route.netdev == "lo" and str(route.source) == "127.0.0.1" and route.gateway is None


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: a namespace without routes")
def test_no_route_is_an_error_with_the_address() -> None:
    program = ("import ipaddress\nfrom bpsfast.hardware import kernel\n"
               "kernel.Kernel().route(ipaddress.ip_address('10.1.2.3'))")
    command = ["unshare", "--net", sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.endswith("OSError: [Errno 101] no route to 10.1.2.3: Network is unreachable\n")


def test_a_route_over_a_gateway_is_read() -> None:
    body = struct.pack("=BBBBBBBBI", 2, 32, 0, 0, 0, 0, 0, 1, 0)
    body += _attribute(4, struct.pack("=I", 1))
    body += _attribute(5, bytes([10, 0, 0, 254])) + _attribute(7, bytes([10, 0, 0, 7]))
    route = kernel.parse_route(body, ipaddress.ip_address("8.8.8.8"))
    assert (route.netdev, str(route.source), str(route.gateway), route.local) == ("lo", "10.0.0.7", "10.0.0.254", False)


@pytest.mark.parametrize(("bits", "priorities"), [(0, ()), (0b1000, (3,)), (0xFF, tuple(range(8)))])
def test_priorities_with_flow_control_are_read(bits: int, priorities: tuple[int, ...]) -> None:
    pfc = struct.pack("=BBBBH2x", 8, bits, 0, 0, 0)
    ieee = _attribute(13 | 0x8000, _attribute(1, b"\0" * 8) + _attribute(2, pfc))
    assert kernel.parse_pause(b"\0" * 4 + _attribute(1, b"eth2\0") + ieee) == priorities


def test_an_answer_without_flow_control_is_none() -> None:
    assert kernel.parse_pause(b"\0" * 4 + _attribute(1, b"eth2\0")) is None
    assert kernel.parse_pause(b"\0" * 4 + b"\1\0") is None
    assert kernel.Kernel().pause_priorities("lo") is None and kernel.Kernel().pause_priorities("no such one") is None
