"""Joining, waiting, leaving: the life of a session on real ranks."""
from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.trainer import process


@pytest.fixture
def pair(shared_job):
    return shared_job(ranks=(2, 1), transport="tcp")


def total(name="x"):
    return float(bpsfast.push_pull(np.ones(1000), False, name)[0])


# -- joining -------------------------------------------------------------------------------------------------------


def place():
    return bpsfast.rank(), bpsfast.size(), bpsfast.local_rank(), bpsfast.local_size()


def test_places(pair):
    assert pair.run(place) == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]


def twice():
    before = process.current()
    bpsfast.init()
    return process.current() is before


def test_a_second_init_changes_nothing(pair):
    assert pair.run(twice) == [True] * 3


def told():
    return bpsfast.counters()


def test_stats_are_the_nodes_counters(pair):
    pair.run(total, "counted")
    for counters in pair.run(told):
        assert counters and all(isinstance(value, int) for value in counters.values())


def one_process(script, timeout_s=60, **variables):
    """Run *script* as a program of its own; return (exit code, output)."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("BPSFAST_")}
    done = subprocess.run([sys.executable, "-c", script], env=environ | variables, capture_output=True, text=True,
                          timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr


def test_one_process_is_a_job():
    code, output = one_process("import bpsfast, numpy as np; bpsfast.init()\n"
                               "print(bpsfast.size(), bpsfast.push_pull(np.arange(3.), name='x').tolist())")
    assert (code, output.strip()) == (0, "1 [0.0, 1.0, 2.0]")


KILLS_ITS_NODE = """
import os, bpsfast, numpy as np
from bpsfast.trainer import process
bpsfast.init()
os.kill(process._watch.daemons.node.pid, 9)
while True:
    bpsfast.push_pull(np.ones(9), name="x")
"""


def test_who_started_the_node_says_how_it_ended():
    code, output = one_process(KILLS_ITS_NODE)
    assert code == 1 and "is lost: the node (pid" in output and "was killed by SIGKILL" in output


CYCLES = """
import ctypes, os, threading, gc, sys
import numpy as np, bpsfast
libc = ctypes.CDLL(None)
def cycle(pushes):
    bpsfast.init(heartbeat_s=0.2)
    if pushes:
        x = bpsfast.empty(1000)
        bpsfast.push_pull(x, name="x")
        bpsfast.push_pull(np.ones(2_000_000, "f4"), name="y")
        bpsfast.broadcast(np.ones(3), 0)
        del x
    bpsfast.shutdown()
def counts():
    gc.collect()
    libc.malloc_trim(0)  # libc keeps up to twice the largest array that was ever freed, or does not: by where it lay
    rss = int(open("/proc/self/statm").read().split()[1]) * 4096
    named = [len(line.split()) > 5 and not line.split()[5].startswith("[") for line in open("/proc/self/maps")]
    return len(os.listdir("/proc/self/fd")), threading.active_count(), sum(named), len(named) - sum(named), rss
for _ in range(3): cycle(True)
before = counts()
for number in range(int(sys.argv[1])): cycle(number % 10 == 0)
after = counts()
print(before, after)
assert after[:3] == before[:3], (before, after)
# what has no name: libc keeps stacks and heaps of threads that overlapped, two mappings each
assert after[3] <= before[3] + 16 and after[4] <= before[4] + (4 << 20), (before, after)
assert sys.excepthook is sys.__excepthook__
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cycles_of_init_and_shutdown_leave_nothing(takes_all):
    n_cycles = "200" if takes_all else "40"
    done = subprocess.run([sys.executable, "-c", CYCLES, n_cycles], capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_wrong_port_ends_in_time(job):
    started = job(ranks=(1,), attach=False, start_timeout_s=2.0)
    started.kill_daemon("scheduler")
    begin = time.monotonic()
    started.begin(bare_init)
    [outcome] = started.outcomes(timeout_s=30)
    assert outcome.error in ("StallError", "PeerLostError") and "scheduler" in outcome.text
    assert time.monotonic() - begin < 12
    started.kill()


def bare_init():
    bpsfast.init()


def test_a_missing_rank_is_named(job):
    started = job(ranks=(2,), attach=False, start_timeout_s=2.0)
    started.begin(bare_init, only=(0,))
    [outcome] = started.outcomes(timeout_s=30, only=(0,))
    assert outcome.error == "StallError" and "local rank 1" in outcome.text
    started.kill()


def test_a_rank_without_a_node_hears_that_nobody_is_at_the_schedulers_address(job):
    started = job(ranks=(1,), attach=False, start_timeout_s=1.0)
    for name in ("scheduler", "node 0"):
        started.kill_daemon(name)
    [outcome] = started.attempt(bare_init)
    assert outcome.error == "StallError" and "no node of this job listened" in outcome.text
    assert "Nobody answers at the scheduler's address 127.0.0.1:" in outcome.text
    started.kill()


def other_settings():
    if bpsfast_rank_variable() == 1:
        os.environ["BPSFAST_PARTITION_BYTES"] = "8192"
    bpsfast.init()


def bpsfast_rank_variable():
    return int(os.environ["BPSFAST_RANK"])


def test_other_settings_are_refused(job):
    started = job(ranks=(2,), attach=False, start_timeout_s=3.0)
    first, second = started.attempt(other_settings)
    assert second.error == "MismatchError" and "partition_bytes" in second.text and "8192" in second.text
    assert first.error in ("StallError", "PeerLostError", "MismatchError")
    started.kill()


# -- leaving -------------------------------------------------------------------------------------------------------


def after_shutdown():
    bpsfast.shutdown()
    bpsfast.shutdown()
    errors = []
    for call in (bpsfast.rank, bpsfast.barrier, lambda: bpsfast.push_pull(np.ones(3)), lambda: bpsfast.empty(3)):
        try:
            call()
        except bpsfast.ClosedError as exc:
            errors.append("init()" in str(exc))
    return errors


def test_use_after_shutdown(job):
    started = job(ranks=(2,))
    assert started.run(after_shutdown) == [[True] * 4] * 2


def init_again():
    bpsfast.shutdown()
    bpsfast.init()


def test_a_second_job_under_a_launcher_is_refused_in_words(job):
    started = job(ranks=(2,))
    for outcome in started.attempt(init_again):
        assert outcome.error == "ClosedError" and "joins such a job once" in outcome.text
    started._attached = False


def arrays_outlive():
    x = bpsfast.empty(100_000)
    view = bpsfast.push_pull(x + 1, name="x", out=None)
    x[:] = 3
    inside = bpsfast.push_pull(x, name="y")
    bpsfast.shutdown()
    gc.collect()
    x[:] = 4
    return float(view[5]), float(inside[5]), float(x[5])


def test_arrays_outlive_the_session(job):
    assert job(ranks=(2,)).run(arrays_outlive) == [(1.0, 3.0, 4.0)] * 2


def handle_after_shutdown():
    handle = bpsfast.push_pull_async(np.ones(10), name="x")
    bpsfast.shutdown()
    try:
        handle.wait()
    except bpsfast.ClosedError as exc:
        return "shut down" in str(exc)
    return False


def test_a_handle_of_a_closed_session(job):
    assert job(ranks=(2,)).run(handle_after_shutdown) == [True] * 2


def wait_while_closing():
    errors = []

    def wait():
        try:
            bpsfast.push_pull(np.ones(10), name=f"never {bpsfast.rank()}")
        except bpsfast.ClosedError as exc:
            errors.append(str(exc))

    thread = threading.Thread(target=wait)
    thread.start()
    while not process.current().tensors.deferred:
        os.sched_yield()
    bpsfast.shutdown()
    thread.join(10)
    return thread.is_alive(), len(errors)


def channel_ends_after_the_shutdown_notice():
    session = process.current()
    before = type(session._node_lost()).__name__  # the node lives: as if it had closed its channel
    session._released = True
    return before, type(session._node_lost()).__name__


def test_the_end_of_the_channel_after_the_shutdown_notice_is_no_loss(job):
    started = job(ranks=(1,))
    assert started.run(channel_ends_after_the_shutdown_notice) == [("PeerLostError", "ClosedError")]
    started.kill()


def test_shutdown_beside_a_waiting_thread(job):
    assert job(ranks=(2,)).run(wait_while_closing) == [(False, 1)] * 2


def leave_while_a_post_is_made():
    """Return which threads are left when one has shut down while another one made a post."""
    session = process.current()
    publish, published, go_on = session.key_values.publish, threading.Event(), threading.Event()

    def publish_slowly(key, value):
        publish(key, value)
        published.set()
        assert go_on.wait(20)

    session.key_values.publish = publish_slowly
    maker = threading.Thread(target=lambda: session.extension(P2PEndpoint))
    leaver = threading.Thread(target=bpsfast.shutdown)
    maker.start()
    assert published.wait(20)
    leaver.start()
    leaver.join(1)  # it could be over now, if it did not see the post
    go_on.set()
    maker.join(20)
    leaver.join(20)
    with pytest.raises(bpsfast.ClosedError, match="was shut down"):
        _ = session.extension(P2PEndpoint)
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("bpsfast-p2p")]


def test_a_post_that_is_just_being_made_ends_with_its_session(job):
    assert job(ranks=(1,)).run(leave_while_a_post_is_made) == [[]]


# -- waiting -------------------------------------------------------------------------------------------------------


def barriers():
    stamps = []
    for _ in range(3):
        bpsfast.barrier()
        stamps.append(time.monotonic())
    return stamps


def test_barriers(pair):
    stamps = pair.run(barriers)
    for number in range(2):
        assert max(each[number] for each in stamps) <= min(each[number + 1] for each in stamps)


def interrupted():
    """SIGINT while waiting for the others: the wait ends within a slice."""
    total("interrupted")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    begin = time.monotonic()
    try:
        total("interrupted")
    except KeyboardInterrupt:
        return time.monotonic() - begin
    return -1.0


def test_ctrl_c_ends_a_wait(job):
    started = job(ranks=(2,))
    started.begin(total, "interrupted", only=(1,))
    started.begin(interrupted, only=(0,))
    outcomes = started.outcomes()
    assert 0 < outcomes[0].value < 2, outcomes
    started.kill()


_NO_ADDRESS_SPACE = """
import os, resource
import numpy as np
import bpsfast
bpsfast.init(timeout_s=20)
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_AS, (nbytes, resource.RLIM_INFINITY))
def attempt(call):
    try:
        call()
        print("nothing")
    except bpsfast.BpsError as exc:
        print(type(exc).__name__, exc)
bpsfast.empty, bpsfast.push_pull  # loaded now: that takes memory
n_fds = len(os.listdir("/proc/self/fd"))
limit(int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (1 << 20))
attempt(lambda: bpsfast.empty(1000))
attempt(lambda: bpsfast.push_pull(np.ones(1000)))
limit(resource.RLIM_INFINITY)
assert len(os.listdir("/proc/self/fd")) == n_fds + 1, "that of the results' segment, which may be mapped later"
attempt(lambda: bpsfast.empty(1 << 45))
bpsfast.barrier()
"""


def test_a_segment_that_cannot_be_mapped_is_an_error_where_it_is_needed():
    code, output = one_process(_NO_ADDRESS_SPACE)
    assert code == 0, output
    first, second, third = output.splitlines()
    assert first.startswith("CapacityError rank 0 cannot map a segment of ")
    assert second.startswith("CapacityError rank 0 cannot map a segment of ")
    assert third.startswith("CapacityError") and "map" not in third, "that is the node's own answer"
