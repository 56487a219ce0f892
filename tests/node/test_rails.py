"""Which rails a peer is reached by, on a recorded machine without devices: who comes late has only those in use."""
from __future__ import annotations

from types import SimpleNamespace

import pytest

from bpsfast.base.settings import Settings
from bpsfast.node.transport.rdma import NoRdmaError, Rails, rails as module

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
    with pytest.raises(NoRdmaError, match="no peer was reached by mlx5_0/1 when the job began, so"):
        rails.towards(NEAR, 2, opens=False)
    assert not rails.used
    [near] = rails.towards(NEAR, 2)
    assert rails.towards(NEAR, 2, opens=False) == [near]
    with pytest.raises(NoRdmaError, match="no peer was reached by mlx5_1/1"):
        rails.towards(FAR, 2, opens=False)
    rails.towards(FAR, 2)
    near.rail.users = 1
    rails.settle()
    assert list(rails._open) == ["mlx5_0/1"]


def test_a_port_has_a_gid_for_each_peer(rails):
    """Two peers in two subnets of one port: whoever is reached first does not choose for the other."""
    found = [rails.towards(peer, 2)[0] for peer in (FAR, SIDE)]
    assert found[0].rail is found[1].rail
    assert [str(each.chosen.gid.address) for each in found] == ["10.2.0.7", "10.3.0.7"]


def test_a_peer_is_reached_again_by_the_rails_that_led_there_and_can_be_used(rails, recorded_machine):
    for peer in (NEAR, FAR):
        rails.towards(peer, 2)
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
    [near] = rails.towards(NEAR, 2)
    rails.close_gone()
    assert rails.used
    near.rail.is_gone, near.rail.users = True, 1
    rails.close_gone()
    assert rails.used, "its streams are closed first"
    near.rail.users = 0
    rails.close_gone()
    assert not rails.used and near.rail.is_closed
