"""A device that vanishes under two nodes that use it, and what the next two nodes make of its absence.

Runs in the guest.
"""
from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import verbs
from bpsfast.pyx.port import DONE
from tests.guest import spare_device
from tests.guest.verbs_end import until
from tests.test_transport import push, settings_for
from tests.two_nodes import End, connect, declare, order_of

NBYTES = 5000


@pytest.fixture
def spare():
    with spare_device.spare_device(mtu=4200, address="10.9.0.9/24") as name:
        until(lambda: "ACTIVE" in Path(f"/sys/class/infiniband/{name}/ports/1/state").read_text())
        yield name


def meet(kind: str, device: str) -> list[End]:
    made = [End(index, settings_for(kind, allow_shm=False, rdma_devices=f"={name}"))
            for index, name in enumerate(("rxe0", device))]
    connect(made)
    return made


def agree(kind: str, device: str) -> list[End]:
    """Return two nodes with one partition, which node 0 owns, over *device* on node 1."""
    made = meet(kind, device)
    for end in made:
        assert end.peering.error is None, end.peering.error
        assert end.peering.links[1 - end.index].kind == "rdma"
        end.finish()
    plan = declare(made, [NBYTES], [0])
    for end in made:
        end.commit(order_of(plan))
    return made


def add_up(made: list[End], places: list[tuple], round_: int) -> None:
    for end, place in zip(made, places):
        push(end, 0, round_, place, bytes([round_]) * NBYTES)
    for end in made:
        assert end.port.wait(0, 1, round_, 20.0) == DONE
        assert end.result(0, round_) == bytes([2 * round_]) * NBYTES


def test_removing_the_driver_waits_for_the_nodes_which_finish_their_work(spare, no_leaks):
    made = agree("rdma", spare)
    places = [end.allocate(NBYTES) for end in made]
    add_up(made, places, 1)
    removal = subprocess.Popen(spare_device.REMOVE_DRIVER)
    try:
        until(lambda: spare not in verbs.devices())
        add_up(made, places, 2)
        assert removal.poll() is None
        places.clear()
        for end in made:
            end.close()
        assert removal.wait(60) == 0
    finally:
        removal.kill()
        removal.wait(10)


@pytest.mark.parametrize("kind", ["rdma", "auto"])
def test_a_card_that_is_pulled_out_under_writes_is_named_and_the_next_job_knows(kind, spare, no_leaks):
    made = agree(kind, spare)
    places = [end.allocate(NBYTES) for end in made]
    add_up(made, places, 1)
    pulled = subprocess.Popen(spare_device.PULL_OUT)
    try:
        until(lambda: spare not in verbs.devices())
        push(made[1], 0, 2, places[1], b"\2" * NBYTES)
        source, code = made[1].lost.get(timeout=60)
        assert made[1].vertex.who(source) == ("node 0", 0)
        words = made[1].vertex.why_lost(0, code)
        assert f"RDMA WRITE of partition 0 (round 2, {NBYTES} bytes) to node 0 over {spare}/1 failed" in words, words
        places.clear()
        for end in made:
            end.close()
        assert pulled.wait(60) == 0
    finally:
        pulled.kill()
        pulled.wait(10)
    made = meet(kind, spare)
    words = f"rdma_devices='={spare}': ={spare} matches nothing here; there is rxe0:1, rxe1:1"
    if kind == "auto":
        assert made[1].peering.links[0].kind == "tcp"
        assert f"no rdma: {words}" in made[1].peering.describe()["node 0"], made[1].peering.describe()
    else:
        assert isinstance(made[1].peering.error, ConfigError) and words in str(made[1].peering.error)
    for end in made:
        end.close()
