"""RDMA links that fail and come back: a port that is down for half a minute, one of two rails, two subnets of one port.

Runs in the guest.
"""
from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bpsfast.base.settings import Settings
from bpsfast.hardware.host import Host
from bpsfast.node.transport.rdma import Rails, handshake
from bpsfast.trace import Limits
from tests.guest.suite_rdma_job import HostedJob, compiled as compiled, errors_into, packets, running
from tests.guest.suite_rdma_trouble import port_down
from tests.guest.training import push_across_links
from tests.guest.verbs_end import until

RDMA, TCP = 3, 2
DOWN_S = 30.0
AGAIN = "is reached by rdma again, over "


def count(said: Path, words: str) -> int:
    return said.read_text().count(words)


def await_packets(job: HostedJob, n: int) -> None:
    """Wait until rxe1 has sent *n* more packets; what the ranks say is shown if it does not."""
    sent = packets("rxe1")
    try:
        until(lambda: packets("rxe1") > sent + n, 100)
    except AssertionError:
        print(job.outcomes(timeout_s=20))
        raise


def finish(job: HostedJob, stop: Path) -> list[dict]:
    stop.touch()
    outcomes = job.outcomes(timeout_s=200)
    assert not any(outcome.error for outcome in outcomes), outcomes
    job.close()
    return [outcome.value for outcome in outcomes]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["auto", "rdma"])
def test_a_job_survives_a_port_that_is_down_for_half_a_minute_and_uses_rdma_again(transport, tmp_path):
    said, stop = tmp_path / "said", tmp_path / "stop"
    with errors_into(said), running(ranks=(1, 1), transport=transport, partition_bytes=1 << 18) as job:
        job.begin(push_across_links, str(stop), 400.0)
        await_packets(job, 1500)
        since = time.monotonic()
        with port_down("roce1"):
            if transport == "auto":
                until(lambda: count(said, "is reached by tcp from now on, not by rdma: ") == 2, 100)
            until(lambda: time.monotonic() > since + DOWN_S, DOWN_S + 1)
            assert count(said, AGAIN) == 0
        until(lambda: count(said, AGAIN) == 2, 100)
        await_packets(job, 1500)
        found = finish(job, stop)
    for index, each in enumerate(found):
        assert each["seen"] == ([(RDMA, 1), (TCP, 0), (RDMA, 1)] if transport == "auto" else [(RDMA, 1)]), each
        assert each["after"][f"wire_{1 - index}_replaced"] == (2 if transport == "auto" else 1)
        # nothing was registered anew
        assert each["after"]["rdma_rails"] == 1
        assert each["after"]["rdma_registrations"] == each["after"]["registrations"]


@pytest.mark.timeout(900)
def test_one_of_two_rails_carries_all_while_the_port_of_the_other_one_is_down(tmp_path):
    said, stop = tmp_path / "said", tmp_path / "stop"
    more = {f"node {index}": {"BPSFAST_RDMA_DEVICES": "rxe0,rxe1"} for index in (0, 1)}
    with errors_into(said), running(more, ranks=(1, 1), transport="rdma", partition_bytes=1 << 18) as job:
        job.begin(push_across_links, str(stop), 400.0)
        await_packets(job, 1500)
        with port_down("roce1"):
            until(lambda: count(said, AGAIN + "rxe0/1\n") == 2, 100)
        until(lambda: count(said, AGAIN + "rxe0/1 and rxe1/1\n") == 2, 100)
        await_packets(job, 500)
        found = finish(job, stop)
    for each in found:
        assert each["seen"] == [(RDMA, 2), (RDMA, 1), (RDMA, 2)], each


@pytest.fixture
def second_subnet():
    commands = [("ip", "addr", "add", f"10.8.0.{index + 1}/24", "dev", f"roce{index}") for index in (0, 1)]
    for command in commands:
        subprocess.run(command, check=True, timeout=20)
    try:
        yield
    finally:
        for command in commands:
            subprocess.run([word.replace("add", "del") if word == "add" else word for word in command], check=True,
                           timeout=20)


def test_peers_in_two_subnets_of_one_port_are_each_reached_from_their_own(second_subnet, no_leaks):
    """Node 0 reaches two nodes over one port: the address that reaches the first one is not the second one's."""
    subnets = ("10.9.0", "10.8.0")
    rows = {str(row.address): row.index for row in Host().gids("rxe1", *Host().devices[1].ports)}
    peers = [Rails(Settings(rdma_devices="=rxe1", rdma_gid_index=rows[f"{subnet}.2"]), 0) for subnet in subnets]
    made = []
    with contextlib.closing(Rails(Settings(rdma_devices="=rxe0"), 0)) as ours, contextlib.ExitStack() as rest:
        for peer in peers:
            rest.callback(peer.close)
        for number, (subnet, peer) in enumerate(zip(subnets, peers)):
            left, right = socket.socketpair()
            found = (lambda subnet=subnet: ours.towards(f"{subnet}.77:1", 2)), (lambda peer=peer: peer.towards(None, 1))
            with ThreadPoolExecutor(2) as executor:
                ends = [executor.submit(
                    handshake.make_link, sock, index, rails, n_pairs=1, n_nodes=3, epoch=1, n_slots=8, limits=Limits(),
                    deadline=time.monotonic() + 60)
                    for sock, index, rails in ((left, number + 1, found[0]), (right, 0, found[1]))]
                for each in ends:
                    link = each.result(60)
                    rest.callback(link.close)
                    made.append(link)
        paths = [link._paths[0] for link in made[::2]]
        assert paths[0].rail is paths[1].rail and ours.devices == ("rxe0",)
        assert [str(path.route.chosen.gid.address) for path in paths] == ["10.9.0.1", "10.8.0.1"]
        assert [link.rails for link in made] == [{"rxe0/1": "rxe1/1"}, {"rxe1/1": "rxe0/1"}] * 2
        rest.close()
