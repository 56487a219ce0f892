"""A node that comes late to one that runs: what it may open there, and what is whose error."""
from __future__ import annotations

import socket

import pytest

from bpsfast.base.addresses import listening_socket
from bpsfast.base.settings import Settings
from bpsfast.node.transport import Epochs, Peering
from bpsfast.node.transport.rdma import NoRdmaError
from bpsfast.orchestration.messages import NodeInfo


def node(index, ranks=()):
    return NodeInfo(index=index, host="here", pid=1, address="127.0.0.1:1", shm_name="", ranks=ranks,
                    nic_rate_bytes=0.0)


class Refusing:
    """Rails that lead nowhere; `asked`: for which of the calls it would have opened a device."""

    n_pairs = 1

    def __init__(self):
        self.asked = []

    def towards(self, address, n_peers, *, opens=True):
        self.asked.append(opens)
        raise NoRdmaError("the device is taken")


@pytest.fixture
def peering(request):
    """Node 0, to which node 1 belongs from the start; node 2 is to come."""
    nodes = [node(0, (0,)), node(1, (1,))]
    made = Peering(Settings(transport=request.param, start_timeout_s=5.0), bytes(16), Epochs(1), nodes[0], nodes,
                   listening_socket("127.0.0.1"), None, Refusing(), lambda: None)
    made.expect(node(2))
    yield made
    made._port.start()
    made.close()


@pytest.mark.parametrize("peering", ["rdma", "auto"], indirect=True)
@pytest.mark.parametrize(("index", "opens"), [(1, True), (2, False)])
def test_that_rdma_does_not_reach_who_comes_late_is_no_error_here(peering, index, opens):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with theirs:
        theirs.shutdown(socket.SHUT_WR)
        peering._accept_rdma(ours, index, 1)
    assert peering._rails.asked == [opens] and ours.fileno() == -1
    is_wanted = peering._settings.transport == "rdma"
    assert (peering.error is not None) == (is_wanted and index == 1)
    assert ("no rdma: " in peering._objections.get(index, "")) == (not is_wanted)
    if peering.error is not None:
        assert "node 1 (here) cannot be reached by it: " in str(peering.error)
