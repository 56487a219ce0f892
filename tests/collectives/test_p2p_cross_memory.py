"""Which processes may read a rank's memory where Yama restricts that: descendants of an ancestor that ranks share."""
from __future__ import annotations

import ctypes
import os

import pytest

from bpsfast.collectives.p2p import cross_memory

#: Parents by process: a launcher 10 with two ranks, one of them in a shell; another user's login.
PARENTS = {10: 5, 11: 10, 12: 10, 13: 12, 5: 1, 20: 1, 21: 20}


@pytest.fixture
def proc(tmp_path):
    for pid, parent in PARENTS.items():
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) name (of S) S {parent} 1 1 0 -1")
    return tmp_path


@pytest.mark.parametrize(("one", "other", "common"), [
    (11, 13, 10), (13, 11, 10), (12, 13, 12), (11, 11, 11), (10, 13, 10), (11, 21, 0), (11, 99, 0), (99, 11, 0),
])
def test_the_nearest_common_ancestor(proc, one, other, common):
    assert cross_memory.common_ancestor(one, other, proc) == common


@pytest.mark.filterwarnings("ignore:os.fork")  # JAX, if it is installed, warns of forks
def test_of_real_processes():
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        assert cross_memory.common_ancestor(child, os.getpid()) == os.getpid()
    finally:
        os.waitpid(child, 0)


class _Prctl:
    def __init__(self):
        self.told = []

    def prctl(self, option, value, *zeros):
        assert option == 0x59616D61 and zeros == (0, 0, 0)
        self.told.append(value.value)


@pytest.mark.parametrize(("scope", "told"), [
    ("1", [10, 10, ctypes.c_ulong(-1).value, ctypes.c_ulong(-1).value]), ("0", []), ("2", []), (None, [])])
def test_the_kernel_is_told_as_little_as_lets_all_ranks_read(proc, tmp_path, monkeypatch, scope, told):
    yama, libc = tmp_path / "ptrace_scope", _Prctl()
    if scope is not None:
        yama.write_text(scope + "\n")
    find = cross_memory.common_ancestor
    monkeypatch.setattr(cross_memory, "_YAMA", yama)
    monkeypatch.setattr(cross_memory, "_libc", libc)
    monkeypatch.setattr(cross_memory, "_reader", -1)
    monkeypatch.setattr(os, "getpid", lambda: 11)
    monkeypatch.setattr(cross_memory, "common_ancestor", lambda one, other: find(one, other, proc))
    for pid in (13, 12, 0, 21, 13):
        cross_memory.let_read(pid)
    assert libc.told == told
