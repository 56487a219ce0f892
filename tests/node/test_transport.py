"""One contract for every transport: whole payloads, in order, from whom we trust, and ends that are noticed."""
from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from bpsfast.base.settings import Settings
from bpsfast.kernels.codecs import codec_reference
from bpsfast.node import transport
from bpsfast.node.transport import tcp
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import ConfigError, MismatchError, PeerLostError, StallError
from bpsfast.orchestration.host_lookup import format_address
from bpsfast.pyx.port import ABORTED, DONE, TIMED_OUT
from bpsfast.trace import Limits
from tests.support.loopback import LOOPBACK
from tests.support.streams import require_backend
from tests.support.two_nodes import KEY, End, connect, declare, order_of

SIZES = [1, 4095, 4096, 4097, (1 << 20) - 1]  # a partition each


def settings_for(kind: str, **changes: object) -> Settings:
    return Settings(transport=kind, engine_threads=1, huge_pages="off", **{"start_timeout_s": 20.0, **changes})


def connected(settings: Settings) -> Iterator[list[End]]:
    made = [End(index, settings) for index in (0, 1)]
    connect(made)
    for end in made:
        end.finish()
    yield made
    for end in made:
        end.close()


@pytest.fixture(params=[("tcp", "off", "epoll"), ("tcp", "on", "epoll"), ("tcp", "off", "io_uring"),
                        ("shm", "off", "epoll")], ids=["tcp", "tcp, encrypted", "tcp by io_uring", "shm"])
def ends(request):
    kind, encryption, backend = request.param
    require_backend(backend)
    yield from connected(settings_for(kind, encryption=encryption, io_backend=backend))


def push(end: End, part: int, round_: int, place: tuple[int, int, memoryview], data: bytes | None) -> None:
    segment, offset, memory = place
    if data is not None:
        memory[:] = data
    end.port.submit(part, 1, round_, segment, offset, data is None)


def added(left: bytes, right: bytes) -> bytes:
    return bytes((a + b) & 255 for a, b in zip(left, right))


def test_the_choice_is_explained(ends):
    kind = ends[0].settings.transport
    for end, other in ((ends[0], "node 1"), (ends[1], "node 0")):
        assert end.runtime.transports[other].startswith(f"{kind}: ")
        encrypts = end.settings.encryption == "on"
        assert end.runtime.transports[other].endswith("; encrypted") == encrypts


@pytest.mark.parametrize("owner", [0, 1])
def test_payloads_arrive_whole_in_every_round(ends, owner):
    plan = declare(ends, SIZES, [owner] * len(SIZES))
    for end in ends:
        end.commit(order_of(plan))
    source = random.Random(7)
    places = [[end.allocate(nbytes) for nbytes in SIZES] for end in ends]
    for round_ in (1, 2, 3):
        data = [[source.randbytes(nbytes) for nbytes in SIZES] for _ in ends]
        for part in range(len(SIZES)):
            for number, end in enumerate(ends):
                push(end, part, round_, places[number][part], data[number][part])
        for part in range(len(SIZES)):
            for end in ends:
                assert end.port.wait(part, 1, round_, 20.0) == DONE
                assert end.result(part, round_) == added(data[0][part], data[1][part])


@pytest.mark.parametrize("codec", [CodecSpec(kind="dithering", k=4, error_feedback=True), CodecSpec(kind="onebit")],
                         ids=["of any length", "of one length"])
@pytest.mark.parametrize("owner", [0, 1])
def test_frames_arrive_whole_in_every_round(ends, owner, codec):
    sizes = [4, 8_000, 400_000]
    plan = declare(ends, sizes, [owner] * 3, codec=codec)
    for end in ends:
        end.commit(order_of(plan))
    readings = [codec_reference.ReferenceJob(codec, nbytes // 4, "float32", 2) for nbytes in sizes[:2]]
    places = [[end.allocate(nbytes) for nbytes in sizes] for end in ends]
    for round_ in (1, 2, 3):
        data = [[np.random.default_rng([round_, i, nbytes]).standard_normal(nbytes // 4).astype(np.float32)
                 for nbytes in sizes] for i in range(2)]
        for part in range(3):
            for number, end in enumerate(ends):
                push(end, part, round_, places[number][part], data[number][part].tobytes())
        for part in range(3):
            for end in ends:
                assert end.port.wait(part, 1, round_, 20.0) == DONE
            assert ends[0].result(part, round_) == ends[1].result(part, round_)
        for part, job in enumerate(readings):
            assert ends[0].result(part, round_) == job.round([each[part] for each in data]).tobytes()


@pytest.fixture
def tuned():
    yield from connected(settings_for("tcp", autotune=True, tcp_streams=2))


@pytest.mark.parametrize(("n_streams", "used"), [(0, 2), (1, 1), (3, 3), (4, 4)])
def test_partitions_take_turns_on_the_streams_that_their_unit_asks_for(tuned, n_streams, used):
    sizes = [100] * 8
    plan = declare(tuned, sizes, [0, 1] * 4, n_streams=n_streams)
    for end in tuned:
        end.commit(order_of(plan))
    places = [[end.allocate(nbytes) for nbytes in sizes] for end in tuned]
    for part in range(8):
        for number, end in enumerate(tuned):
            push(end, part, 1, places[number][part], bytes([part + number] * 100))
    for end in tuned:
        assert end.port.wait(0, 8, 1, 20.0) == DONE
        assert [end.result(part, 1) for part in range(8)] == [bytes([2 * part + 1] * 100) for part in range(8)]
        (link,) = end.runtime.links.values()
        deadline, written = time.monotonic() + 20, [0]
        while sum(written) < 8 and time.monotonic() < deadline:  # the last may be read over there, and not counted here
            written = [stream.counters()["writes_sent"] for stream in link.streams]
        assert sum(written) == 8 and [n > 0 for n in written] == [True] * used + [False] * (4 - used)


@pytest.mark.parametrize("contributor", [0, 1])
def test_an_empty_contribution_moves_no_payload(ends, contributor):
    plan = declare(ends, [5000, 5000], [0, 1])
    for end in ends:
        end.commit(order_of(plan))
    places = [[end.allocate(5000) for _ in range(2)] for end in ends]
    data = bytes(range(250)) * 20
    for part in (0, 1):
        for number, end in enumerate(ends):
            push(end, part, 1, places[number][part], data if number == contributor else None)
        for end in ends:
            assert end.port.wait(part, 1, 1, 20.0) == DONE
            assert end.result(part, 1) == data


def test_the_next_generation_waits_for_the_local_commit(ends):
    first = declare(ends, [5000], [1])
    for end in ends:
        end.commit(order_of(first))
    second = declare(ends, [6000], [1], generation=2, first=1)
    ends[0].commit(order_of(first, second))  # node 1 is late
    places = [end.allocate(6000) for end in ends]
    push(ends[0], 1, 1, places[0], b"\1" * 6000)
    push(ends[1], 1, 1, places[1], b"\2" * 6000)
    assert ends[0].port.wait(1, 1, 1, 0.2) == TIMED_OUT
    ends[1].commit(order_of(first, second))
    for end in ends:
        assert end.port.wait(1, 1, 1, 20.0) == DONE
        assert end.result(1, 1) == b"\3" * 6000


def test_a_refused_generation_is_forgotten(ends):
    refused = declare(ends, [5000], [1])
    for end in ends:
        end.runtime.installer.drop(end.generation)
    used = [end.runtime.regions.nbytes for end in ends]
    plan = declare(ends, [5000], [1], generation=2, first=1)
    for end in ends:
        end.commit(order_of(refused, plan))
    assert [end.runtime.regions.nbytes for end in ends] == used  # its memory was taken again
    for number, end in enumerate(ends):
        push(end, 1, 1, end.allocate(5000), bytes([number + 1]) * 5000)
    for end in ends:
        assert end.port.wait(1, 1, 1, 20.0) == DONE
        assert end.result(1, 1) == b"\3" * 5000


def test_who_is_missing_is_known(ends):
    plan = declare(ends, [5000], [0])
    for end in ends:
        end.commit(order_of(plan))
    place = ends[0].allocate(5000)
    push(ends[0], 0, 1, place, b"\1" * 5000)
    while ends[0].runtime.missing(0, 1) != ("partial", (), (1,)):
        assert ends[0].port.wait(0, 1, 1, 0.01) == TIMED_OUT
    assert ends[1].runtime.missing(0, 1) == ("push", (1,), ())
    assert ends[1].runtime.missing(77, 1) == ("done", (), ())


def test_a_peer_that_closes_is_noticed(ends):
    if ends[0].settings.transport == "tcp":
        source = ends[0].runtime._source_of[1]
        ends[1].runtime.stop()
        found, code = ends[0].lost.get(timeout=20)
        assert found == source and ends[0].runtime.who(found) == ("node 1", 1) and code >= 0
    else:
        ends[1].runtime.links[0].channel.close()
        with pytest.raises(PeerLostError):
            ends[0].hear()


def test_an_abort_ends_waits_with_its_reason(ends):
    plan = declare(ends, [5000], [0])
    for end in ends:
        end.commit(order_of(plan))
    ends[0].runtime.abort(PeerLostError("node 1 is lost"))
    assert ends[0].port.wait(0, 1, 1, 20.0) == ABORTED
    assert ends[0].port.state() == (1, "PeerLostError: node 1 is lost")


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_another_key_is_refused_and_named(kind):
    made = [End(0, settings_for(kind, ), KEY), End(1, settings_for(kind), b"another key 1234")]
    made[0].settings = made[1].settings = Settings(
        transport=kind, start_timeout_s=1.0, engine_threads=1, huge_pages="off")
    connect(made)
    expected = MismatchError if kind == "tcp" else ConfigError
    assert isinstance(made[1].peering.error, expected | PeerLostError)
    assert isinstance(made[0].peering.error, StallError)
    assert f"node 1 ({format_address(LOOPBACK, 0).removesuffix('0')}" in str(made[0].peering.error)
    assert not made[0].peering.links and not made[1].peering.links
    for end in made:
        end.close()


@pytest.mark.parametrize("encrypts", [0, 1])
def test_who_encrypts_and_who_does_not_have_no_link_and_say_why(encrypts, no_leaks):
    made = [End(index, settings_for("tcp", encryption="on" if index == encrypts else "off", start_timeout_s=1.0))
            for index in (0, 1)]
    connect(made)
    error = made[1].peering.error
    assert isinstance(error, MismatchError)
    for words in ("wants a data connection", "in the clear", "encrypted", "BPSFAST_ENCRYPTION"):
        assert words in str(error)
    assert isinstance(made[0].peering.error, StallError)
    assert not made[0].peering.links and not made[1].peering.links
    for end in made:
        end.close()


def test_what_is_encrypted_goes_by_tcp_and_says_so(no_leaks):
    made = [End(index, settings_for("auto", encryption="on", allow_shm=False)) for index in (0, 1)]
    connect(made)
    found = made[1].peering.describe()["node 0"]
    assert found.startswith("tcp: allow_shm=false") and found.endswith("; no rdma: encryption=on; encrypted")
    for end in made:
        end.close()


def test_shared_memory_is_not_encrypted(no_leaks):
    made = [End(index, settings_for("auto", encryption="on")) for index in (0, 1)]
    connect(made)
    assert [end.peering.describe()[f"node {1 - end.index}"] for end in made] == [
        "shm: exchanged", "shm: a memfd exchange over its local socket worked"]
    for end in made:
        end.close()


def test_a_connection_that_no_stream_could_take_over_is_closed_with_its_link(no_leaks):
    made = [End(index, settings_for("tcp")) for index in (0, 1)]
    connect(made)
    link = made[0].peering.links[1]
    link.limits = Limits(1 << 60)
    with pytest.raises(MemoryError):
        link.start(made[0].runtime.engine, 0)
    socks = list(link.sockets.values())
    assert socks and not link.streams
    for end in made:
        end.close()
    assert all(sock.fileno() == -1 for sock in socks)


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_links_that_nobody_took_are_closed(kind, no_leaks):
    made = [End(index, settings_for(kind)) for index in (0, 1)]
    connect(made)
    links = [end.peering.links[1 - end.index] for end in made]
    for end in made:
        end.close()
        assert not end.peering.links
    assert all(link.channel.fileno() == -1 if kind == "shm" else not link.sockets for link in links)


def test_a_pair_connects_anew_after_its_link_was_given_up(no_leaks):
    made = [End(index, settings_for("tcp", allow_shm=False)) for index in (0, 1)]
    connect(made)
    before = [end.peering.take()[1 - end.index] for end in made]
    made[0].peering.seek(1, lambda: {3: 7}, "its card is gone")  # it cannot dial: the other one is asked to
    while not made[1].peering.reconnector.requested():
        made[1].loop.run_once(0.05)
    made[1].peering.seek(0, dict)
    deadline = time.monotonic() + 20
    while not all(end.peering.done for end in made):
        assert time.monotonic() < deadline
        for end in made:
            end.loop.run_once(0.05)
    for end, old in zip(made, before):
        assert end.peering.links[1 - end.index] is not old
        old.close()
    assert made[0].peering.describe()["node 1"] == "tcp: its card is gone"
    (taken,) = made[0].peering.take(1).values()
    assert (taken.awaited_there, made[1].peering.links[0].awaited_there) == ({}, {3: 7})
    for end in made:
        end.close()  # closes what nobody took
    taken.close()


def test_the_kernel_is_told_how_long_a_peer_may_be_silent():
    made = [End(index, settings_for("tcp", lease_s=8.0)) for index in (0, 1)]
    connect(made)
    for end in made:
        for sock in end.peering.links[1 - end.index].sockets.values():
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert [sock.getsockopt(socket.IPPROTO_TCP, option) for option in (
                socket.TCP_USER_TIMEOUT, socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)] == [4000, 2, 1]
        end.close()


def test_auto_falls_back_to_tcp_and_says_why():
    made = [End(0, settings_for("auto")), End(1, settings_for("auto"))]
    made[0].reception.close()  # as if the other node were on another host
    connect(made)
    assert [made[0].peering.links[1].kind, made[1].peering.links[0].kind] == ["tcp", "tcp"]
    assert "no shared memory with it" in made[1].peering.describe()["node 0"]
    for end in made:
        end.close()


def test_explicit_shm_that_cannot_be_is_an_error():
    made = [End(0, settings_for("shm")), End(1, settings_for("shm"))]
    for end in made:
        end.settings = Settings(transport="shm", start_timeout_s=1.0)
    made[0].reception.close()
    connect(made)
    assert isinstance(made[1].peering.error, ConfigError)
    assert "transport='shm' was asked for, but node 0" in str(made[1].peering.error)
    for end in made:
        end.close()


def test_settings_that_cannot_be_are_refused():
    transport.check(Settings())
    with pytest.raises(ConfigError, match="asked for, but there is no RDMA device here"):
        transport.check(Settings(transport="rdma"))
    with pytest.raises(ConfigError, match="encryption='on' contradicts transport='rdma'"):
        transport.check(Settings(transport="rdma", encryption="on"))
    with pytest.raises(ConfigError, match="BYTEPS_ENABLE_IPC=0"):
        transport.check(Settings(transport="shm", allow_shm=False))
    assert transport.shm_objection(Settings(allow_shm=False)) == "allow_shm=false (BYTEPS_ENABLE_IPC=0)"


def test_io_threads_that_cannot_be_made_are_an_error_in_words():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, hard))
    try:
        with pytest.raises(ConfigError, match=r"8 I/O threads cannot be started: .*ulimit -n"):
            tcp.io_threads_of(Settings(io_threads=8))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
