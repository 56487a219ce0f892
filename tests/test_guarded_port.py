"""The guarded port: what the native port raises becomes an error that says who is to blame."""
import pytest

from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.pyx import ring
from bpsfast.pyx.port import Port
from bpsfast.trainer.guarded_port import GuardedPort


@pytest.fixture
def board():
    made = bytearray(4096 + 64)
    ring.format_board(made)
    return made


@pytest.fixture
def full(board):
    """A guarded port whose lane is full, of a node that takes nothing."""
    lane, bell = bytearray(256 + 32), bytearray(ring.DOORBELL_NBYTES)
    ring.format_lane(lane)
    ring.format_doorbell(bell)
    guarded = GuardedPort(Port(lane, board, bell, -1, patience_s=0.2), "rank 3", "node 1 (pid 77)", lambda: None,
                          lambda part, round, name: "nobody", lambda: False)
    guarded.submit(0, 1, 1, 0, 0)
    yield guarded
    assert guarded.close(1)


def test_a_node_that_hangs_is_named(full):
    with pytest.raises(StallError, match=r"node 1 \(pid 77\) has taken nothing from a full lane for 0\.2 s"):
        full.submit(0, 1, 1, 0, 0)


def test_an_abort_while_the_lane_is_full_is_what_the_job_was_aborted_with(full, board):
    reason = b"PeerLostError: rank 2 is lost"
    board[64 : 64 + len(reason)] = reason
    board[4:8] = (1).to_bytes(4, "little")
    with pytest.raises(PeerLostError, match=r"^rank 2 is lost$"):
        full.submit(0, 1, 1, 0, 0)
