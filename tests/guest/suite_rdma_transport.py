"""The contract of every transport (tests/node/test_transport.py), over rdma: one device each, and several of both.

Runs in the guest.
"""
from __future__ import annotations

import os
import re
import socket
from functools import partial
from typing import Any

import pytest

from bpsfast.base.settings import Settings
from bpsfast.node import transport
from bpsfast.orchestration.errors import ConfigError, MismatchError, PeerLostError, StallError
from bpsfast.pyx.port import DONE
from tests.guest.stream_side import wait_for
from tests.guest.suite_rdma_trouble import port_down
from tests.node.test_transport import (  # noqa: F401  the contract's tests, collected here with our `ends`
    SIZES,
    push,
    settings_for,
    test_a_peer_that_closes_is_noticed,
    test_a_refused_generation_is_forgotten,
    test_an_abort_ends_waits_with_its_reason,
    test_an_empty_contribution_moves_no_payload,
    test_frames_arrive_whole_in_every_round,
    test_payloads_arrive_whole_in_every_round,
    test_the_choice_is_explained,
    test_the_next_generation_waits_for_the_local_commit,
    test_who_is_missing_is_known,
)
from tests.support.two_nodes import KEY, End, connect, declare, order_of

pytestmark = pytest.mark.timeout(400)  # who first needs a codec's kernels compiles them: here that takes two minutes


def counted(of: list[Any], name: str) -> int:
    return sum(each.counters()[name] for each in of)


def close_all(made: list[End]) -> None:
    for end in made:
        end.close()


def connected(shapes: list[dict[str, object]]) -> list[End]:
    made = [End(index, settings_for("rdma", **shape)) for index, shape in enumerate(shapes)]
    connect(made)
    for end in made:
        assert end.peering.error is None, end.peering.error
        end.finish()
    return made


@pytest.fixture
def ends(no_leaks, verbs):
    chosen = {"verbs": "native" if verbs.__name__.endswith("pyx.verbs") else "pyverbs"}
    made = connected([{"rdma_devices": "=rxe0", **chosen}, {"rdma_devices": "=rxe1", **chosen}])
    yield made
    close_all(made)


@pytest.fixture
def railed(no_leaks):
    made = connected([{"rdma_devices": "rxe", "rdma_queue_pairs": 2}] * 2)
    yield made
    close_all(made)


@pytest.fixture
def wire():
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as sock:
        sock.bind(("roce0", 0))
        sock.setblocking(False)
        yield sock


def received(sock):
    try:
        return sock.recv(1 << 16)
    except BlockingIOError:
        return None


@pytest.fixture
def tuned(no_leaks):
    shape = {"rdma_queue_depth": 2, "rdma_signal_every": 4, "rdma_inline_bytes": 256, "rdma_mtu": 1024,
             "rdma_traffic_class": 106, "rdma_service_level": 3, "rdma_relaxed_ordering": True, "rdma_cores": "1",
             "rdma_completion_vector": -1, "rdma_grh": True}
    made = connected([{"rdma_devices": "=rxe0", **shape}, {"rdma_devices": "=rxe1", **shape, "rdma_mtu": 512}])
    yield made
    close_all(made)


def test_every_setting_that_can_be_tuned_is_followed(wire, tuned):
    plan = declare(tuned, SIZES * 2, [0, 1] * len(SIZES))
    for end in tuned:
        end.commit(order_of(plan))
    for round_ in (1, 2, 3):
        for end in tuned:
            for part, nbytes in enumerate(SIZES * 2):
                push(end, part, round_, end.allocate(nbytes), bytes([round_]) * nbytes)
        for end in tuned:
            for part, nbytes in enumerate(SIZES * 2):
                assert end.port.wait(part, 1, round_, 20.0) == DONE
                assert end.result(part, round_) == bytes([2 * round_]) * nbytes
    for end in tuned:
        [link] = end.runtime.links.values()
        for name in ("writes_sent", "writes_received"):  # what has come over there may not be counted here yet
            wait_for(partial(counted, [link], name), 3 * len(SIZES) * 2)
    # what is not shown by the queue pair is on the wire: IPv4, UDP to RoCE's port, type of service and length
    sizes = []
    while (packet := received(wire)) is not None:
        if packet[23] == 17 and packet[36:38] == (4791).to_bytes(2, "big"):
            assert packet[15] == 106
            sizes.append(int.from_bytes(packet[38:40], "big"))
    assert 512 < max(sizes) < 512 + 96  # payload, and RoCE's own beside it
    masks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    assert masks.count({1}) == 2 and os.sched_getaffinity(0) != {1}


def test_parts_take_turns_over_rails_and_queue_pairs(railed):
    plan = declare(railed, SIZES * 2, [0, 1] * len(SIZES))
    for end in railed:
        end.commit(order_of(plan))
    for end in railed:
        for part, nbytes in enumerate(SIZES * 2):
            push(end, part, 1, end.allocate(nbytes), b"\1" * nbytes)
    for end in railed:
        for part, nbytes in enumerate(SIZES * 2):
            assert end.port.wait(part, 1, 1, 20.0) == DONE
            assert end.result(part, 1) == b"\2" * nbytes
    for end in railed:
        [link] = end.runtime.links.values()
        streams = list(dict.fromkeys(link.stream_of(part) for part in range(len(SIZES) * 2)))
        # the result of a part that is owned here, the partial of any other: one write each
        wait_for(partial(counted, streams, "writes_sent"), len(SIZES) * 2)
        written = [stream.counters()["writes_sent"] for stream in streams]
        assert [stream.counters()["writes_received"] for stream in streams] == written and min(written) > 0
        assert len(streams) == link.counters()["queue_pairs"] == 4
        assert end.runtime.counters()["rdma"]["rails"] == 2


def test_another_key_is_refused_and_named():
    made = [End(0, settings_for("rdma", rdma_devices="=rxe0"), KEY),
            End(1, settings_for("rdma", rdma_devices="=rxe0"), b"another key 1234")]
    made[0].settings = made[1].settings = Settings(transport="rdma", start_timeout_s=1.0, engine_threads=1,
                                                   huge_pages="off")
    connect(made)
    assert isinstance(made[1].peering.error, MismatchError | PeerLostError | ConfigError)
    assert isinstance(made[0].peering.error, StallError)
    close_all(made)


def test_links_that_nobody_took_are_closed(no_leaks):
    made = [End(index, settings_for("rdma", rdma_devices="=rxe0")) for index in (0, 1)]
    connect(made)
    links = [end.peering.links[1 - end.index] for end in made]
    close_all(made)
    assert all(link.channel.fileno() == -1 for link in links)


def test_explicit_rdma_passes_where_there_is_a_device():
    transport.check(Settings(transport="rdma"))
    with pytest.raises(ConfigError, match="mlx5_9 matches nothing here; there is rxe0:1, rxe1:1"):
        transport.check(Settings(transport="rdma", rdma_devices="mlx5_9"))


def test_auto_takes_rdma_between_nodes_that_share_no_memory():
    made = [End(index, settings_for("auto", allow_shm=False, rdma_devices="=rxe1")) for index in (0, 1)]
    connect(made)
    assert [end.peering.links[1 - end.index].kind for end in made] == ["rdma", "rdma"]
    assert "a first write passed both ways; allow_shm=false" in made[0].peering.describe()["node 1"]
    close_all(made)


def test_an_abort_cuts_the_peer_off(ends):
    owner, member = ends
    plan = declare(ends, [5000], [0])
    for end in ends:
        end.commit(order_of(plan))
    owner.runtime.abort(PeerLostError("node 1 was given up"))
    guarded = [memoryview(chunk.segment) for arena in (owner.runtime.regions.slots, owner.runtime.regions.results)
               for chunk in arena.chunks]
    for memory in guarded:
        memory[:] = b"\xa5" * len(memory)
    push(member, 0, 1, member.allocate(5000), b"\1" * 5000)  # what it had to say when it was stopped
    source, code = member.lost.get(timeout=90)
    words = member.runtime.why_lost(0, code)
    assert member.runtime.who(source) == ("node 0", 0)
    assert "RDMA WRITE of partition 0 (round 1, 5000 bytes) to node 0 over rxe1/1 failed: IBV_WC_RETRY_EXC_ERR" in words
    for memory in guarded:
        assert memory == b"\xa5" * len(memory)
        memory.release()


def test_a_port_that_goes_down_under_writes_is_named(ends):
    _, member = ends
    plan = declare(ends, [5000], [0])
    for end in ends:
        end.commit(order_of(plan))
    place = member.allocate(5000)
    with port_down("roce1"):
        push(member, 0, 1, place, b"\1" * 5000)
        source, code = member.lost.get(timeout=60)
        assert member.runtime.who(source) == ("node 0", 0)
        words = member.runtime.why_lost(0, code)
        assert "RDMA WRITE of partition 0" in words, words
        assert re.search("this machine's port (went down before that|is DOWN now)", words), words


def test_settings_of_the_connection_reach_the_device(no_leaks, verbs):
    """As the device itself says (ibv_query_qp), at both ends."""
    chosen = {"verbs": "native" if verbs.__name__.endswith("pyx.verbs") else "pyverbs", "rdma_pkey": 0xFFFF,
              "rdma_timeout": 15, "rdma_retries": 4, "rdma_traffic_class": 104, "rdma_mtu": 512}
    made = connected([{"rdma_devices": "=rxe0", **chosen}, {"rdma_devices": "=rxe1", **chosen}])
    for end in made:
        [link] = end.runtime.links.values()
        for path in link._paths:
            found = path.pair.attributes
            assert (found["timeout"], found["retry_count"], found["pkey_index"], found["mtu"]) == (15, 4, 0, 512)
            assert found["traffic_class"] == 104
    close_all(made)
