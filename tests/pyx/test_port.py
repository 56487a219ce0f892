"""The rank's port: waits that end in time and say why, copies that overlap with sums."""
import threading

import numpy as np
import pytest

from bpsfast.base.trace_records import RECORD
from bpsfast.pyx import port as native
from bpsfast.pyx.pages import Segment
from bpsfast.pyx.port import ABORTED, DONE, NODE_DIED, TIMED_OUT, Port, copy
from tests.support.port_node import Node, alarms, interrupt, mortal


@pytest.fixture
def node():
    return Node()


def test_submit_is_one_entry_on_the_lane(node):
    port = node.port()
    port.submit(3, 2, 7, 5, 8192)
    port.submit(1, 1, 2, 0, 0, empty=True)
    assert node.lane.pop() == (3, 2, 7, 0, 5, 8192)
    assert node.lane.pop() == (1, 1, 2, 1, 0, 0)


def test_wait_looks_at_every_partition(node):
    port = node.port()
    node.publish(0, 1)
    assert port.wait(0, 1, 1, 1) == DONE
    assert not port.done(0, 2, 1)
    assert port.wait(0, 2, 1, 0.01) == TIMED_OUT
    node.publish(1, 2)
    assert port.wait(0, 2, 1, 1) == DONE and port.done(0, 2, 1)


def test_rounds_may_wrap(node):
    port = node.port()
    node.publish(0, 3)
    assert port.wait(0, 1, 2**32 - 2, 1) == DONE
    node.publish(0, 2**32 - 2)
    assert not port.done(0, 1, 3)


def test_an_aborted_job_ends_the_wait_with_its_reason(node):
    port = node.port()
    assert port.state() == (0, "")
    node.abort(b"PeerLostError: rank 3 is gone")
    assert port.wait(0, 1, 1, 10) == ABORTED
    assert port.state() == (1, "PeerLostError: rank 3 is gone")


def test_a_result_that_is_there_counts_even_after_an_abort(node):
    port = node.port()
    node.publish(0, 1)
    node.abort(b"late")
    assert port.wait(0, 1, 1, 10) == DONE


def test_the_death_of_the_node_ends_the_wait(node):
    with mortal() as (process, pidfd):
        port, outcome = node.port(pidfd), []
        waiter = threading.Thread(target=lambda: outcome.append(port.wait(0, 1, 1, 60)))
        waiter.start()
        process.kill()
        waiter.join(30)
    assert outcome == [NODE_DIED]


def test_a_full_lane_of_a_dead_job_is_an_error_not_a_hang(node):
    port = node.port()
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    node.abort(b"PeerLostError: gone")
    with pytest.raises(ConnectionError, match="PeerLostError: gone"):
        port.submit(4, 1, 1, 0, 0)


@pytest.mark.parametrize("how", ["submit", "copy_in"])
def test_a_full_lane_of_a_node_that_hangs_is_an_error_not_a_hang(node, how):
    port = node.port(patience_s=0.3)
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    source, target = np.arange(8192, dtype=np.uint8), np.zeros(8192, np.uint8)
    with pytest.raises(native.LaneFull, match=r"full lane for 0\.3 s"):
        if how == "submit":
            port.submit(4, 1, 1, 0, 0)
        else:
            port.copy_in(target.ctypes.data, source.ctypes.data, 8192, 4, 4096, 1, 0, 0)


def test_a_full_lane_does_not_hold_up_signals_and_loses_nothing(node):
    port = node.port()
    for part in range(4):
        port.submit(part, 1, 1, 0, 0)
    source, target = np.arange(3 * 4096, dtype=np.uint8), np.zeros(3 * 4096, np.uint8)
    with alarms(lambda: [node.lane.pop() for _ in range(4)], 0.15):
        port.copy_in(target.ctypes.data, source.ctypes.data, 3 * 4096, 4, 4096, 1, 0, 0)
    assert [node.lane.pop()[0] for _ in range(3)] == [4, 5, 6] and node.lane.pop() is None
    assert (target == source).all()


def test_a_signal_handler_runs_while_waiting(node):
    """Ctrl-C in a wait must not last until the deadline."""
    with alarms(interrupt, 0.05), pytest.raises(InterruptedError, match="handled"):
        node.port().wait(0, 1, 1, 60)


def test_signals_that_come_faster_than_the_slices_hide_no_death(node):
    n_handled = 0
    with mortal() as (process, pidfd):
        port = node.port(pidfd)

        def handle():
            nonlocal n_handled
            n_handled += 1
            if n_handled == 3:
                process.kill()

        with alarms(handle, 0.02, 0.02):
            assert port.wait(0, 1, 1, 20) == NODE_DIED
        assert n_handled >= 3
        port.close()


def test_copy_in_announces_each_partition_after_its_bytes(node):
    with Segment(3 * 4096) as segment:
        source = np.arange(2 * 4096 + 100, dtype=np.uint8)
        node.port().copy_in(segment.address, source.ctypes.data, source.nbytes, 4, 4096, 9, 2, 65536)
        assert [node.lane.pop() for _ in range(3)] == [(4 + i, 1, 9, 0, 2, 65536 + 4096 * i) for i in range(3)]
        assert bytes(memoryview(segment)[: source.nbytes]) == source.tobytes()


def test_sums_of_much_that_is_pushed_at_once_go_past_the_caches(node):
    port, most = node.port(), 16 << 20
    for nbytes in (0, most - 1, most):
        port.submit(0, 4, 1, 0, 0, nbytes=nbytes)
    assert [node.lane.pop()[3] for _ in range(3)] == [0, 0, 4]
    with Segment(most) as segment:
        source = np.ones(most, np.uint8)
        for nbytes in (most - 1, most):
            port.copy_in(segment.address, source.ctypes.data, nbytes, 0, most // 2, 1, 0, 0)
        assert [node.lane.pop()[3] for _ in range(4)] == [0, 0, 4, 4]
        assert np.frombuffer(segment, np.uint8).all()


def test_deliver_copies_each_partition_once_it_is_published(node):
    with Segment(2 * 4096) as segment:
        memoryview(segment)[:] = bytes(range(256)) * 32
        target = np.zeros(4096 + 77, np.uint8)
        port = node.port()
        node.publish(2, 5)
        assert port.deliver(target.ctypes.data, segment.address, target.nbytes, 2, 4096, 5, 0.01) == TIMED_OUT
        assert bytes(target[:4096]) == bytes(memoryview(segment)[:4096]) and not target[4096:].any()
        node.publish(3, 5)
        assert port.deliver(target.ctypes.data, segment.address, target.nbytes, 2, 4096, 5, 10) == DONE
        assert bytes(target) == bytes(memoryview(segment)[: target.nbytes])


@pytest.mark.parametrize("nbytes", [0, 1, 4095, (1 << 20) + 13, 5 << 20])
@pytest.mark.parametrize("shift", [0, 1, 24])
def test_copy_is_exact_at_any_alignment(nbytes, shift):
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 64, np.uint8)
    target = np.full(nbytes + 128, 7, np.uint8)
    copy(target.ctypes.data + 64 - shift, source.ctypes.data + shift, nbytes)
    assert (target[64 - shift : 64 - shift + nbytes] == source[shift : shift + nbytes]).all()
    assert (target[: 64 - shift] == 7).all() and (target[64 - shift + nbytes :] == 7).all()


def test_partitions_beyond_the_board_are_refused(node):
    port = node.port()
    for part, n in ((16, 1), (15, 2), (0, 17)):
        with pytest.raises(ValueError, match="beyond the board's 16 words"):
            port.submit(part, n, 1, 0, 0)
        with pytest.raises(ValueError, match="beyond"):
            port.wait(part, n, 1, 1)


def test_a_closed_port_refuses_and_releases(node):
    port = node.port()
    with pytest.raises(BufferError):
        node.board.append(0)
    port.close()
    port.close()
    node.board.append(0)
    with pytest.raises(ValueError, match="closed"):
        port.submit(0, 1, 1, 0, 0)


def test_unformatted_buffers_are_refused(node):
    for arguments in ((bytearray(512), node.board, node.bell), (node.lane_memory, bytearray(8192), node.bell),
                      (node.lane_memory, node.board, bytearray(256))):
        with pytest.raises(ValueError, match="no formatted"):
            Port(*arguments, -1)


def test_the_trace_keeps_what_fits(node):
    port = node.port(trace_capacity=2)
    with Segment(4096) as segment:
        for round in range(1, 4):
            node.publish(0, round)
            port.deliver(segment.address, segment.address, 0 or 1, 0, 4096, round, 1)
    assert len(port.trace()) == 2 * 32
    assert native.DONE == 0


def test_the_trace_keeps_the_rounds_that_are_asked_for(node):
    port = node.port(trace_capacity=100, trace_first_round=3, trace_last_round=4)
    for round in range(2, 6):  # the lane holds four
        port.submit(0, 2, round, 0, 0)
    rows = RECORD.iter_unpack(port.trace())
    assert [(part, at, kind, n_parts) for _, _, part, at, kind, _, n_parts in rows] == [(0, 3, 9, 2), (0, 4, 9, 2)]
