"""A machine with the GPUs of a job's ranks only."""
from __future__ import annotations

import pytest

from bpsfast.hardware.topology.graph import PartKind, of_host, with_gpus
from bpsfast.hardware.topology.strategy_solver import choose
from tests.support.gpu_machines import dgx1


def test_other_gpus_are_gone_with_their_links() -> None:
    whole = dgx1()
    used = with_gpus(whole, ["gpu1", "gpu4"])
    assert [part.name for part in used.of(PartKind.GPU)] == ["gpu1", "gpu4"]
    assert len(used.links) == len(whole.links) - sum(
        bool({f"gpu{i}" for i in (0, 2, 3, 5, 6, 7)} & {link.a, link.b}) for link in whole.links)
    assert with_gpus(whole, [part.name for part in whole.of(PartKind.GPU)]) == whole
    choose(used)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_ranks_of_the_host_are_devices_below_one_switch(n: int) -> None:
    machine = of_host(n)
    assert [part.name for part in machine.of(PartKind.GPU)] == [f"gpu{i}" for i in range(n)]
    assert {len(machine.path(part.name, "socket0")) for part in machine.of(PartKind.GPU)} == {2}
