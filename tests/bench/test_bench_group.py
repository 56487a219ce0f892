"""The coordinator of a contestant: answers by rank, and the first failure, even before other answers."""
from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from multiprocessing import Pipe

import pytest

from bpsfast.bench.harness.contestant_group import Group
from bpsfast.orchestration.errors import PeerLostError, StallError


@pytest.fixture
def asked():
    """Return a group of two whose processes are pipes, and the other ends of these pipes."""
    ours, theirs = zip(*(Pipe() for _ in range(2)))
    group = Group.__new__(Group)
    group.name, group.size, group._processes, group._connections = "ours", 2, [], list(ours)
    yield group, theirs
    group.close()
    for end in theirs:
        end.close()


def test_answers_are_by_rank(asked):
    group, theirs = asked
    for rank in (1, 0):
        theirs[rank].send((True, f"rank {rank}"))
    assert group.ask("count", 7) == ["rank 0", "rank 1"]
    assert [end.recv() for end in theirs] == [("count", (7,))] * 2
    theirs[1].send((True, "alone"))
    assert group.ask("count", only=[1]) == ["alone"] and not theirs[0].poll()


def test_the_first_failure_is_told_though_others_wait(asked):
    group, theirs = asked
    theirs[1].send((False, "no memory"))
    with pytest.raises(PeerLostError, match=r"ours failed in prepare\('numpy',\):\nno memory"):
        group.ask("prepare", "numpy", timeout_s=60.0)


def test_an_end_is_told_though_others_wait(asked):
    group, theirs = asked
    with ThreadPoolExecutor(1) as other:
        asking = other.submit(group.ask, "prepare", "numpy", timeout_s=60.0)
        assert theirs[1].recv() == ("prepare", ("numpy",))
        theirs[1].close()
        with pytest.raises(PeerLostError, match="a process of ours ended during prepare"):
            asking.result()
    with pytest.raises(PeerLostError, match="a process of ours ended before prepare"):
        group.ask("prepare", "numpy", timeout_s=60.0)


def test_who_does_not_answer_is_counted(asked):
    group, theirs = asked
    theirs[0].send((True, 1))
    with pytest.raises(StallError, match=r"1 of 2 processes of ours did not answer measure\(\) within 0.01 s"):
        group.ask("measure", timeout_s=0.01)
