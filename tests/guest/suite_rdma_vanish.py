"""A device that vanishes under two nodes that use it, and what the next two nodes make of its absence.

Runs in the guest.
"""
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from bpsfast.node.link_changes import LinkChanges
from bpsfast.orchestration.errors import ConfigError
from bpsfast.pyx import verbs
from bpsfast.pyx.port import DONE
from tests.guest import spare_device
from tests.guest.verbs_end import kernel_objects, until
from tests.node.test_transport import push, settings_for
from tests.support.two_nodes import End, connect, declare, order_of

NBYTES = 5000


@pytest.fixture
def spare():
    with spare_device.spare_device(mtu=4200, address="10.9.0.9/24") as name:
        until(lambda: "ACTIVE" in Path(f"/sys/class/infiniband/{name}/ports/1/state").read_text())
        yield name


def meet(kind: str, device: str, **changes: object) -> list[End]:
    made = [End(index, settings_for(kind, allow_shm=False, rdma_devices=f"={name}", **changes))
            for index, name in enumerate(("rxe0", device))]
    connect(made)
    return made


def agree(kind: str, device: str, **changes: object) -> list[End]:
    """Return two nodes with one partition, which node 0 owns, over *device* on node 1."""
    made = meet(kind, device, **changes)
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
        assert made[1].runtime.who(source) == ("node 0", 0)
        words = made[1].runtime.why_lost(0, code)
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


def lose_the_device_and_close(name: str) -> None:
    """Be the process whose device is taken away under two nodes; say what they know of it, and that all is closed."""
    def counts() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    for end in agree("rdma", "rxe1", verbs=name):  # what is loaded at first stays
        end.close()
    before = counts()
    made = agree("rdma", "rxe1", verbs=name)
    places = [end.allocate(NBYTES) for end in made]
    add_up(made, places, 1)
    [rail] = made[1].runtime.rails._open.values()
    spare_device.take_away(rail.device)
    push(made[1], 0, 2, places[1], b"\2" * NBYTES)
    print(made[1].runtime.why_lost(0, made[1].lost.get(timeout=60)[1]))
    rail = None
    places.clear()
    for end in made:
        end.close()
    made.clear()
    until(lambda: counts() == before)
    print("closed", flush=True)


def test_nodes_whose_device_the_kernel_has_taken_away_close(verbs):
    objects = kernel_objects()
    name = "native" if verbs.__name__.endswith("pyx.verbs") else "pyverbs"
    program = f"from tests.guest.suite_rdma_vanish import *; lose_the_device_and_close({name!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    words, last = done.stdout.splitlines()
    refused = f"RDMA WRITE of partition 0 (round 2, {NBYTES} bytes) to node 0 over rxe1/1 was refused: EIO"
    unread = "the completions of rxe1/1 can no longer be read (Input/output error)"  # whichever thread meets it first
    assert refused in words or unread in words, words
    assert words.endswith("this machine's port is gone with its device now"), words
    assert last == "closed" and done.stderr == ""
    assert kernel_objects() == objects  # rxe's own stay while the process has them mapped


@pytest.mark.parametrize("kind", ["auto", "rdma"])
def test_a_peer_that_does_not_part_with_its_link_is_lost_after_all(kind, no_leaks):
    made = agree(kind, "rxe1")
    end, lost, fenced = made[0], [], []
    settings = msgspec.structs.replace(end.settings, start_timeout_s=1.0)
    changes = LinkChanges(settings, end.loop, end.runtime, end.peering, lambda work: work(), lambda link: None,
                          lambda: False, fenced.append, lambda index, reason: lost.append((index, reason)))
    link = end.runtime.links[1]
    assert changes.begin(1, "a test")
    assert changes.begin(1, "its other streams say so, too")
    assert fenced == [1] and end.runtime.rails.used, "the port may come back"
    assert changes.channel_ended(link), "the peer may have changed over"
    while not lost:
        end.loop.run_once(0.1)
    assert lost == [(1, "a test; and there was no other link within 1 s")]
    for each in made:
        each.close()
