"""The contestants of a bench: which process gets which variables."""
from __future__ import annotations

import pytest

from bpsfast.base import settings
from bpsfast.bench.harness import launcher
from bpsfast.launch import local_job as launch


@pytest.mark.parametrize("node_id", ["", "mine"])
def test_variables_of_a_machine_reach_its_processes(node_id):
    shape = launch.shape_of(3, 2, 1)
    more = {name: {"BPSFAST_NIC_RATE": name} for name in shape.machines}
    commands = launch.plan(shape, ["true"], settings.load({"node_id": node_id} if node_id else {}, {}), {},
                           ("127.0.0.1", 99), "ab" * 32)
    found = {command.name: launcher.added(command, shape, more).get("BPSFAST_NIC_RATE") for command in commands}
    assert found == {"scheduler": None, "node 0": "node0", "node 1": "node1", "helper 0": "helper0",
                     "rank 0": "node0", "rank 1": "node0", "rank 2": "node1"}
