"""`bpsfast ping -H` and `bpsfast perf -H`: the other side is started over ssh, and gone afterwards."""
from __future__ import annotations

import json

import pytest

from tests.support import ssh_hosts
from tests.support.ssh_hosts import SshHosts

_LACKING = ssh_hosts.missing()
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.skipif(_LACKING is not None, reason=str(_LACKING))]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with SshHosts(["one", "two"], tmp_path_factory.mktemp("ssh")) as hosts:
        yield hosts


def test_ping_reaches_each_host(hosts):
    done = hosts.run("ping", "-H", "one,two", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["host"] for each in found] == [hosts.cluster[name].address for name in ("one", "two")]
    assert all(each["error"] is None and each["tcp"]["median_s"] > 0 for each in found)
    assert not any(hosts.pids(name) for name in hosts.names)


def test_ping_shows_who_reaches_whom(hosts):
    done = hosts.run("ping", "--all", "-H", "one,two", "-p", "7999")
    assert done.returncode == 0, done.stderr
    addresses = [hosts.cluster[name].address for name in ("one", "two")]
    for source, target in (addresses, addresses[::-1]):
        assert f"{source}:7999 -> {target}:7999  tcp " in done.stdout


@pytest.mark.parametrize("verb", ["bw", "lat"])
def test_perf_measures_between_here_and_there(hosts, verb):
    done = hosts.run("perf", verb, "-H", "two", "--transport", "tcp", "-s", "65536", "-n", "200", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"], "measured"
    assert not any(hosts.pids(name) for name in hosts.names)


def test_what_keeps_a_listener_from_listening_is_shown(hosts):
    listen = "import socket; s = socket.create_server(('', 7998)); print(flush=True); s.accept()"
    with hosts.cluster["one"].popen(["python3", "-c", listen], stdout=-1) as taken:
        taken.stdout.readline()
        done = hosts.run("perf", "bw", "-H", "one", "-p", "7998", "--transport", "tcp", "--wait", "3")
        taken.kill()
    assert done.returncode == 1, done.stderr
    assert "[one] bpsfast: ConfigError: cannot listen on port 7998: Address already in use" in done.stderr
    assert "the listener on one ended with exit code 2; its output is above" in done.stderr


@pytest.mark.parametrize(("arguments", "text"), [
    (("perf", "bw", "-H", "one,two"), "one host"), (("perf", "bw", "--ssh-port", "22"), "--ssh-port"),
    (("perf", "bw", "-H", "one", "two"), "one host"), (("ping", "-H", "one", "two"), "give hosts to ping"),
    (("ping", "--remote-dir", "/", "two"), "--remote-dir"),
])
def test_options_that_say_nothing_together(hosts, arguments, text):
    done = hosts.run(*arguments)
    assert done.returncode == 2 and text in done.stderr
