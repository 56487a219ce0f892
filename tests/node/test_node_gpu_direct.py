"""Which partitions go straight between a device and a card, and the words for why others do not."""
from __future__ import annotations

import os

import pytest

from bpsfast.base.settings import Settings
from bpsfast.gpu.host import HostDevice
from bpsfast.node.gpu_direct import GpuDirect
from bpsfast.node.regions import Regions
from bpsfast.node.transport.rdma import RdmaLink
from bpsfast.node.transport.tcp import TcpLink
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.errors import CapacityError, ConfigError, UnsupportedError
from bpsfast.orchestration.messages import MemberPlan, PartPlan, ShareDevice, UnitPlan
from bpsfast.pyx.pages import Shadow

MIB = 1 << 20
pytestmark = pytest.mark.usefixtures("no_leaks")


class Cards:
    """Rails of two cards that take, or refuse, what is registered."""

    used = True
    devices = ("mlx5_0", "mlx5_1")

    def __init__(self):
        self.registered, self.refuses = [], ""

    def require(self, nbytes, purpose):
        pass

    def register(self, kind, segment):
        if self.refuses:
            raise CapacityError(self.refuses)
        self.registered.append((kind, segment))


@pytest.fixture
def cards():
    return Cards()


@pytest.fixture
def regions(cards):
    made = Regions()
    made.register_with(cards)
    yield made
    made.close()


@pytest.fixture
def links():
    return {1: RdmaLink(1, 3, [], None), 2: TcpLink(2, {})}


@pytest.fixture
def gpu_direct(regions, cards, links):
    return GpuDirect(Settings(rdma_inline_bytes=100), regions, cards, links)


def share(gpu_direct, local_rank=0, gpu="", result_nbytes=2 * MIB):
    memory = HostDevice().share(3 * MIB)
    try:
        wanted = ShareDevice(request=1, nbytes=3 * MIB, result_nbytes=result_nbytes, gpu=gpu)
        return gpu_direct.register(local_rank, wanted, os.dup(memory.fd))
    finally:
        memory.close()


def part(owner, nbytes=4096):
    return PartPlan(part=7, offset=0, nbytes=nbytes, owner=owner)


def unit(*names, **values):
    members = tuple(MemberPlan(name=name, shape=(1,), offset=0, nbytes=4) for name in names)
    return UnitPlan(unit=0, name="u", dtype="float32", average=False, priority=0, nbytes=4096, stride=4096,
                    members=members, parts=(part(1),), **values)


def test_memory_is_registered_and_its_first_bytes_are_for_results(gpu_direct, regions, cards):
    assert not gpu_direct.is_used
    chunk = share(gpu_direct)
    assert gpu_direct.is_used and [(kind, segment) for kind, segment in cards.registered] == [("direct", chunk.segment)]
    assert isinstance(chunk.segment, Shadow) and chunk.segment.nbytes == 3 * MIB
    assert regions.direct.fit(2 * MIB + 1) is None
    place = regions.direct.fit(2 * MIB)
    assert (place.segment, place.offset, place.address) == (chunk.index, 0, chunk.segment.address)
    assert regions.direct.fit(1) is None
    regions.direct.release(place, 2 * MIB)
    assert regions.direct.fit(MIB) == place
    assert regions.nbytes == 0  # none of it is memory of the host
    end = chunk.segment.address + 3 * MIB
    assert gpu_direct.holds(end - 1) and not gpu_direct.holds(end)


def test_which_partitions(gpu_direct):
    gpu_direct.expect(["a", "b"])
    whole = unit("a", "b")
    assert gpu_direct.why_staged(whole, part(1), me=0, n_local=1) == ""
    assert gpu_direct.why_staged(unit("a", "c"), part(1), me=0, n_local=1) is None  # c lies on the host
    assert gpu_direct.why_staged(whole, part(1), me=0, n_local=0) is None
    assert gpu_direct.why_staged(whole, part(0), me=0, n_local=1) == "this node sums it"
    assert "node 2, which sums it, is not reached by RDMA" in gpu_direct.why_staged(whole, part(2), me=0, n_local=1)
    assert "rdma_inline_bytes=100" in gpu_direct.why_staged(whole, part(1, 100), me=0, n_local=1)
    assert "several ranks" in gpu_direct.why_staged(whole, part(1), me=0, n_local=2)
    assert gpu_direct.why_staged(unit("a", islands=True), part(1), me=0, n_local=2) == ""
    coded = unit("a", codec=CodecSpec(kind="onebit"))
    assert "compressed" in gpu_direct.why_staged(coded, part(1), me=0, n_local=1)
    gpu_direct.forget(["a"])
    assert gpu_direct.why_staged(whole, part(1), me=0, n_local=1) is None


def test_a_link_that_was_cut_is_none(gpu_direct, links):
    gpu_direct.expect(["a"])
    links[1].fence()
    assert "not reached by RDMA" in gpu_direct.why_staged(unit("a"), part(1), me=0, n_local=1)


def test_a_link_over_which_a_device_is_reached_has_no_other_in_its_place(gpu_direct, links):
    chunk = share(gpu_direct)
    assert not gpu_direct.reaches(links[1]) and not gpu_direct.reaches(links[2])
    links[1].bound[7] = (chunk.segment.address, chunk.segment.address + 4096, 4096, 0, False)
    assert gpu_direct.reaches(links[1])


def test_what_is_told_and_counted(gpu_direct, caplog):
    share(gpu_direct)
    with caplog.at_level("INFO", "bpsfast.node"):
        for reason in ("", "this node sums it", "", "this node sums it", "this node sums it"):
            gpu_direct.count(unit("a"), reason)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "mlx5_0, mlx5_1 (GPUDirect, unproven" in said[0] and "this node sums it" in said[1]
    assert gpu_direct.counters() == {"partitions": 2, "staged_partitions": 3, "nbytes": 3 * MIB}


def test_refusals_leave_nothing(gpu_direct, cards, regions, tmp_path, monkeypatch):
    cards.refuses = "no room"
    with pytest.raises(CapacityError, match="no room"):
        share(gpu_direct)
    cards.refuses = ""
    with pytest.raises(UnsupportedError, match=r"BPSFAST_GPU_DIRECT is on, but the GPU at 0000:ff:00.0 is not among"):
        share(gpu_direct, gpu="0000:ff:00.0")
    cards.used = False
    with pytest.raises(UnsupportedError, match="reaches no other one by RDMA"):
        share(gpu_direct)
    cards.used = True
    assert not gpu_direct.is_used and regions.n_segments == 0
    share(gpu_direct, local_rank=1)
    with pytest.raises(ConfigError, match="local ranks 1 and 0 both want"):
        share(gpu_direct, local_rank=0)
