"""What only the kernel tells: this machine's own answers; pings and statistics with it."""
from __future__ import annotations

import ipaddress
import os
import socket

import pytest

from bpsfast.hardware import kernel
from bpsfast.hardware.kernel import Kernel, PingResult

LOCAL = ipaddress.ip_address("127.0.0.1")


def test_addresses_have_their_networks() -> None:
    addresses = Kernel().addresses()
    assert ipaddress.ip_interface("127.0.0.1/8") in addresses["lo"]


def test_names_resolve_and_unknown_ones_are_named() -> None:
    assert LOCAL in Kernel().resolve("localhost") and Kernel().resolve("10.1.2.3") == [ipaddress.ip_address("10.1.2.3")]
    with pytest.raises(OSError, match=r"'a\.\.b' cannot be resolved"):  # a label is empty
        Kernel().resolve("a..b")
    with pytest.raises(OSError, match=r"'no\.such\.host\.invalid' cannot be resolved"):
        Kernel().resolve("no.such.host.invalid")


def test_shared_memory_and_environment_are_this_process_s() -> None:
    nbytes = Kernel().shm_nbytes()
    assert nbytes is None or nbytes > 0
    assert Kernel().environ is os.environ


def test_a_connection_says_how_far_it_came(no_leaks: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert Kernel().connect(LOCAL, port) == "open"
    assert Kernel().connect(LOCAL, port) == "refused"


@pytest.mark.parametrize("nbytes", [28, 64, 1500, 9000])
def test_pings_of_a_size_come_back(nbytes: int, no_leaks: None) -> None:
    answer = Kernel().ping(LOCAL, nbytes, timeout_s=5)
    if answer is PingResult.FORBIDDEN:
        pytest.skip("this user may not send pings (net.ipv4.ping_group_range, no CAP_NET_RAW)")
    assert answer is PingResult.ANSWERED


def test_a_packet_above_the_interface_s_mtu_is_too_big(no_leaks: None) -> None:
    if Kernel().ping(LOCAL, 64, timeout_s=5) is PingResult.FORBIDDEN:
        pytest.skip("this user may not send pings (net.ipv4.ping_group_range, no CAP_NET_RAW)")
    with open("/sys/class/net/lo/mtu") as file:
        mtu = int(file.read())
    if mtu + 8 > 65535:
        pytest.skip(f"lo has mtu {mtu}: no IPv4 packet is larger")
    assert Kernel().ping(LOCAL, mtu + 8) is PingResult.TOO_BIG


def test_headers_of_pings() -> None:
    assert kernel.header_nbytes(LOCAL) == 28 and kernel.header_nbytes(ipaddress.ip_address("::1")) == 48


# RFC 1071's own example, and its complement property
def test_the_internet_checksum() -> None:
    assert kernel._checksum(bytes.fromhex("0001f203f4f5f6f7")) == 0x220D
    assert kernel._checksum(bytes.fromhex("0001f203f4f5f6f7220d")) == 0
    assert kernel._checksum(b"\xff") == kernel._checksum(b"\xff\x00")


def test_statistics_of_an_interface_without_any_are_empty() -> None:
    assert Kernel().statistics("no such one") == {}
    assert all(isinstance(value, int) for value in Kernel().statistics("lo").values())
