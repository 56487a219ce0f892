"""Who owns what: closing in order, using what is closed, forks with live objects, and nothing left behind."""
from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from tests.guest.verbs_end import End, connected, kernel_objects, until


def test_a_parent_does_not_close_under_its_children(verbs):
    device = verbs.Device("rxe0")
    domain = verbs.ProtectionDomain(device)
    with pytest.raises(BufferError, match="device rxe0 has 1 open"):
        device.close()
    region = verbs.MemoryRegion(domain, bytearray(4096))
    queue = verbs.CompletionQueue(device, 8)
    pair = verbs.QueuePair(domain, queue, queue, max_send=1, max_recv=1)
    assert (device.children, domain.children, queue.children) == (2, 2, 2)
    with pytest.raises(BufferError, match="protection domain of rxe0 has 2 open memory regions and queue pairs"):
        domain.close()
    with pytest.raises(BufferError, match="completion queue of rxe0 has 2 open"):
        queue.close()
    for each in (pair, region, queue, domain, device):
        each.close()
        each.close()
        assert each.closed
    assert (device.children, domain.children, queue.children) == (0, 0, 0)


def test_a_child_keeps_its_parents(verbs):
    domain = verbs.ProtectionDomain(verbs.Device("rxe0"))
    queue = verbs.CompletionQueue(domain.device, 8)
    pair = verbs.QueuePair(domain, queue, queue, max_send=1, max_recv=1)
    del domain, queue
    gc.collect()
    assert pair.state == "RESET" and not pair.domain.device.closed and not pair.send_cq.closed


def test_what_nobody_holds_is_released(verbs):
    gc.collect()
    before = kernel_objects()
    domain = verbs.ProtectionDomain(verbs.Device("rxe0"))
    queue = verbs.CompletionQueue(domain.device, 8, events=True)
    memory = bytearray(4096)
    region = verbs.MemoryRegion(domain, memory)
    pair = verbs.QueuePair(domain, queue, queue, max_send=1, max_recv=1)
    assert kernel_objects() != before
    del pair, region, queue, domain
    gc.collect()
    assert kernel_objects() == before
    memory.extend(b"x")


def test_what_is_closed_says_so(verbs):
    with End(verbs, "rxe0", events=True) as end:
        pass
    uses = [
        lambda: end.device.attributes, lambda: end.device.port(), lambda: end.device.gid(1, 0),
        lambda: end.device.events(), lambda: verbs.ProtectionDomain(end.device),
        lambda: verbs.CompletionQueue(end.device, 8), lambda: verbs.MemoryRegion(end.domain, bytearray(1)),
        lambda: verbs.QueuePair(end.domain, end.queue, end.queue, max_send=1, max_recv=1),
        lambda: end.queue.poll(), lambda: end.queue.wait(0), lambda: end.pair.state, lambda: end.pair.to_init(1),
        lambda: end.pair.to_error(), lambda: end.receive(), lambda: end.write(end),
        *(lambda each=each: each.handle for each in (end.device, end.domain, end.queue, end.region, end.pair)),
    ]
    for use in uses:
        with pytest.raises(ValueError, match="is closed"):
            use()


def test_memory_is_held_while_it_is_registered(verbs):
    memory = bytearray(4096)
    with verbs.Device("rxe0") as device, verbs.ProtectionDomain(device) as domain:
        with verbs.MemoryRegion(domain, memory):
            with pytest.raises(BufferError):
                memory.extend(b"x")
        memory.extend(b"x")


def test_a_queue_is_not_closed_while_a_thread_waits(verbs):
    with connected(verbs, events=True) as (left, right):
        waiter = threading.Thread(target=left.queue.wait, args=(60,))
        waiter.start()
        left.receive()

        def refused() -> bool:
            try:
                left.queue.close()
            except BufferError as exc:
                return "queue pairs" in str(exc) or "another thread" in str(exc)
            return False

        until(refused)
        right.write(left, immediate=1)
        waiter.join(30)
        assert not waiter.is_alive()


def test_closing_with_work_outstanding_frees_its_places(verbs):
    with connected(verbs) as (left, right):
        for _ in range(5):
            left.receive()
        left.write(right)
        assert left.queue.pending == 6
        left.pair.close()
        assert left.queue.pending == 0 and left.queue.poll() == [] and left.queue.children == 0


def test_a_forked_child_cannot_use_live_objects_nor_harm_them(verbs):
    with connected(verbs, events=True) as (left, right):
        left.bytes[:] = 1
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.alarm(60)
                refused = 0
                for use in (lambda: left.device.port(), lambda: left.queue.poll(), lambda: left.write(right),
                            lambda: left.pair.state, lambda: verbs.ProtectionDomain(left.device)):
                    try:
                        use()
                    except ValueError as exc:
                        refused += f"pid {os.getpid()}) was forked from" in str(exc)
                left.bytes[:] = 99  # our copy, or a page that is copied now
                left.close()
                right.close()
                gc.collect()
                with verbs.Device("rxe0") as device:  # opened anew it works
                    refused += device.port()["state"] == "ACTIVE"
                status = 0 if refused == 6 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        for i in range(3):
            right.receive()
            left.write(right, 4096, immediate=i)
            assert right.completions()[0][1:5] == (0, 129, 4096, i)
            left.completions()
        assert (right.bytes[:4096] == 1).all()


def test_a_child_that_ends_by_itself_harms_nothing(verbs):
    """Interpreters that end destroy what they hold: not what they inherited."""
    name = "native" if verbs.__name__.endswith("pyx.verbs") else "pyverbs"
    program = f"""
import os
from bpsfast.hardware.verbs import provider
from tests.guest.verbs_end import connected
with connected(provider({name!r})) as (left, right):
    pid = os.fork()
    if pid == 0:
        raise SystemExit(0)
    assert os.waitpid(pid, 0)[1] == 0
    left.write(right)
    assert left.completions()[0][1] == 0
    print("fine")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.returncode) == ("fine\n", 0), done.stderr


@pytest.mark.timeout(600)
def test_a_thousand_cycles_leave_nothing_behind(verbs):
    def cycle() -> None:
        with End(verbs, "rxe0", events=True, nbytes=4096):
            pass

    for _ in range(20):
        cycle()
    gc.collect()
    process = psutil.Process()
    objects, fds, threads = kernel_objects(), len(os.listdir("/proc/self/fd")), threading.active_count()
    resident = process.memory_info().rss
    for _ in range(1000):
        cycle()
    gc.collect()
    assert kernel_objects() == objects
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (fds, threads)
    assert process.memory_info().rss - resident < 4 << 20
