"""Segments on a NUMA node: the kernel's policy, and the thread that makes a segment where mbind is refused."""
from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bpsfast.hardware import numa
from bpsfast.hardware.affinity import binding
from bpsfast.hardware.affinity.binding import NumaMemory
from bpsfast.hardware.sysfs import Tree
from bpsfast.pyx import pages
from bpsfast.pyx.pages import Segment
from tests.support.refused_calls import can_refuse

_CPU = min(os.sched_getaffinity(0))
_NODE = min(numa.nodes_of({_CPU}, numa.nodes(Tree())), default=-1)
_NOWHERE = 1023
binds = pytest.mark.skipif(_NODE < 0 or pages.bind_errno(_NODE) != 0, reason="mbind is refused here")


def policy(address: int) -> tuple[int, int]:
    """What get_mempolicy(MPOL_F_ADDR) says of *address*: the mode (1: preferred), and nodes as a mask."""
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    rc = ctypes.CDLL(None).syscall(number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_ulong(address), 2)
    assert rc == 0
    return mode.value, mask[0]


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was refused in this process yet."""
    monkeypatch.setattr(binding, "_warned", [])


@binds
@pytest.mark.parametrize("huge", [False, True])
def test_a_segment_prefers_its_home(huge: bool) -> None:
    with NumaMemory({}).segment(_NODE, 4 << 20, huge=huge) as bound, NumaMemory({}).segment(None, 4096) as anywhere:
        assert policy(bound.address) == policy(bound.address + (4 << 20) - 1) == (1, 1 << _NODE)
        assert policy(anywhere.address)[0] == 0
        with Segment.attach(os.dup(bound.fileno()), writable=True) as mapped:
            assert policy(mapped.address) == (1, 1 << _NODE), "whoever maps it"
        assert not any(memoryview(bound)[::4096])


def test_a_node_that_does_not_exist_is_refused_and_costs_nothing() -> None:
    assert pages.bind_errno(_NOWHERE) in (errno.EINVAL, errno.EPERM, errno.ENOSYS)
    assert pages.bind_errno(5000) in (errno.EINVAL, errno.EPERM, errno.ENOSYS)
    with Segment(4096, node=_NOWHERE) as segment:
        assert segment.nbytes == 4096


def test_where_binding_is_refused_the_segment_is_made_at_home(
        untold: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    made_on = []

    def recording(nbytes: int, **options: bool) -> Segment:
        made_on.append(os.sched_getaffinity(0))
        return Segment(nbytes, **options)

    monkeypatch.setattr(binding, "Segment", recording)
    before = os.sched_getaffinity(0)
    makes = NumaMemory({_NOWHERE: frozenset({_CPU})})
    for _ in range(2):
        makes.segment(_NOWHERE, 4096).close()
    assert made_on == [{_CPU}] * 2 and os.sched_getaffinity(0) == before
    assert len(caplog.records) == 1
    assert "mbind(MPOL_PREFERRED, node 1023) was refused" in caplog.text and "who touches it first" in caplog.text


def test_where_that_cannot_be_either_it_is_made_anywhere(untold: None, caplog: pytest.LogCaptureFixture) -> None:
    makes = NumaMemory({_NOWHERE: frozenset({8191})})
    for _ in range(2):
        makes.segment(_NOWHERE, 4096).close()
    NumaMemory({}).segment(_NOWHERE, 4096).close()
    assert len(caplog.records) == 1, "one warning in a process"


@binds
@pytest.mark.skipif(not can_refuse(), reason="system calls of this machine are not known here")
def test_a_container_that_refuses_mbind(tmp_path: Path) -> None:
    program = f"""
from bpsfast.hardware.affinity.binding import NumaMemory
from tests.support.refused_calls import refuse
refuse("mbind")
makes = NumaMemory({{{_NODE}: frozenset({{{_CPU}}})}})
for _ in range(3):
    with makes.segment({_NODE}, 1 << 20) as segment:
        memoryview(segment)[:4] = b"here"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True,
                          cwd=Path(__file__).parents[2])
    assert done.stderr.count("was refused") == 1
    assert f"mbind(MPOL_PREFERRED, node {_NODE}) was refused: EPERM" in done.stderr
