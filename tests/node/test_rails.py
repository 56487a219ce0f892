"""Which rails a peer is reached by, on a recorded machine without devices: a node that joins late uses only open ones.

How long the completion queue of a rail is for the streams over it.
"""
from __future__ import annotations

import contextlib
import errno
from types import SimpleNamespace

import pytest

from bpsfast.base.settings import Settings
from bpsfast.node.transport.rdma import NoRdmaError, Rails, rails as module
from bpsfast.orchestration.errors import CapacityError

#: By mlx5_0/1; by mlx5_1/1; by the same port and another of its addresses.
NEAR, FAR, SIDE = "10.1.0.8:1", "10.2.0.8:1", "10.3.0.8:1"


class Opened:
    """A rail that is open, by name only."""

    def __init__(self, provider, chosen, *_):
        self.name, self.users, self.is_gone, self.is_closed = chosen.name, 0, False, False
        self.device_name, self.port_number, self.port = chosen.device, chosen.port, {"lid": 1}
        self.device = SimpleNamespace(port=lambda number: {"lid": 2})

    def close(self):
        self.is_closed = True


@pytest.fixture
def rails(recorded_machine, monkeypatch):
    monkeypatch.setattr(module, "Rail", Opened)
    monkeypatch.setattr(module, "provider", lambda name: None)
    made = Rails(Settings(), 0)
    machine = recorded_machine("mlx5_roce")
    port = "sys/class/infiniband/mlx5_1/ports/1"
    machine.write(f"{port}/gids/4", "0000:0000:0000:0000:0000:ffff:0a03:0007")
    machine.write(f"{port}/gid_attrs/types/4", "RoCE v2").write(f"{port}/gid_attrs/ndevs/4", "eth3")
    machine.answer(routes=machine.answers["routes"] | {"10.3.0.8": {"netdev": "eth3", "source": "10.3.0.7"}})
    made._host = machine.host
    made._read_host = lambda: machine.host
    yield made
    made.close()


def test_who_comes_late_is_reached_by_open_rails_only(rails):
    with pytest.raises(NoRdmaError, match="no peer was reached by mlx5_0/1, mlx5_1/1 when the job began, so"):
        rails.towards(NEAR, 2, opens=False)
    assert not rails.used
    near, far = rails.towards(NEAR, 2)
    assert rails.towards(NEAR, 2, opens=False) == [near, far]
    near.rail.users = 1
    rails.settle()
    assert list(rails._open) == ["mlx5_0/1"] and far.rail.is_closed
    assert [each.rail for each in rails.towards(FAR, 2, opens=False)] == [near.rail]


def test_a_port_has_a_gid_for_each_peer(rails):
    """Each of two peers in two subnets of one port is reached from the address in its own subnet."""
    found = [rails.towards(peer, 2)[0] for peer in (FAR, SIDE)]
    assert found[0].rail is found[1].rail
    assert [str(each.chosen.gid.address) for each in found] == ["10.2.0.7", "10.3.0.7"]


def test_a_peer_is_reached_again_by_the_rails_that_led_there_and_can_be_used(rails, recorded_machine):
    rails.towards(NEAR, 2)
    both = ("mlx5_0/1", "mlx5_1/1")
    again = rails.towards_again(NEAR, both)
    assert [each.name for each in again] == list(both) and {each.port["lid"] for each in again} == {2}, "looked at anew"
    assert [each.name for each in rails.towards_again(NEAR, both[1:])] == ["mlx5_1/1"]
    down = recorded_machine("mlx5_roce").write("sys/class/infiniband/mlx5_0/ports/1/state", "1: DOWN")
    rails._read_host, rails._read_at = lambda: down.host, float("-inf")
    assert [each.name for each in rails.towards_again(NEAR, both)] == ["mlx5_1/1"]
    with pytest.raises(NoRdmaError, match="mlx5_0/1: the port is DOWN"):
        rails.towards_again(NEAR, both[:1])
    rails.close()
    with pytest.raises(NoRdmaError, match="mlx5_0/1 are closed: their devices are gone"):
        rails.towards_again(NEAR, both[:1])


def test_a_rail_whose_streams_failed_waits_for_its_port_and_is_closed_when_its_device_is_gone(rails):
    near, far = rails.towards(NEAR, 2)
    rails.close_gone()
    assert list(rails._open) == [near.name, far.name]
    near.rail.is_gone, near.rail.users = True, 1
    rails.close_gone()
    assert near.name in rails._open, "its streams are closed first"
    near.rail.users = 0
    rails.close_gone()
    assert list(rails._open) == [far.name] and near.rail.is_closed and not far.rail.is_closed


EACH = 128 + module.RECEIVES


class Opening:
    """A verbs object, which enters as itself."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


class Device(Opening):
    """A device whose completion queues grow up to *most*; `drains`: whether the thread of its rail is quick."""

    def __init__(self):
        self.attributes = {"max_qp": 1000, "max_qp_wr": 10_000, "max_cqe": 5 * EACH}
        self.completion_vectors = 4
        self.most, self.drains, self.n_drains = 5 * EACH, True, 0

    def port(self, number):
        return {"active_mtu": 4096, "lid": 0}


class Queue(Opening):
    handle = 0

    def __init__(self, device, depth, **_):
        self.device, self.depth = device, depth

    def resize(self, depth):
        if depth > self.device.most:
            raise OSError(errno.ENOSYS, "ibv_resize_cq(mlx5_0): ENOSYS: Function not implemented")
        self.depth = depth


@pytest.fixture
def device():
    return Device()


@pytest.fixture
def rail(device, monkeypatch):
    """A rail that was opened for two peers."""
    def drain(timeout_s):
        device.n_drains += 1
        return device.drains

    monkeypatch.setattr(module.native, "Rail", lambda *_, **__: SimpleNamespace(drain=drain, close=lambda: None))
    verbs = SimpleNamespace(Device=lambda name: device, ProtectionDomain=contextlib.nullcontext,
                            CompletionQueue=Queue)
    chosen = module.rdma_route.Rail("mlx5_0", 1, None, None, "")
    with contextlib.closing(module.Rail(verbs, chosen, 2, Settings())) as made:
        yield made


def test_the_queue_has_room_for_the_peers_of_the_start_and_grows_for_late_ones(rail, device):
    for n in range(1, 6):
        rail.join()
        assert rail.queue.depth == max(2, n) * EACH and rail.users == n
    with pytest.raises(CapacityError, match=rf"128 sends and 1024 receives each of 6 queue pairs need .* of {6 * EACH};"
                                            rf" it has {5 * EACH}, the device allows max_cqe={5 * EACH} "):
        rail.join()
    assert rail.users == 5 and device.n_drains == 0


def test_a_device_that_cannot_resize_queues_takes_no_late_peer(rail, device):
    device.most = 0
    rail.join()
    rail.join()
    with pytest.raises(CapacityError, match=r"mlx5_0/1 has no room for one more queue pair.*ENOSYS"):
        rail.join()


def test_a_closed_stream_gives_its_room_back_once_its_completions_are_taken(rail, device):
    for _ in range(2):
        rail.join()
    for _ in range(2):
        rail.leave()
        rail.join()
    assert rail.queue.depth == 2 * EACH and device.n_drains == 2
    device.drains = False
    rail.leave()
    rail.join()
    assert rail.queue.depth == 3 * EACH, "its completions may still come, so they have a place"
