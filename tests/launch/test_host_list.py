"""Tests lists of hosts (-H, hostfiles), and which hosts get ranks."""
from __future__ import annotations

import os
import pwd
import socket

import pytest
from hypothesis import given, strategies as st

from bpsfast.base import addresses
from bpsfast.launch import host_list
from bpsfast.launch.host_list import Host
from bpsfast.launch.ssh import Ssh
from bpsfast.orchestration.errors import ConfigError

_names = st.one_of(
    st.from_regex(r"[a-z][a-z0-9-]{0,8}(\.[a-z]{1,4})?", fullmatch=True),
    st.ip_addresses(v=4).map(str),
    st.from_regex(r"[a-z]{1,4}", fullmatch=True).map(lambda user: f"{user}@host"),
)
_lists = st.lists(st.builds(Host, name=_names, slots=st.integers(1, 99)), min_size=1, max_size=8,
                  unique_by=lambda host: host.name.rpartition("@")[2])


@given(_lists)
def test_what_h_says_is_what_is_read(found):
    assert host_list.parse(",".join(f"{host.name}:{host.slots}" for host in found)) == found


@given(_lists, st.data())
def test_a_hostfile_may_say_each_line_in_its_own_way(tmp_path_factory, found, data):
    lines = []
    for host in found:
        form = data.draw(st.sampled_from(["{0} slots={1}", "{0}:{1}", "  {0}  slots = {1}  # {1}", "{0} slots={1} "
                                          "max_slots=200", "\t{0}\tSLOTS={1}\n\n# {0}"]))
        lines.append(form.format(host.name, host.slots))
    path = tmp_path_factory.mktemp("hosts") / "hosts"
    path.write_text("\n".join(["# all", *lines, ""]))
    assert host_list.read(path) == found


@given(_lists, st.integers(1, 500))
def test_slots_are_filled_in_order(found, n_ranks):
    n_slots = sum(host.slots for host in found)
    if n_ranks > n_slots:
        with pytest.raises(ConfigError, match=rf"-n {n_ranks} .* slots \({n_slots}: "):
            host_list.assign(found, n_ranks)
        return
    filled = host_list.assign(found, n_ranks)
    assert sum(host.slots for host in filled) == n_ranks
    assert [host.name for host in filled] == [host.name for host in found[:len(filled)]]
    assert all(got.slots == had.slots for got, had in zip(filled[:-1], found))
    assert 0 < filled[-1].slots <= found[len(filled) - 1].slots


@given(_lists, st.integers(1, 9))
def test_a_script_lists_hosts_with_and_without_a_number(found, slots):
    lines = [host.name if host.slots == slots else f"  {host.name}:{host.slots} " for host in found]
    assert host_list.listed("\n\n".join([*lines, ""]), slots, "the script") == found


def test_a_script_may_list_nothing():
    assert host_list.listed(" \n", 1, "the script") == []


@pytest.mark.parametrize(("text", "message"), [
    ("a:2\nb 3", "the script, line 2: 'b 3' is no host"), ("a\na:2", "the script names a twice"),
    ("a:0", "the script, line 1: '0' is no number of slots"), ("-oProxyCommand=x", "line 1: .* is no host")])
def test_what_a_script_must_not_print(text, message):
    with pytest.raises(ConfigError, match=message):
        host_list.listed(text, 1, "the script")


def test_without_a_number_every_slot_is_used():
    assert host_list.assign([Host("a", 2), Host("b", 3)], None) == [Host("a", 2), Host("b", 3)]


@pytest.mark.parametrize(("text", "name", "slots"), [
    ("a", "a", 1), ("[fd00::3]:2", "fd00::3", 2), ("[fd00::3]", "fd00::3", 1),
    ("me@[fe80::1%eth0]:4", "me@fe80::1%eth0", 4),
    ("first.last@gpu-01.example.org:16", "first.last@gpu-01.example.org", 16), ("10.0.0.1:8", "10.0.0.1", 8),
])
def test_host(text, name, slots):
    assert host_list.parse(text) == [Host(name, slots)]


@pytest.mark.parametrize(("text", "words"), [
    ("fd00::3", r"write \[fd00::3\] or \[fd00:\]:3"), ("a:0", "no number of slots"), ("a:x", "no number of slots"),
    ("a:", "no number of slots"), ("", "no host"), ("a,,b", "no host"), ("a:-1", "no number of slots"),
    ("-oProxyCommand=x", "no host"), ("me@-l", "no host"), ("a b", "no host"), ("a,b,a", "names a twice"),
    ("a,you@A:2", "names a twice"), ("[fd00::3]2", "no host"), ("a:\u0663", "no number of slots"),
    ("a\0b", "no host"), ("\x1bb:2", "no host"), ("me\x7f@b", "no host"), ("b\x9b", "no host"),
])
def test_what_is_no_list_of_hosts_is_an_error(text, words):
    with pytest.raises(ConfigError, match=words):
        host_list.parse(text)


@pytest.mark.parametrize(("text", "words"), [
    ("", "names no host"), ("# none\n", "names no host"),
    ("me@a slots=2\na:3\n", "names a twice, as me@a and a: name it with one user"),
    ("a slots=4096\nA\n", "gives a more than 4096 slots"), ("a\x01b", ":1: .* no host"), ("a\x7f:2", ":1: .* no host"),
    ("l\0o\0c\0a\0l\0", "has NUL bytes, as UTF-16 .* save it as UTF-8"), ("#\0\na", "has NUL bytes"),
    ("a\nb slots=many", r":2: 'many' is no number of slots"), ("a gpu=2", ":1: .* no host"), ("a slots=", "no number"),
])
def test_what_is_no_hostfile_is_an_error(tmp_path, text, words):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ConfigError, match=words):
        host_list.read(tmp_path / "hosts")


def test_in_a_hostfile_ipv6_needs_no_brackets_before_slots(tmp_path):
    (tmp_path / "hosts").write_text("fd00::3 slots=2\n[fd00::4]:3\nme@fd00::5 slots=1\n")
    assert host_list.read(tmp_path / "hosts") == [Host("fd00::3", 2), Host("fd00::4", 3), Host("me@fd00::5", 1)]


@pytest.mark.parametrize(("text", "wanted"), [
    ("b\na\nb\na\nb\n", [Host("b", 3), Host("a", 2)]),  # as PBS and LSF write it
    ("a slots=2\nb\nA:3\na\n", [Host("a", 6), Host("b", 1)]),
    ("me@a:2\nb slots=4\nme@a slots=1\n", [Host("me@a", 3), Host("b", 4)]),
    ("fd00::3 slots=2\n[fd00::3]:5\n", [Host("fd00::3", 7)]),
])
def test_lines_of_one_host_are_added_up(tmp_path, text, wanted):
    (tmp_path / "hosts").write_text(text)
    assert host_list.read(tmp_path / "hosts") == wanted


def test_a_hostfile_may_come_from_another_system(tmp_path):
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbf# ours\r\na   slots = 2\r\n\r\nb:3\r\nc\tslots=1\tmax_slots=4 \r\n")
    assert host_list.read(tmp_path / "hosts") == [Host("a", 2), Host("b", 3), Host("c", 1)]


@pytest.mark.parametrize("name", [
    "localhost", "127.0.0.1", "127.1.2.3", "::1", socket.gethostname(), f"{socket.gethostname().upper()}.",
    f"{pwd.getpwuid(os.geteuid()).pw_name}@localhost", "0.0.0.0", addresses.default_route_host() or "127.0.0.1",
])
def test_this_machine_needs_no_ssh_whatever_it_is_called(name):
    [found] = host_list.with_own([Host(name, 2)])
    assert found.is_here and (found.name, found.slots) == (name, 2)
    assert Ssh(python="/opt/python").argv(found)[-4:] == ["/opt/python", "-m", "bpsfast", "agent"]


@pytest.mark.parametrize("name", ["192.0.2.77", "no-such-name.invalid", "you@localhost", "2001:db8::7"])
def test_others_do(name):
    assert not any(host.is_here for host in host_list.with_own([Host(name)]))
    assert Ssh().argv(host_list.with_own([Host(name)])[0])[0] == "ssh"


def test_two_names_of_this_machine_are_one_node():
    found = host_list.with_own(
        [Host("192.0.2.77", 3), Host("localhost", 2), Host("you@localhost"), Host("127.0.0.1", 4)])
    assert [(host.name, host.slots, host.is_here) for host in found] == [
        ("192.0.2.77", 3, False), ("localhost", 6, True), ("you@localhost", 1, False)]
    assert [host.is_here for host in host_list.assign(found, 5)] == [False, True]
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1 has ranks"):
        host_list.helpers("127.0.0.1", found)


def test_helpers_have_no_ranks():
    assert host_list.helpers("c,me@d", [Host("a"), Host("b")]) == [Host("c", 0), Host("me@d", 0)]
    with pytest.raises(ConfigError, match="b has ranks"):
        host_list.helpers("c,b", [Host("a"), Host("me@b")])
    with pytest.raises(ConfigError, match="twice"):
        host_list.helpers("c,c", [Host("a")])
    with pytest.raises(ConfigError, match="no host"):
        host_list.helpers("c:2", [Host("a")])
