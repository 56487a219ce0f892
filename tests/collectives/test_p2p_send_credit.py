"""What may be sent before anybody receives it: so much, and the rest waits at its sender."""
from __future__ import annotations

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p.protocol import EAGER_NBYTES, N_ANNOUNCED, ROOM_NBYTES
from tests.support.rank_messages import endpoint, pattern, receive, send


def unexpected(nbytes, n):
    """Rank 0 sends what nobody receives; then the last one does. What lay where."""
    if bpsfast.rank() == 0:
        transfers = [send(pattern(nbytes, number), 1, 8) for number in range(n)]
        send(np.zeros(1, np.uint8), 1, 9, channel=3).wait(10)
        sent_at_once = sum(transfer.done() for transfer in transfers)
        bpsfast.barrier()
        for transfer in transfers:
            transfer.wait(20)
        return sent_at_once, 0
    receive(np.zeros(1, np.uint8), 0, 9, channel=3).wait(10)  # what was sent before it has come before it
    arrivals = endpoint().receiver.matching._arrivals.values()
    lie = [each for here in arrivals for queue in here.values() for _, each in queue]
    bpsfast.barrier()
    x = np.zeros(nbytes, np.uint8)
    for number in range(n):
        receive(x, 0, 8).wait(20)
        assert np.array_equal(x, pattern(nbytes, number)), number
    return len(lie), sum(len(each.data) for each in lie if each.data is not None)


@pytest.mark.parametrize(("nbytes", "n"), [(1000, 1200), (0, N_ANNOUNCED + 500), (EAGER_NBYTES, 100), (100_000, 500)])
@pytest.mark.parametrize("ranks", [(2,), (1, 1)])
def test_what_nobody_receives_is_bounded(shared_job, ranks, nbytes, n):
    started = shared_job(ranks=ranks, transport="tcp")
    (at_once, _), (n_lying, nbytes_lying) = started.run(unexpected, nbytes, n)
    assert nbytes_lying <= ROOM_NBYTES and n_lying == n <= at_once + N_ANNOUNCED
    most = 0 if nbytes > EAGER_NBYTES else min(n, ROOM_NBYTES // (nbytes + 40))
    assert most * 3 // 4 - 1 <= at_once <= most, "a quarter may not have been given back of what was before"


def more_than_announced():
    """More messages than may be announced: the last one waits at its sender, and is received in its turn."""
    n = N_ANNOUNCED + 300
    if bpsfast.rank() == 0:
        x = pattern(EAGER_NBYTES + 1, 0)
        transfers = [send(x, 1, number) for number in range(n)]
        bpsfast.barrier()
        for transfer in transfers:
            transfer.wait(30)
        return len(transfers)
    bpsfast.barrier()
    with pytest.raises(bpsfast.StallError, match=r"rank 1 waited 0.2 s for rank 0 to send a message with tag \d+ on"):
        late = receive(np.zeros(EAGER_NBYTES + 1, np.uint8), 0, n - 1)
        late.wait(0.2)
    assert late.cancel()
    for number in range(n):
        receive(np.zeros(EAGER_NBYTES + 1, np.uint8), 0, number).wait(30)
    return n


def test_what_is_beyond_waits_at_the_sender(job):
    assert job(ranks=(2,)).run(more_than_announced) == [N_ANNOUNCED + 300] * 2
