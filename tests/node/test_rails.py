"""Which rails a peer is reached by, on a recorded machine without devices: who comes late has only those in use."""
from __future__ import annotations

import pytest

from bpsfast.base.settings import Settings
from bpsfast.node.transport.rdma import NoRdmaError, Rails, rails as module

NEAR, FAR = "10.1.0.8:1", "10.2.0.8:1"  # by mlx5_0/1, by mlx5_1/1


class Opened:
    """A rail that is open, by name only."""

    def __init__(self, provider, chosen, *_):
        self.name, self.users = chosen.name, 0

    def close(self):
        pass


@pytest.fixture
def rails(recorded_machine, monkeypatch):
    monkeypatch.setattr(module, "Rail", Opened)
    monkeypatch.setattr(module, "provider", lambda name: None)
    made = Rails(Settings(), 0)
    made._host = recorded_machine("mlx5_roce").host
    yield made
    made.close()


def test_who_comes_late_is_reached_by_rails_in_use_only(rails):
    for users in (None, 0):
        with pytest.raises(NoRdmaError, match="no peer was reached by mlx5_0/1 when the job began, so"):
            rails.towards(NEAR, 2, opens=False)
        if users is None:
            assert not rails.used
            (rail,) = rails.towards(NEAR, 2)
    rail.users = 1
    assert rails.towards(NEAR, 2, opens=False) == [rail]
    with pytest.raises(NoRdmaError, match="no peer was reached by mlx5_1/1"):
        rails.towards(FAR, 2, opens=False)
    rails.settle()
    assert list(rails._open) == ["mlx5_0/1"]
