"""What goes wrong with RDMA between two nodes, in words: ports, GIDs, limits, and who goes on by tcp.

Runs in the guest.
"""
from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bpsfast.base.settings import Settings
from bpsfast.orchestration.errors import ConfigError
from tests.support.two_nodes import End, connect


def settings_for(kind: str, **changes: object) -> Settings:
    return Settings(transport=kind, start_timeout_s=40.0, engine_threads=1, huge_pages="off", allow_shm=False,
                    **changes)


@contextlib.contextmanager
def port_down(netdev: str) -> Iterator[None]:
    subprocess.run(["ip", "link", "set", netdev, "down"], check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "set", netdev, "up"], check=True)
        number = int(netdev.removeprefix("roce"))
        while "ACTIVE" not in Path(f"/sys/class/infiniband/rxe{number}/ports/1/state").read_text():
            os.sched_yield()


def attempt(kind: str, *shapes: dict[str, object]) -> list[End]:
    made = [End(index, settings_for(kind, **shape)) for index, shape in enumerate(shapes)]
    connect(made)
    return made


def close_all(made: list[End]) -> None:
    for end in made:
        end.close()


WRONG = {
    "an empty row on the dialler": ({"rdma_devices": "=rxe0"}, {"rdma_devices": "=rxe1", "rdma_gid_index": 77},
                                    "rdma_gid_index=77 is an empty row of the GID table of rxe1/1; there is 0 \\("),
    "an empty row on the acceptor": ({"rdma_devices": "=rxe0", "rdma_gid_index": 77}, {"rdma_devices": "=rxe1"},
                                     "rdma_gid_index=77 is an empty row of the GID table of rxe0/1; there is 0 \\("),
    "a partition that the port is not in": (
        {"rdma_devices": "=rxe0"}, {"rdma_devices": "=rxe1", "rdma_pkey": 0x8005},
        r"rxe1/1 is not in the partition 0x8005 \(BPSFAST_RDMA_PKEY\): its table has 0xffff"),
    "no such device": ({"rdma_devices": "=rxe0"}, {"rdma_devices": "mlx5"},
                       "rdma_devices='mlx5': mlx5 matches nothing here; there is rxe0:1, rxe1:1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_setting_that_cannot_be_ends_in_tcp_with_its_words_on_both_sides(case, no_leaks):
    left, right, words = WRONG[case]
    made = attempt("auto", left, right)
    assert [end.peering.links[1 - end.index].kind for end in made] == ["tcp", "tcp"]
    told = made[1].peering.describe()["node 0"]
    assert "no rdma: " in told
    assert re.search(words, told), told
    if case == "an empty row on the acceptor":
        assert re.search(words, made[0].peering.describe()["node 1"])
        assert "node 0 reports: " in told
    close_all(made)


def test_explicit_rdma_is_an_error_on_both_sides(no_leaks):
    made = attempt("rdma", {"rdma_devices": "=rxe0", "rdma_gid_index": 77}, {"rdma_devices": "=rxe1"})
    for end in made:
        assert isinstance(end.peering.error, ConfigError)
        assert f"transport='rdma' was asked for, but node {1 - end.index} (here) cannot be reached" in str(
            end.peering.error)
        assert "rdma_gid_index=77 is an empty row" in str(end.peering.error)
        assert not end.peering.links
    close_all(made)


def test_a_port_that_is_down_is_named(no_leaks):
    with port_down("roce1"):
        made = attempt("auto", {"rdma_devices": "=rxe0"}, {"rdma_devices": "=rxe1"})
        assert made[1].peering.links[0].kind == "tcp"
        assert "rxe1/1: the port is DOWN" in made[1].peering.describe()["node 0"]
        close_all(made)


def test_a_path_that_carries_nothing_is_found_by_the_proof(no_leaks):
    subprocess.run(["ip", "link", "set", "p1", "nomaster"], check=True)  # the bridge's end: both ports stay up
    try:
        made = attempt("auto", {"rdma_devices": "=rxe0"}, {"rdma_devices": "=rxe1"})
        for end in made:
            assert end.peering.links[1 - end.index].kind == "tcp"
            told = end.peering.describe()[f"node {1 - end.index}"]
            assert "no rdma: " in told and ("a first write did not pass" in told or "cannot be reached" in told), told
        close_all(made)
    finally:
        subprocess.run(["ip", "link", "set", "p1", "master", "br0"], check=True)


LIMITED = """
import ctypes, json, resource, sys
limit = int(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, data) == 0
for i in (0, 1):  # effective and permitted of the low half: without CAP_IPC_LOCK
    data[i] &= ~(1 << 14)
assert libc.capset(header, data) == 0
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
from bpsfast.node.regions import MIN_SEGMENT_NBYTES, Regions
from bpsfast.orchestration.errors import CapacityError
from bpsfast.pyx.pages import Segment
from bpsfast.base.settings import Settings
from bpsfast.node.transport.rdma import NoRdmaError, Rails
rails = Rails(Settings(rdma_devices="rxe"), 3 * MIN_SEGMENT_NBYTES)
said = []
try:
    for route in rails.towards(None, 1):
        route.rail.join()
    regions = Regions()
    regions.register_with(rails)
    regions.slots.allocate(MIN_SEGMENT_NBYTES)
    try:
        regions.slots.allocate(1 << 24)
    except CapacityError as exc:
        said.append(str(exc))
    with Segment(1 << 24, huge=False) as segment:  # past our own look: the kernel's refusal
        try:
            rails.register("slot", segment)
        except CapacityError as exc:
            said.append(str(exc))
    said.append(json.dumps(rails.counters()))
except NoRdmaError as exc:
    said.append(str(exc))
rails.close()
print(json.dumps(said))
"""


def limited(limit: int) -> list[str]:
    done = subprocess.run([sys.executable, "-c", LIMITED, str(limit)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_64_kib_of_locked_memory_are_found_too_few_before_anything_is_connected():
    [said] = limited(64 << 10)
    assert said.startswith("a node needs 6291456 bytes of locked memory for RDMA, but memlock=65536 leaves "
                           "65536: `ulimit -l unlimited`")


def test_a_segment_that_is_too_much_is_refused_in_words_by_us_and_by_the_kernel():
    budget, kernel, counters = limited(16 << 20)
    assert "needs 33554432 bytes of locked memory for RDMA (16777216 bytes x 2 devices), but memlock=16777216 leaves " \
           "12582912" in budget
    assert kernel.startswith("a segment of 16777216 bytes for slots cannot be registered for RDMA beside 2097152 bytes")
    assert "ibv_reg_mr(rxe" in kernel and "ulimit -l unlimited" in kernel
    assert json.loads(counters)["registrations"] == 2  # the first segment, on each of two devices, and no other
