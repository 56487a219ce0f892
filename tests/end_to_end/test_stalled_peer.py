"""One peer that stands still: what does not need it goes on, for credit is each peer's own, and nothing is lost."""
from __future__ import annotations

import os
import signal
import socket

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process

N_TENSORS, N_BYTES, N_ROUNDS = 16, 262_144, 20
#: Nodes 0 and 1 have a rank each, 2 is helper 0, which stands still.
STALLED = 2


def value(name, number):
    return np.full(N_BYTES // 4, sum(map(ord, name)) * 100 + number + bpsfast.rank(), np.float32)


def push(name, number):
    return bpsfast.push_pull_async(value(name, number), False, name)


def is_sum(handle, name, number):
    return bool((bpsfast.synchronize(handle) == sum(value(name, number)[0] - bpsfast.rank() + rank
                                                    for rank in range(bpsfast.size()))).all())


def declare():
    """Push all once; return the names that the one that stalls owns."""
    names = [f"tensor {i}" for i in range(N_TENSORS)]
    assert all(is_sum(handle, name, 0) for name, handle in [(name, push(name, 0)) for name in names])
    units = {name: process.current().tensors.unit(name) for name in names}
    return [name for name, unit in units.items() if {part.owner for part in unit.titles().values()} == {STALLED}]


def go_on(theirs, address):
    """Push what the stalled one owns, then the rest again and again; return once that is complete, too.

    After the rest, tell *address* whether all of what the stalled one owns is waiting, and whether the rest was right.
    """
    late = {name: push(name, 1) for name in theirs}
    rest = [f"tensor {i}" for i in range(N_TENSORS) if f"tensor {i}" not in theirs]
    right = [is_sum(handle, name, number) for number in range(N_ROUNDS)
             for name, handle in [(name, push(name, number)) for name in rest]]
    waiting = not any(bpsfast.poll(handle) for handle in late.values())
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as parent:
        parent.sendto(repr((waiting, all(right))).encode(), address)
    return [is_sum(handle, name, 1) for name, handle in late.items()]


@pytest.fixture
def ears(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "ears"))
        found.settimeout(40.0)
        yield found


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_others_are_not_held_up(job, ears, transport):
    started = job(ranks=(1, 1), helpers=2, placement="ps", transport=transport, lease_s=60.0, helper_lease_s=0,
                  partition_bytes=N_BYTES, fusion_bytes=0, credit_bytes=N_BYTES)
    theirs, same = started.run(declare)
    assert theirs == same and 1 < len(theirs) < N_TENSORS, "more of it than there is credit"
    helper = started.daemons["helper 0"]
    helper.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, helper.pid, os.WSTOPPED)  # its other threads go on until the one that takes the signal has run
    try:
        started.begin(go_on, theirs, ears.getsockname())
        assert [ears.recv(100) for _ in range(2)] == [b"(True, True)"] * 2
    finally:
        helper.send_signal(signal.SIGCONT)
    assert [outcome.value for outcome in started.outcomes()] == [[True] * len(theirs)] * 2
