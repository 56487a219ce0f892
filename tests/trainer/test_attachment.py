"""What a rank gets from its node is given back whole where some of it cannot be used."""
from __future__ import annotations

import os

import pytest

from bpsfast.orchestration.messages import Attached
from bpsfast.trainer import node_connection

ATTACHED = Attached(rank=0, size=1, local_rank=0, local_size=1, node_pid=1, node=0, n_nodes=1, n_helpers=0,
                    transports={}, settings={}, cpus=str(min(os.sched_getaffinity(0))))


def memory() -> int:
    """Return a descriptor of a page that can be mapped."""
    fd = os.memfd_create("test")
    os.truncate(fd, 4096)
    return fd


@pytest.mark.parametrize("at", range(3))
def test_descriptors_are_closed_and_nobody_is_pinned_where_one_cannot_be_mapped(at: int, no_leaks: None) -> None:
    before = os.sched_getaffinity(0)
    fds = [memory() for _ in range(4)]
    read_end, write_end = os.pipe()  # no file that can be mapped
    os.close(fds[at])
    os.close(write_end)
    fds[at] = read_end
    with pytest.raises(OSError, match="mmap"):
        node_connection._map(None, None, ATTACHED, tuple(fds))
    assert os.sched_getaffinity(0) == before


def test_what_is_mapped_is_held_until_it_is_closed(no_leaks: None) -> None:
    before = os.sched_getaffinity(0)
    kept = node_connection._map(None, Closeable(), ATTACHED, tuple(memory() for _ in range(4)))
    assert len(os.sched_getaffinity(0)) == 1 and not kept.board.closed
    kept.close()
    assert os.sched_getaffinity(0) == before and kept.board.closed


class Closeable:
    """A connection that is there to be closed."""

    def close(self) -> None:
        """Do so."""
