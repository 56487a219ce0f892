"""Joining, leaving, forking, failing: the life of a session on real ranks.

Longer than 400 lines: one source file, one suite; each test is a function and what its ranks run.
"""
from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import current


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
    before = current.current()
    bpsfast.init()
    return current.current() is before


def test_a_second_init_changes_nothing(pair):
    assert pair.run(twice) == [True] * 3


def told():
    return bpsfast.stats()


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


CYCLES = """
import os, threading, gc, sys
import numpy as np, bpsfast
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
    rss = int(open("/proc/self/statm").read().split()[1]) * 4096
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(open("/proc/self/maps").readlines()), rss
for _ in range(3): cycle(True)
before = counts()
for number in range(int(sys.argv[1])): cycle(number % 10 == 0)
after = counts()
print(before, after)
assert after[:2] == before[:2] and after[2] <= before[2] + 4, (before, after)
assert after[3] <= before[3] + (4 << 20), (before, after)
assert sys.excepthook is sys.__excepthook__
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cycles_of_init_and_shutdown_leave_nothing():
    n_cycles = os.environ.get("BPSTEST_CYCLES", "200")
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
    while not current.current()._deferred:
        os.sched_yield()
    bpsfast.shutdown()
    thread.join(10)
    return thread.is_alive(), len(errors)


def test_shutdown_beside_a_waiting_thread(job):
    assert job(ranks=(2,)).run(wait_while_closing) == [(False, 1)] * 2


# -- forking -------------------------------------------------------------------------------------------------------


def fork():
    """Use the session in a forked child, then go on in the parent."""
    total("before")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            bpsfast.push_pull(np.ones(1000), False, "before")
            text = "no error"
        except bpsfast.ClosedError as exc:
            text = str(exc)
        os.write(writer, text.encode())
        bpsfast.shutdown()
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 4096).decode()
    os.close(reader)
    os.close(writer)
    return text, total("before")


def test_a_forked_child_has_no_session(pair):
    for text, after in pair.run(fork):
        assert "fork" in text and after == 3


def attempt(call):
    try:
        return f"no error, but {call()!r}"
    except bpsfast.ClosedError as exc:
        return str(exc)


def fork_beside_waits():
    """Fork while a thread waits in the port, a push is deferred and others hold the locks; what the child is told."""
    total("beside")
    if bpsfast.rank():
        bpsfast.barrier()
        return total("beside"), bpsfast.synchronize(bpsfast.push_pull_async(np.ones(9), False, "other"))[0]
    session = current.current()
    handle = bpsfast.push_pull_async(np.ones(1000), False, "beside")
    found = []
    waiter = threading.Thread(target=lambda: found.append(float(handle.wait()[0])))
    deferred = bpsfast.push_pull_async(np.ones(9), False, "other")
    waiter.start()
    while not session.port._n_inside:
        os.sched_yield()
    reader, writer = os.pipe()
    unit = session._units["beside"]
    with session._mailbox._condition, session._lock, session.port._lock:
        child = os.fork()
        if child == 0:
            calls = (deferred.wait, deferred.done, lambda: unit.wait(unit.round, 40), lambda: total("beside"),
                     bpsfast.barrier, bpsfast.rank)
            os.write(writer, "|".join(map(attempt, calls)).encode())
            bpsfast.shutdown()
            os._exit(0)
    os.close(writer)
    in_time = select.select([reader], [], [], 20.0)[0]
    if not in_time:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answers = os.read(reader, 1 << 16).decode().split("|")
    os.close(reader)
    bpsfast.barrier()
    waiter.join(20)
    return found[0], deferred.wait()[0], answers


def test_a_child_forked_beside_waits_is_refused_at_once(pair):
    first, *others = pair.run(fork_beside_waits)
    assert [tuple(each) for each in others] == [first[:2]] * 2 == [(3.0, 3.0)] * 2
    assert len(first[2]) == 6 and all("is a fork of rank 0" in answer for answer in first[2]), first[2]


def child_work(queue):
    queue.put(sum(range(100)))


def multiprocessing_children():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=child_work, args=(queue,)) for _ in range(2)]
    for child in children:
        child.start()
    during = total("during")
    found = [queue.get(timeout=20) for _ in children]
    for child in children:
        child.join(20)
    return during, found, [child.exitcode for child in children]


def test_children_that_fork_while_connected(pair):
    assert pair.run(multiprocessing_children) == [(3.0, [4950, 4950], [0, 0])] * 3


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


def short_barrier():
    bpsfast.barrier(timeout_s=0.3)


def lone_declaration():
    bpsfast.push_pull(np.ones(4, np.float32), name="only mine")


def test_what_not_all_enter_or_declare_names_who_is_missing(job):
    started = job(ranks=(1, 1), timeout_s=1)
    started.begin(short_barrier, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError" and "barrier 1: missing: rank 1" in outcome.text
    started.begin(lone_declaration, only=(0,))
    [outcome] = started.outcomes(only=(0,))
    assert outcome.error == "StallError" and "'only mine'" in outcome.text and "missing: rank 1" in outcome.text
    started.kill()


def uneven(then):
    """Push twice; rank 0 leaves, the others "push", "declare" or enter a "barrier": how long that took, the error."""
    total("uneven")
    total("uneven")
    begin = time.monotonic()
    if bpsfast.rank() == 0:
        bpsfast.shutdown()
        return 0.0, ""
    calls = {"push": lambda: total("uneven"), "declare": lambda: total("mine"), "barrier": bpsfast.barrier}
    try:
        calls[then]()
    except bpsfast.StallError as exc:
        return time.monotonic() - begin, str(exc)
    return 0.0, "no error"


@pytest.mark.parametrize(("ranks", "then"), [((2,), "push"), ((1, 1), "push"), ((2,), "declare"), ((2,), "barrier")])
def test_a_rank_that_left_is_not_waited_for(job, ranks, then):
    started = job(ranks=ranks, transport="tcp", timeout_s=50)
    values = started.run(uneven, then, timeout_s=45)
    waited_s, text = values[1]
    assert "missing: rank 0" in text and "has called shutdown. Waiting on cannot help" in text, text
    assert waited_s < 20, "soon, and not after timeout_s"
    started.kill()


def leave_with_a_push_under_way():
    """Rank 0 announces its part and leaves; the others push only when they know that it has."""
    total("announced")
    if bpsfast.rank() == 0:
        bpsfast.push_pull_async(np.ones(1000), False, "announced")
        bpsfast.shutdown()
        return 3.0
    while not current.current()._somebody_left():
        time.sleep(0.01)
    return total("announced")


@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_what_was_announced_before_leaving_counts(job, ranks):
    started = job(ranks=ranks, transport="tcp")
    assert started.run(leave_with_a_push_under_way) == [3.0] * 3
    started._attached = False
    started.kill()


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


# -- failing -------------------------------------------------------------------------------------------------------


class Uncaught(BaseException):
    """Not caught by the process that runs the ranks' functions."""


def push_until_it_ends(who):
    total("failing")
    if bpsfast.rank() == who:
        raise Uncaught("a bug in the trainer")
    total("failing")


def test_an_uncaught_exception_ends_the_others_in_words(job):
    started = job(ranks=(2, 1), transport="tcp")
    begin = time.monotonic()
    outcomes = started.attempt(push_until_it_ends, 1)
    assert outcomes[1].error == "died"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.error == "PeerLostError" and "rank 1" in outcome.text and "a bug in the trainer" in outcome.text
    assert time.monotonic() - begin < 15
    started.kill()


def disagree():
    """Rank 0 ends by the disagreement; rank 1 looks only when the job was aborted for that."""
    if bpsfast.rank() == 0:
        try:
            bpsfast.push_pull(np.ones(4), True, "average or not")
        except bpsfast.MismatchError as exc:
            raise Uncaught(str(exc)) from exc
    bpsfast.declare("average or not", (4,), "float64", average=False)
    while not current.current().port._port.state()[0]:
        time.sleep(0.01)
    bpsfast.push_pull(np.ones(4), False, "average or not")


@pytest.mark.parametrize("ranks", [(2,), (1, 1)])
def test_a_mismatch_is_not_hidden_by_the_loss_that_follows(job, ranks):
    started = job(ranks=ranks, transport="tcp")
    outcomes = started.attempt(disagree)
    assert outcomes[0].error == "died"
    assert outcomes[1].error == "MismatchError" and "average differs" in outcomes[1].text, outcomes
    started.kill()


KILLS_ITS_NODE = """
import os, bpsfast, numpy as np
from bpsfast.trainer import current
bpsfast.init()
os.kill(current._watch._started.node.pid, 9)
while True:
    bpsfast.push_pull(np.ones(9), name="x")
"""


def test_who_started_the_node_says_how_it_ended():
    code, output = one_process(KILLS_ITS_NODE)
    assert code == 1 and "is lost: the node (pid" in output and "was killed by SIGKILL" in output


def push_for_ever():
    while True:
        total("for ever")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("victim", ["rank 1", "node 0", "node 1", "helper 0", "scheduler"])
def test_kill_9_while_pushing(job, victim):
    started = job(ranks=(2, 1), helpers=1, transport="tcp")  # its end is noticed, not its silence: no short lease
    started.run(total, "for ever")
    started.begin(push_for_ever)
    if victim.startswith("rank"):
        started.kill_rank(1)
    else:
        started.kill_daemon(victim)
    outcomes = started.outcomes(timeout_s=100)
    for rank, outcome in enumerate(outcomes):
        if victim == f"rank {rank}":
            assert outcome.error == "died"
        else:
            assert outcome.error == "PeerLostError", outcome
            assert victim.split()[0].replace("helper", "node") in outcome.text
            if victim == "node 0" and rank < 2:
                assert f"node 0 (pid {started.daemons[victim].pid} on this machine) is lost" in outcome.text
                assert "SIGKILL" in outcome.text
    started.kill()


def fork_a_child():
    """Fork a child that holds every descriptor; return its process id."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    return child


def test_kill_9_of_a_rank_whose_children_live_on(job):
    started = job(ranks=(2,))
    started.run(total, "for ever")
    children = started.run(fork_a_child)
    try:
        started.begin(push_for_ever)
        begin = time.monotonic()
        started.kill_rank(1)
        [outcome] = started.outcomes(only=(0,))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    assert outcome.error == "PeerLostError" and "rank 1" in outcome.text
    assert time.monotonic() - begin < 10
    started.kill()
