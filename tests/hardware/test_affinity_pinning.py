"""Binding of the threads of a real process to CPUs, and its undoing; each case in a process of its own."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.refused_calls import can_refuse

_CPUS = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(_CPUS) < 2, reason="needs two CPUs")
_PROLOGUE = f"""
import json, os, threading
from bpsfast.hardware.affinity.binding import ThreadBinding, unbound_cpus
from tests.support.refused_calls import refuse
a, b = {_CPUS[:2]}
end = threading.Event()
def start(*cpus):
    def run():
        if cpus:
            os.sched_setaffinity(0, cpus)
        begun.set()
        end.wait()
    begun = threading.Event()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    begun.wait()
    return thread.native_id
def where(*threads):
    return [sorted(os.sched_getaffinity(each)) for each in (0, *threads)]
"""


def told(program: str) -> tuple[Any, str]:
    """Run *program* after the prologue; return what its last line says, and what it logged."""
    done = subprocess.run([sys.executable, "-c", _PROLOGUE + program], capture_output=True, text=True, timeout=60,
                          check=True, cwd=Path(__file__).parents[2])
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_all_threads_but_those_that_somebody_has_bound() -> None:
    (pinned, before, undone), log = told("""
free, bound = start(), start(b)
os.sched_setaffinity(0, {a, b})
pins = ThreadBinding(frozenset({a}))
born = start()
pinned = where(free, bound, born)
before = sorted(unbound_cpus())
pins.undo()
pins.undo()
print(json.dumps([pinned, before, where(free, bound, born)]))
""")
    a, b = _CPUS[:2]
    assert pinned == [[a], [a], [b], [a]] and before == [a, b] and not log
    assert undone == [[a, b], [a, b], [b], [a, b]]


def test_never_more_than_it_might_use() -> None:
    (first, second, before), log = told("""
os.sched_setaffinity(0, {a})
wider = ThreadBinding(frozenset({a, b}))
first = where()
elsewhere = ThreadBinding(frozenset({b}))
print(json.dumps([first, where(), sorted(unbound_cpus())]))
""")
    a, b = _CPUS[:2]
    assert first == second == [[a]] and before == []
    assert f"sched_setaffinity(CPUs {b}) was refused: EINVAL" in log and f"stays on CPUs {a}" in log


def test_a_fork_keeps_its_parent_s_seat() -> None:
    status, _ = told("""
pins = ThreadBinding(frozenset({a}))
pid = os.fork()
if not pid:
    pins.undo()
    os._exit(os.sched_getaffinity(0) != {a})
print(os.waitpid(pid, 0)[1])
""")
    assert status == 0


@pytest.mark.slow
def test_a_node_that_a_seated_rank_starts_does_not_inherit_the_seat() -> None:
    found, _ = told("""
import bpsfast, psutil
pins = ThreadBinding(frozenset({a}))
bpsfast.init()
bpsfast.push_pull(__import__("numpy").ones(4, "f4"), name="x")
threads = [each.id for child in psutil.Process().children() for each in child.threads()]
print(json.dumps([where()[0], sorted(map(list, {tuple(cpus) for cpus in where(*threads)[1:]})), len(threads)]))
bpsfast.shutdown()
""")
    a, b = _CPUS[:2]
    assert found[0] == [a] and found[1] == [[a, b]] and found[2] > 4


@pytest.mark.skipif(not can_refuse(), reason="system calls of this machine are not known here")
def test_a_refusal_is_told_once_and_nothing_changes() -> None:
    found, log = told("""
before = where()
refuse("sched_setaffinity")
ThreadBinding(frozenset({a})).undo()
ThreadBinding(frozenset({b})).undo()
print(json.dumps(before == where() and not unbound_cpus()))
""")
    assert found is True and log.count("was refused") == 1
    assert "EPERM" in log and "--cap-add SYS_NICE" in log and "BPSFAST_NUMA=0" in log
