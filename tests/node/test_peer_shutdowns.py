"""Nodes that take leave of each other: whose word for it is believed."""
from __future__ import annotations

import os
import time

import msgspec
import pytest

from bpsfast.base.settings import Settings
from bpsfast.node.transport import Epochs, tcp
from bpsfast.node.transport.reconnector import SHUTDOWN_STREAM
from tests.support.two_nodes import KEY, End, connect

LIMIT_S = 20.0


@pytest.fixture
def ends():
    settings = Settings(transport="tcp", start_timeout_s=LIMIT_S, engine_threads=1, huge_pages="off")
    made = [End(index, settings) for index in (0, 1)]
    connect(made)
    yield made
    for end in made:
        end.close()


def announce(end, index, pid):
    """Tell *end* that the ranks of node *index* have left; return when it has heard that."""
    sock, _ = tcp.connect(end.info.address, KEY, mine=index, peer=end.index, number=SHUTDOWN_STREAM, epochs=Epochs(1),
                          deadline=time.monotonic() + LIMIT_S, pid=pid)
    with sock:
        sock.settimeout(LIMIT_S)
        assert not sock.recv(1)


def test_a_node_takes_leave_of_all_others(ends):
    ends[1].peering.peer_shutdowns.announce_shutdown()
    until = time.monotonic() + LIMIT_S
    while not (ends[1].peering.peer_shutdowns.are_announced and ends[0].peering.peer_shutdowns.announced):
        assert time.monotonic() < until
    assert ends[0].peering.peer_shutdowns.announced == {1} and not ends[1].peering.peer_shutdowns.announced


def test_only_a_node_with_ranks_can_say_that_its_own_have_left(ends, caplog):
    for index, pid in ((1, os.getpid() + 1), (2, os.getpid()), (0, os.getpid()), (-1, 0)):
        announce(ends[0], index, pid)
    helper = msgspec.structs.replace(ends[1].info, index=2, ranks=())
    ends[0].peering.expect(helper)
    announce(ends[0], 2, os.getpid())
    assert not ends[0].peering.peer_shutdowns.announced
    assert caplog.text.count("but it is not that node with ranks") == 5
    announce(ends[0], 1, os.getpid())
    assert ends[0].peering.peer_shutdowns.announced == {1}
