"""An engine from its start to its end: threads, memory, the collector, and what a closed one refuses."""
import gc
import subprocess
import sys
import threading

import pytest

from bpsfast.orchestration.errors import CapacityError, error_of
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
from tests.support import threads
from tests.support.engine_node import PART, EngineNode


@pytest.mark.parametrize("arguments", [dict(n_threads=0), dict(n_threads=65)])
def test_bad_thread_counts_are_refused(arguments):
    with Segment(ring.BOARD_NBYTES, populate=False) as board, Segment(ring.DOORBELL_NBYTES) as bell:
        ring.format_board(board)
        ring.format_doorbell(bell)
        with pytest.raises(ValueError, match="n_threads"):
            Engine(board, bell, **arguments)


#: Transports report to an engine whose events nobody takes, in a process that gets no more memory.
_FULL = """
import ctypes, resource
from bpsfast.pyx import engine as native, ring
from bpsfast.pyx.pages import Segment
board, bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
ring.format_board(board)
ring.format_doorbell(bell)
engine = native.Engine(board, bell, n_threads=1)
notify = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_uint32] * 5, ctypes.c_uint64)(engine.notify_address)
state = memoryview(board).cast("I")
nbytes = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize() + (4 << 20)
resource.setrlimit(resource.RLIMIT_AS, (nbytes, nbytes))
while not state[1]:
    notify(engine.handle, native.EVENT_DELIVERED, 0, 0, 0, 0, 0)
engine.abort("PeerLostError: later")
print(bytes(state.cast("B")[64:4096]).split(b"\\0")[0].decode())
"""


def test_an_engine_without_memory_for_events_ends_the_job_in_words():
    done = subprocess.run([sys.executable, "-c", _FULL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    name, _, reason = done.stdout.strip().partition(": ")
    assert isinstance(error_of(name, reason), CapacityError) and "ran out of memory" in reason


def test_close_joins_the_threads():
    before = threads.ids()
    v = EngineNode(n_threads=4)
    fresh = threads.ids() - before
    assert len(fresh) == 4
    v.close()
    v.engine.close()
    threads.until_forgotten(fresh)


#: Nobody closes the engine; the garbage collector finds it, the only one that holds board and doorbell, in a cycle.
_DROPPED = """
import gc
from bpsfast.pyx import ring
from bpsfast.pyx.engine import Engine
from bpsfast.pyx.pages import Segment
for _ in range(20):
    board, bell = Segment(ring.BOARD_NBYTES, populate=False), Segment(ring.DOORBELL_NBYTES)
    ring.format_board(board)
    ring.format_doorbell(bell)
    cycle = [Engine(board, bell, n_threads=2, awake_us=10_000)]  # older than the list: the collector clears it first
    cycle.append(cycle)
    del cycle, board, bell
    assert gc.collect()
"""


def test_an_engine_that_is_garbage_ends_its_threads_before_its_memory_goes():
    done = subprocess.run([sys.executable, "-c", _DROPPED], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.parametrize(("method", "arguments"), [
    ("add_wire_peer", ()), ("map_segment", (0, 0, 4096, 4096)), ("freeze", (1.0,)), ("report", ()), ("missing", (0,)),
    ("commit", (1, [0] * 4)),
])
def test_a_closed_engine_refuses(engine_node, method, arguments):
    v = engine_node()
    v.own(0)
    v.close()
    v.bell.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        getattr(v.engine, method)(*arguments)
    v.engine.abort("PeerLostError: too late to be read")


def test_a_report_lets_other_threads_in_while_it_makes_objects(engine_node):
    """The collector runs what it likes when objects are made; here a finaliser that waits for another thread."""
    v = engine_node(n_parts=4)
    for part in range(4):
        v.own(part)
    helped, asked = threading.Event(), threading.Event()

    def help():
        asked.wait(20)
        v.engine.add_wire_peer()
        helped.set()

    class Garbage:
        def __init__(self):
            self.me = self

        def __del__(self):
            asked.set()
            assert helped.wait(20), "the engine's lock is held while objects are made"

    helper = threading.Thread(target=help)
    helper.start()
    gc.collect()
    before = gc.get_threshold()
    Garbage()
    gc.set_threshold(1)
    try:
        while not helped.is_set():
            assert len(v.engine.report()) == 4
    finally:
        gc.set_threshold(*before)
        helper.join(30)
    assert helped.is_set()


def push(v, part, round):
    for rank, port in enumerate(v.ports):
        v.input(rank)[part] = round
        port.submit(part, 1, round, 0, part * PART)
    assert v.ports[0].wait(part, 1, round, 10) == 0
    return v.output(round)[part]


def test_a_retired_part_begins_anew(engine_node):
    v = engine_node()
    for generation in range(3):
        for part in range(4):
            v.own(part)
        v.commit()
        for round in (1, 2, 3):
            for part in range(4):
                assert (push(v, part, round) == 2 * round).all(), generation
        v.engine.retire([3, 0, 2, 1])
        assert v.engine.report() == [] and not v.ports[0].done(0, 1, 1)
    with pytest.raises(ValueError, match="part 2 is to be retired, but there is none"):
        v.engine.retire([2])
    v.engine.retire([])


def test_a_part_with_something_under_way_is_not_retired(engine_node):
    v = engine_node(n_parts=2)
    v.own(0)
    v.own(1)
    v.commit()
    push(v, 0, 1)
    v.ports[0].submit(1, 1, 1, 0, PART)
    with pytest.raises(ValueError, match="part 1 is to be retired while something of it is under way"):
        v.engine.retire([0, 1])
    assert [part for part, *_ in v.engine.report()] == [0, 1], "all or nothing"
    v.ports[1].submit(1, 1, 1, 0, PART)
    assert v.ports[0].wait(1, 1, 1, 10) == 0
    v.engine.retire([0, 1])


def test_a_part_that_is_not_committed_is_removed_and_not_retired(engine_node):
    v = engine_node(n_parts=2)
    v.own(0)
    with pytest.raises(ValueError, match="there is none"):
        v.engine.retire([0])
    with pytest.raises(ValueError, match="there is none"):
        v.engine.retire([65536])
    v.engine.remove(0)
