"""What a rank shares of its device: how much, in which pieces, with whom; and the words for who cannot."""
from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from bpsfast.base.settings import Settings
from bpsfast.gpu.host import HostDevice
from bpsfast.orchestration.errors import ConfigError, UnsupportedError
from bpsfast.orchestration.messages import DeviceShared, TensorSpec
from bpsfast.trainer.gpu.gpu_direct import GpuDirectMemory

MIB = 1 << 20


class Session:
    """What `GpuDirectMemory` needs of a session; the node registers everything, or refuses it with *error*."""

    def __init__(self, local_rank=0, local_size=1, n_nodes=2, error="", **values):
        self.settings = Settings(gpu_direct=True, **values)
        self.local_rank, self.local_size, self.n_nodes, self.n_helpers = local_rank, local_size, n_nodes, 0
        self.shared, self.said, self._error = [], [], error

    def share_device(self, question, trouble, fd):
        message = question(1)
        assert os.fstat(fd).st_size == message.nbytes
        self.shared.append((message.nbytes, message.result_nbytes, message.gpu))
        return DeviceShared(request=1, segment=10 + len(self.shared), error=self._error, reason="why")

    def say_direct(self, names):
        self.said.append(names)


def spec(name, n, dtype="float32", **values):
    return TensorSpec(name=name, dtype=dtype, shape=(n,), **values)


@pytest.fixture
def device():
    return HostDevice()


@pytest.fixture
def made(no_leaks):
    all_of_them = []

    def make(*arguments, **values):
        session = Session(*arguments, **values)
        all_of_them.append(GpuDirectMemory(session))
        return session, all_of_them[-1]

    yield make
    for each in all_of_them:
        each.close()


def test_off_and_memory_of_the_host_share_nothing(made, device):
    session, direct = made()
    direct.cover(None, [spec("a", 10)])
    direct._is_on = False
    direct.cover(device, [spec("a", 10)])
    assert session.shared == session.said == []


def test_room_for_an_input_and_two_results_of_each_name_once(made, device):
    session, direct = made()
    direct.cover(device, [spec("a", 10), spec("b", 100)])
    assert session.shared == [(24 * MIB, 16 * MIB, "")] and session.said == [("a", "b")]
    direct.cover(device, [spec("b", 100), spec("c", 7 * MIB // 4)])
    assert len(session.shared) == 1 and session.said[1:] == [("c",)]
    direct.cover(device, [spec("d", 3 * MIB)])
    assert session.shared[1:] == [(36 * MIB, 24 * MIB, "")]
    direct.forget(["d"])
    direct.cover(device, [spec("e", 3 * MIB)])  # in the room of d
    assert len(session.shared) == 2


def test_compressed_ones_are_left_out(made, device):
    from bpsfast.compression import onebit

    session, direct = made()
    direct.cover(device, [spec("a", 10, codec=onebit())])
    assert session.shared == session.said == []


def test_inputs_lie_behind_the_results_and_are_given_again(made, device):
    session, direct = made()
    direct.cover(device, [spec("a", MIB)])
    places = [direct.allocate(device, 3 * MIB) for _ in range(2)]
    assert [(place.segment.number, place.offset) for place in places] == [(11, 16 * MIB), (11, 19 * MIB)]
    memory = places[0].segment.memory
    assert places[1].address == memory.address + 19 * MIB
    direct.release(places[0])
    assert direct.allocate(device, 100).offset == 16 * MIB
    other = direct.allocate(device, 3 * MIB)  # there is room, but not in one piece
    assert session.shared[1:] == [(4 * MIB, 0, "")] and (other.segment.number, other.offset) == (12, 0)


def test_what_the_node_refuses_is_raised_and_given_back(made, device):
    session, direct = made(error="UnsupportedError")
    with pytest.raises(UnsupportedError, match="why"):
        direct.cover(device, [spec("a", 10)])
    assert session.said == [] and not direct.segments


@pytest.mark.parametrize(("values", "words"), [
    ({"n_nodes": 1}, "one machine"),
    ({"local_size": 2}, "has 2 ranks.*BPSFAST_REDUCE_ROOTS.*islands=off"),
    ({"local_size": 2, "islands": "auto"}, "reduce_roots=by topology"),
    ({"local_size": 2, "islands": "auto", "reduce_roots": "0,1"}, "reduce_roots=0,1"),
])
def test_who_cannot(made, device, values, words):
    session, direct = made(**values)
    with pytest.raises(ConfigError, match=words):
        direct.cover(device, [spec("a", 10)])
    assert session.shared == session.said == []


def test_of_an_island_its_root_shares_what_goes_by_it(made, device):
    of_island = {"local_size": 2, "islands": "auto", "reduce_roots": "1"}
    session, direct = made(0, **of_island)
    direct.cover(device, [spec("a", 10)])
    assert session.shared == []
    session, direct = made(1, **of_island)
    direct.cover(device, [SimpleNamespace(name="a", dtype="int16", shape=(1,), codec=None)])  # NCCL has none
    assert session.shared == []
    direct.cover(device, [spec("a", 10)])
    assert session.said == [("a",)]
