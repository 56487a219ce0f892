"""What a device reports by itself, and which of several failures is named as the cause of a loss.

Runs in the guest.
"""
from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from bpsfast.orchestration.errors import PeerLostError
from bpsfast.pyx import verbs
from bpsfast.pyx.rdma import Rail
from tests.guest.hosts import GID_INDEX
from tests.guest.suite_rdma_trouble import port_down
from tests.guest.verbs_end import until
from tests.node.test_transport import push, settings_for
from tests.support.two_nodes import End, connect, declare, order_of

NBYTES = 5000


@pytest.fixture
def rails():
    """Make rails on two handles of one device, of a port that it has not and of its own; their threads never sleep."""
    devices = [verbs.Device("rxe1") for _ in range(2)]
    queues = [verbs.CompletionQueue(device, 8, events=True) for device in devices]
    made = [Rail(queue.handle, port=port, awake_us=10**9, keep=queue) for port, queue in zip((2, 1), queues)]
    yield made
    for each in (*made, *queues, *devices):
        each.close()


def test_the_rails_own_port_counts_and_no_other(rails):
    foreign, own = rails
    with port_down("roce1"):
        until(lambda: own.look() or own.port_error_ns)
        foreign.look()  # the kernel has told it first
        assert foreign.port_error_ns == 0


def test_a_thread_that_never_sleeps_sees_events(rails):
    with port_down("roce1"):
        until(lambda: rails[1].port_error_ns)


def linked(n_pairs: int = 1) -> list[End]:
    """Return two nodes with `n_pairs` partitions of node 0, one on each queue pair."""
    made = [End(index, settings_for("rdma", rdma_devices=f"=rxe{index}", rdma_queue_pairs=n_pairs))
            for index in (0, 1)]
    connect(made)
    for end in made:
        assert end.peering.error is None, end.peering.error
        end.finish()
    plan = declare(made, [NBYTES] * 2 * n_pairs, [0] * 2 * n_pairs)
    for end in made:
        end.commit(order_of(plan))
    return made


def test_of_several_failures_the_one_that_is_no_flush_is_named(no_leaks):
    made = linked(n_pairs=2)
    member = made[1]
    [link] = member.runtime.links.values()
    flushed, refused = link._paths
    part = next(part for part in range(4) if link.stream_of(part) is refused.stream)
    segment, offset, memory = member.allocate(NBYTES)
    flushed.pair.to_error()  # as the peer's bad write would end it: what stood ready to receive is flushed
    until(flushed.stream.failure)
    assert flushed.stream.failure()["code"] == 5
    assert "IBV_WC_WR_FLUSH_ERR" in member.runtime.why_lost(0, errno.EIO)
    refused.stream.aim(part, 4096, 4096, NBYTES, 1)
    refused.stream.post(part, 1, 0, member.runtime.regions.chunk(segment).segment.address + offset, NBYTES)
    until(refused.stream.failure)
    words = member.runtime.why_lost(0, errno.EIO)
    assert f"RDMA WRITE of partition {part} (round 1, {NBYTES} bytes) to node 0" in words, words
    assert "IBV_WC_REM_ACCESS_ERR" in words, words
    memory.release()
    for end in made:
        end.close()


def test_a_gid_that_somebody_else_got_explains_nothing(no_leaks):
    owner, member = made = linked()
    subprocess.run(["ip", "addr", "add", "10.9.0.77/24", "dev", "roce1"], check=True)
    try:
        table = Path("/sys/class/infiniband/rxe1/ports/1/gids")
        until(lambda: any((table / str(row)).read_text().strip().endswith("0a09:004d") for row in range(8)))
        owner.runtime.abort(PeerLostError("node 1 was given up"))
        push(member, 0, 1, member.allocate(NBYTES), b"\1" * NBYTES)
        _, code = member.lost.get(timeout=90)
        words = member.runtime.why_lost(0, code)
        assert "IBV_WC_RETRY_EXC_ERR" in words and "this machine's port" not in words, words
    finally:
        subprocess.run(["ip", "addr", "del", "10.9.0.77/24", "dev", "roce1"], check=True)
        for end in made:
            end.close()


def test_a_gid_that_is_gone_explains_writes_that_nobody_acknowledged(no_leaks):
    _, member = made = linked()
    place = member.allocate(NBYTES)
    [address] = [line.split()[3] for line in subprocess.run(
        ["ip", "-4", "-o", "addr", "show", "dev", "roce1"], check=True, capture_output=True,
        text=True).stdout.splitlines()]
    subprocess.run(["ip", "addr", "del", address, "dev", "roce1"], check=True)
    try:
        [link] = member.runtime.links.values()
        until(lambda: not link._paths[0].route.port_now().has_gid)
        push(member, 0, 1, place, b"\1" * NBYTES)
        _, code = member.lost.get(timeout=90)
        words = member.runtime.why_lost(0, code)
        assert "the GID is gone from this machine's port" in words, words
    finally:
        for end in made:
            end.close()
        # not before: its row is free for it only when no queue pair uses what stood there
        subprocess.run(["ip", "addr", "add", address, "dev", "roce1"], check=True)
        with verbs.Device("rxe1") as device:
            until(lambda: any(device.gid(1, GID_INDEX)))
