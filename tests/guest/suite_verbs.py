"""The verbs contract: every operation and attribute does what it says, with either provider."""
from __future__ import annotations

import os
import socket
import struct
import threading
import time

import pytest

from tests.guest.hosts import DEVICES, GID_INDEX, MTU
from tests.guest.verbs_end import NBYTES, TIMEOUT_S, End, connected, until

WRITE, READ, SEND, RECV, RECV_IMM = 1, 2, 0, 128, 129


@pytest.fixture
def ends(verbs):
    with connected(verbs) as both:
        yield both


# -- what a device tells ------------------------------------------------------------------------------------

def test_devices_ports_and_limits(verbs):
    assert verbs.devices() == list(DEVICES)
    assert "libibverbs" in verbs.version() and verbs.fork_safety() in ("unneeded", "enabled")
    with verbs.Device("rxe0") as device:
        assert device.name == "rxe0" and not device.closed
        limits = device.attributes
        assert min(limits[name] for name in ("max_mr", "max_qp", "max_qp_wr", "max_cqe", "max_mr_size")) > 100
        assert limits["phys_port_cnt"] == 1 and len(bytes.fromhex(limits["node_guid"])) == 8
        port = device.port()
        assert (port["state"], port["link_layer"], port["active_mtu"], port["lid"]) == ("ACTIVE", "Ethernet", MTU, 0)
        assert device.gid(1, GID_INDEX)[10:12] == b"\xff\xff" and device.gid(1, port["gid_count"] - 1) == bytes(16)
        assert device.events() == []


def test_a_completion_queue_has_one_of_the_device_s_vectors(verbs):
    with verbs.Device("rxe0") as device:
        n = device.completion_vectors
        assert n >= 1
        verbs.CompletionQueue(device, 8, events=True, vector=n - 1).close()
        with pytest.raises(OSError, match=rf"events=True, vector={n}\): EINVAL.* has {n} completion vectors, numbered"):
            verbs.CompletionQueue(device, 8, events=True, vector=n)


def test_both_providers_tell_the_same():
    from bpsfast.hardware.verbs import provider

    told = []
    for name in ("native", "pyverbs"):
        with provider(name).Device("rxe0") as device:
            told.append((provider(name).devices(), device.attributes, device.port(), device.gid(1, 0)))
    assert told[0] == told[1]


def test_states_and_attributes_of_a_queue_pair(verbs):
    with End(verbs, "rxe0", max_send=5, max_recv=6, max_inline=32) as left, End(verbs, "rxe1") as right:
        pair = left.pair
        assert pair.max_send >= 5 and pair.max_recv >= 6 and pair.max_inline >= 32
        assert 0 <= pair.psn < 1 << 24 and pair.outstanding == (0, 0) and pair.failure is None
        assert left.queue.depth >= 64 and left.queue.pending == 0
        assert pair.state == "RESET"
        pair.to_init(1)
        assert pair.state == "INIT"
        pair.to_rtr(right.pair.number, right.pair.psn, gid=right.device.gid(1, GID_INDEX), gid_index=GID_INDEX,
                    mtu=MTU, port=1, min_rnr_timer=1, max_dest_rd_atomic=4, traffic_class=104, sl=3, hop_limit=2,
                    flow_label=7, static_rate=0)
        assert pair.state == "RTR"
        pair.to_rts(timeout=9, retry_count=2, rnr_retry=1, max_rd_atomic=4)
        assert pair.state == "RTS" and str(right.pair.number) in pair.peer
        pair.to_error()
        assert pair.state == "ERR"


def test_handles_are_the_addresses_that_native_code_needs(verbs, ends):
    left, _ = ends
    handles = {each.handle for end in ends
               for each in (end.device, end.domain, end.queue, end.region, end.pair)}
    assert len(handles) == 10 and all(handle % 8 == 0 and handle > 4096 for handle in handles)
    # a rail polls and posts through them
    from bpsfast.pyx.rdma import Rail

    with_events = verbs.CompletionQueue(left.device, 8, events=True)
    rail = Rail(with_events.handle, keep=with_events)
    rail.close()
    with_events.close()


def test_route_attributes_are_what_packets_carry(verbs):
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(0x0800)) as tap:  # of all interfaces
        tap.settimeout(TIMEOUT_S)
        with connected(verbs, rtr={"mtu": 256, "traffic_class": 104}) as (left, right):
            left.write(right, 1024)
            assert left.completions()[0][1] == 0
            to_port_4791 = struct.pack("!H", 4791)
            found = []
            while len(found) < 4:
                packet = tap.recv(9000)
                if packet[9] == socket.IPPROTO_UDP and packet[22:24] == to_port_4791 and len(packet) > 256:
                    found.append((packet[1], len(packet) // 256))
    assert found == [(104, 1)] * 4  # type of service, 256 bytes in each


# -- operations ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("nbytes", [1, 64, 1023, 1024, 1025, NBYTES])
def test_a_write_lands_whole(ends, nbytes):
    left, right = ends
    left.bytes[:] = 7
    left.write(right, nbytes, wr_id=1 << 63)
    assert left.completions() == [(1 << 63, 0, WRITE, nbytes, None, left.pair.number)]
    assert (right.bytes[:nbytes] == 7).all() and not right.bytes[nbytes:].any()
    assert right.queue.poll() == []


@pytest.mark.parametrize("nbytes", [0, 8, 5000])
def test_a_write_with_immediate_takes_a_receive(ends, nbytes):
    left, right = ends
    left.bytes[:] = 9
    right.receive(wr_id=5)
    left.write(right, nbytes, immediate=0x01020304)
    assert right.completions() == [(5, 0, RECV_IMM, nbytes, 0x01020304, right.pair.number)]
    assert left.completions() == [(1, 0, WRITE, nbytes, None, left.pair.number)]
    assert (right.bytes[:nbytes] == 9).all() and not right.bytes[nbytes:].any()


def test_immediates_between_providers(verbs):
    from bpsfast.hardware.verbs import provider

    other = provider("pyverbs" if verbs.__name__.endswith("pyx.verbs") else "native")
    with End(verbs, "rxe0") as left, End(other, "rxe1") as right:
        left.connect(right)
        right.connect(left)
        for sender, receiver in ((left, right), (right, left)):
            receiver.receive()
            sender.write(receiver, 0, immediate=0xfffefd01)
            assert receiver.completions()[0][4] == 0xfffefd01
            sender.completions()


@pytest.mark.parametrize("immediate", [None, 0, 0xffffffff])
def test_send_meets_a_receive(ends, immediate):
    left, right = ends
    left.bytes[:100] = 3
    right.receive(wr_id=8, nbytes=4096, offset=4096)
    left.pair.post_send(2, left.at, 100, left.region.lkey, immediate=immediate)
    assert right.completions() == [(8, 0, RECV, 100, immediate, right.pair.number)]
    assert left.completions() == [(2, 0, SEND, 100, None, left.pair.number)]
    assert (right.bytes[4096:4196] == 3).all() and right.bytes.sum() == 300


def test_read_fetches(ends):
    left, right = ends
    right.bytes[:3000] = 5
    left.pair.post_read(4, left.at, 3000, left.region.lkey, right.at, right.region.rkey)
    assert left.completions() == [(4, 0, READ, 3000, None, left.pair.number)]
    assert (left.bytes[:3000] == 5).all() and not left.bytes[3000:].any()


def test_inline_needs_no_region_and_copies_at_once(ends):
    left, right = ends
    source = bytearray(b"x" * 32)
    import ctypes

    address = ctypes.addressof((ctypes.c_char * 32).from_buffer(source))
    left.pair.post_write(1, address, 32, 0, right.at, right.region.rkey, inline=True)
    source[:] = b"y" * 32
    left.completions()
    assert bytes(right.bytes[:32]) == b"x" * 32
    with pytest.raises(ValueError, match="max_inline="):
        left.pair.post_write(1, address, left.pair.max_inline + 1, 0, right.at, right.region.rkey, inline=True)


def test_regions_at_an_address(verbs, ends):
    left, right = ends
    with verbs.MemoryRegion.at(right.domain, right.at + 4096, 4096, right.bytes) as region:
        assert (region.address, region.nbytes) == (right.at + 4096, 4096) and not region.closed
        left.bytes[:] = 1
        left.pair.post_write(1, left.at, 4096, left.region.lkey, region.address, region.rkey)
        assert left.completions()[0][1] == 0
        assert right.bytes.sum() == 4096
    assert region.closed


def test_relaxed_ordering_is_taken_where_the_device_has_none(verbs, ends):
    left, _ = ends
    with verbs.MemoryRegion(left.domain, bytearray(4096), relaxed_ordering=True) as region:
        assert region.lkey


# -- batches, polling, events -------------------------------------------------------------------------------

def test_completions_come_in_order_and_in_batches(ends):
    left, right = ends
    for i in range(16):
        right.receive(wr_id=100 + i)
    for i in range(16):
        left.write(right, 16, wr_id=i, immediate=i)
    assert [c[0] for c in left.completions(16)] == list(range(16))
    assert [(c[0], c[4]) for c in right.completions(16)] == [(100 + i, i) for i in range(16)]
    assert left.queue.poll(1000) == [] and left.pair.outstanding == right.pair.outstanding == (0, 0)


def test_poll_takes_no_more_than_asked_for(ends):
    left, right = ends
    for i in range(5):
        left.write(right, wr_id=i)
    found = []
    until(lambda: found.extend(left.queue.poll(1)) or len(found) == 5)
    assert [c[0] for c in found] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="n >= 1"):
        left.queue.poll(0)


def test_unsignaled_posts_are_retired_by_the_next_signaled_one(ends):
    left, right = ends
    for i in range(7):
        left.write(right, wr_id=i, signaled=False)
    assert left.pair.outstanding == (7, 0) and left.queue.pending == 7
    left.write(right, wr_id=7)
    assert [c[0] for c in left.completions()] == [7]
    assert left.pair.outstanding == (0, 0) and left.queue.pending == 0


def test_wait_sleeps_until_something_completes(verbs):
    with connected(verbs, events=True) as (left, right):
        assert not right.queue.wait(0.05)
        for i in range(3):
            right.receive()
            sender = threading.Timer(0.1, left.write, [right], {"immediate": i})
            sender.start()
            until(lambda: right.queue.wait(10) and right.queue.poll())
            sender.join()
        assert len(left.completions(3)) == 3 and not right.queue.wait(0)


def test_a_completion_before_wait_is_not_missed(verbs):
    with connected(verbs, events=True) as (left, right):
        right.receive()
        left.write(right, immediate=1)
        left.completions()
        start = time.monotonic()
        until(lambda: right.queue.wait(10) and right.queue.poll())
        assert time.monotonic() - start < 9


def test_wait_lets_other_threads_run_and_signals_in(verbs):
    with End(verbs, "rxe0", events=True) as end:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(end.queue.wait(60)))
        thread.start()
        until(lambda: os.sched_yield() or thread.is_alive())
        with End(verbs, "rxe1") as other:
            end.connect(other)
            other.connect(end)
            end.receive()
            other.write(end, immediate=1)
            thread.join(30)
            assert seen == [True] and other.completions()[0][1] == 0
            end.queue.poll()


def test_wait_without_events_is_refused(ends):
    with pytest.raises(ValueError, match="events=True"):
        ends[0].queue.wait(0)
