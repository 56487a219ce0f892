"""push_pull among ranks of one machine that sum directly: all its forms in any order, other arguments, lost ranks."""
from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import bpsfast
from bpsfast.launch.daemons import clean_environment
from bpsfast.orchestration.messages import TensorSpec
from bpsfast.trainer import process
from bpsfast.trainer.input_memory import InputMemory
from tests.support.lossy_training import joined

FORMS = ("in place", "new", "out", "segment", "segment out", "async", "async out")
SHAPES = ((), (1,), (511,), (513,), (3, 5, 7), (40_000,), (300_000,))


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, shared_job):
    return shared_job(ranks=(request.param,), direct_sums="auto")


def tensor(name):
    """What sums *name* directly."""
    return process.current().tensors.unit(name).direct


def given(rank, step, shape, dtype):
    draw = np.random.default_rng([rank, step]).integers(-100, 100, shape)
    return np.asarray(draw).astype(dtype)


def wanted(step, shape, dtype, average):
    total = sum(given(rank, step, shape, np.int64) for rank in range(bpsfast.size()))
    if not average:
        return total.astype(dtype)
    wide = np.float64 if np.dtype(dtype).kind not in "iu" else np.int64
    if wide is np.float64:
        return (total / bpsfast.size()).astype(np.float32 if dtype != np.float64 else dtype).astype(dtype)
    return (total.astype(dtype).astype(np.int64) // bpsfast.size()).astype(dtype)


def push_beside():
    bpsfast.push_pull(np.ones(3, np.float32), name="beside")


def push(form, x, segment, average, name, beside):
    """Sum a copy of *x* in one of `FORMS`, and call *beside*; return the result."""
    if form.startswith("segment"):
        segment[...] = x
        x = segment
    out = np.zeros_like(x) if form.endswith("out") else x if form == "in place" else None
    if form.startswith("async"):
        handle = bpsfast.push_pull_async(x, average, name, out=out)
        beside()
        return np.array(bpsfast.synchronize(handle))
    found = np.array(bpsfast.push_pull(x, average, name, out=out))
    beside()
    return found


def any_forms(seed, dtype, alike):
    """Push several names in forms that each rank draws for itself, unless *alike*; return (direct, declined) calls."""
    kind = np.dtype(dtype)
    draw = random.Random(f"{seed} {0 if alike else bpsfast.rank()}")
    both = random.Random(seed)
    names = {f"{seed} {dtype} {shape}": (shape, bpsfast.empty(shape, kind)) for shape in SHAPES}
    for name, (shape, _) in names.items():
        bpsfast.declare(name, shape, dtype, average=len(shape) == 1)
    if alike:  # a rank that does not know of the commit yet would push to the node
        for name in names:
            tensor(name)
        bpsfast.barrier()
    for step in range(60):
        name = both.choice(list(names))
        shape, segment = names[name]
        form = draw.choice(FORMS)
        average = len(shape) == 1
        beside = both.choice((push_beside, lambda: None))
        found = push(form, given(bpsfast.rank(), step, shape, kind), segment, average, name, beside)
        assert found.tobytes() == wanted(step, shape, kind, average).tobytes(), (step, name, form)
    tensors = [tensor(name) for name in names]
    return sum(each.n_sums for each in tensors), sum(each.n_declined for each in tensors)


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8", "float64"])
def test_ranks_that_push_in_different_forms_get_the_sum(ranks, dtype):
    for n_sums, n_declined in ranks.run(any_forms, f"mixed {dtype}", dtype, False):
        assert n_declined > 0 and n_sums > 0


def asynchronous_first():
    x = np.ones(10, np.float32)
    bpsfast.synchronize(bpsfast.push_pull_async(x, False, "asynchronous first"))
    for _ in range(2):
        bpsfast.push_pull(x, False, "asynchronous first", out=x)
    return tensor("asynchronous first"), float(x[0])


def test_a_tensor_that_was_not_waited_for_at_first_gets_no_memory_for_direct_sums(ranks):
    assert ranks.run(asynchronous_first) == [(None, float(ranks.size) ** 2)] * ranks.size


def test_ranks_that_push_in_one_form_sum_directly(ranks):
    (first, *others) = ranks.run(any_forms, "alike", "float32", True)
    assert first[0] > 10 and first[1] == 0 and all(other == first for other in others)


def segments():
    """Arrays in any segment of the rank are summed directly; each result lives until the second next push."""
    arrays = [bpsfast.empty((1000,), np.float32) for _ in range(3)]
    arrays.append(bpsfast.empty((8 << 20,), np.uint8)[:4000].view(np.float32))  # it has a segment of its own
    views = []
    for step in range(8):
        x = arrays[step % 4]
        x[:] = step + bpsfast.rank()
        views.append(bpsfast.push_pull(x, False, "segments"))
        assert not views[-1].flags.writeable and views[-1][999] == total_of(step)
        if step:
            assert views[-2][0] == total_of(step - 1)
    with pytest.raises(bpsfast.BpsError):
        bpsfast.push_pull(arrays[0][:5], False, "segments")
    assert views[-1][0] == total_of(7) and views[-2][0] == total_of(6), "a refused push changes no result"
    return tensor("segments").n_sums


def total_of(step):
    return sum(step + rank for rank in range(bpsfast.size()))


def test_arrays_of_shared_memory_are_summed_directly(ranks):
    assert set(ranks.run(segments)) == {7}


def new_results():
    """A private array without *out* gets a new array every time; one of shared memory a view, whatever came first."""
    results = [bpsfast.push_pull(np.full(1000, step + bpsfast.rank(), np.float32), False, "new") for step in range(6)]
    for step, each in enumerate(results):
        assert each.flags.writeable and each.flags.owndata and (each == total_of(step)).all()
    shared = bpsfast.empty((1000,), np.float32)
    shared[:] = bpsfast.rank()
    assert not bpsfast.push_pull(shared, False, "new").flags.writeable
    assert bpsfast.push_pull(np.float32(bpsfast.rank()), False, "no dimension") == total_of(0)
    assert bpsfast.push_pull(np.float32(bpsfast.rank()), False, "no dimension").shape == ()
    return tensor("new").n_sums


def test_private_arrays_get_new_results(ranks):
    assert set(ranks.run(new_results)) == {6}


def large_segments():
    """Large arrays of `empty` are summed in place by the node, unless the result is to go elsewhere."""
    x = bpsfast.empty((100_000,), np.float32)
    out = np.empty_like(x)
    for step in range(6):
        x[:] = step + bpsfast.rank()
        if step == 3:
            view = bpsfast.push_pull(x, False, "large segments", out=out)
        else:
            view = bpsfast.push_pull(x, False, "large segments")
            assert not view.flags.writeable and view.base is not None
        assert view[0] == view[-1] == total_of(step)
    return tensor("large segments").n_sums, tensor("large segments").n_declined


def test_large_arrays_of_shared_memory_are_summed_where_they_lie(ranks):
    assert set(ranks.run(large_segments)) == {(1, 0)}


def halves():
    x = given(bpsfast.rank(), 1, (1000,), ml_dtypes.bfloat16)
    for _ in range(3):
        y = x.copy()
        assert bpsfast.push_pull(y, False, "bfloat16", out=y) is y
        assert y.tobytes() == wanted(1, (1000,), ml_dtypes.bfloat16, False).tobytes()
    return tensor("bfloat16").n_sums


def test_a_dtype_without_a_buffer_is_summed_directly(ranks):
    assert set(ranks.run(halves)) == {2}, "the first push came before the commit"


def differing_arguments():
    """Each of these is refused, or pushed in the general way, as without direct sums."""
    x = np.full((4, 4), 1 + bpsfast.rank(), np.float32)
    total = 4 * 4 * sum(range(1, bpsfast.size() + 1))
    for _ in range(2):
        out = np.empty_like(x)
        assert bpsfast.push_pull(x, False, "differing", out=out).sum() == total
    errors = []
    for priority in (np.array([1, 2]), "urgent", 1.5):
        with pytest.raises(bpsfast.ConfigError):
            bpsfast.push_pull(x.copy(), False, "differing", priority, out=np.empty_like(x))
    frozen = x.copy()
    frozen.flags.writeable = False
    for y, average, out in ((x.reshape(16), False, x.reshape(16)), (x.view(np.int32), False, x.view(np.int32)),
                            (x, True, x), (x, 0, x), (x.T, False, x.T), (x, False, frozen), (x[:2], False, x[:2])):
        try:
            bpsfast.push_pull(y, average, "differing", out=out)
        except bpsfast.BpsError as exc:
            errors.append(type(exc).__name__)
        else:
            errors.append("")
    again = np.empty_like(x)
    assert bpsfast.push_pull(frozen, False, "differing", out=again).sum() == total, "an input may be read-only"
    wide = np.zeros(24, np.float32)
    wide[:16] = x.reshape(16)
    overlapping = bpsfast.push_pull(wide[:16].reshape(4, 4), False, "differing", out=wide[8:].reshape(4, 4))
    assert overlapping.sum() == total
    return errors


def test_other_arguments_are_checked_as_ever(ranks):
    errors = ["MismatchError", "MismatchError", "MismatchError", "ConfigError", "UnsupportedError", "UnsupportedError",
              "MismatchError"]
    for found in ranks.run(differing_arguments):
        assert found == errors


def pushed_before_it_is_declared():
    """Rank 0 has pushed "late" when it waits in another push; the others wait in "late" first."""
    x, y = np.ones(5, np.float32), np.ones(5000, np.float32)
    for name in ("late 1", "late 2"):
        if bpsfast.rank() == 0:
            handle = bpsfast.push_pull_async(x, False, name)
            bpsfast.push_pull(y, False, "not late", out=y)
            bpsfast.synchronize(handle)
        else:
            bpsfast.push_pull(x, False, name)
            bpsfast.push_pull(y, False, "not late", out=y)
    return float(y[0])


def test_a_deferred_push_starts_while_a_direct_sum_waits(ranks):
    begin = time.monotonic()
    assert set(ranks.run(pushed_before_it_is_declared)) == {float(ranks.size) ** 2}
    assert time.monotonic() - begin < 20


def two_threads():
    x, y = np.ones(100, np.float32), np.ones(100, np.float32)
    bpsfast.push_pull(x, False, "threads", out=x)
    if bpsfast.rank() == 0:
        waits = threading.Event()

        def other():
            waits.set()
            bpsfast.push_pull(y, False, "threads", out=y)

        thread = threading.Thread(target=other)
        thread.start()
        waits.wait(10)
        while not process.current().tensors.unit("threads").in_flight:
            os.sched_yield()
        with pytest.raises(bpsfast.BusyError, match="'threads' is pushed again"):
            bpsfast.push_pull(x, False, "threads", out=x)
        bpsfast.push_pull(x, False, "threads are there", out=x)
        thread.join(20)
    else:
        bpsfast.push_pull(x, False, "threads are there", out=x)
        bpsfast.push_pull(y, False, "threads", out=y)
    return float(y[0])


def test_two_threads_that_push_one_name_are_told(ranks):
    assert set(ranks.run(two_threads)) == {float(ranks.size)}


def forked_child():
    x = np.ones(10, np.float32)
    for _ in range(2):
        bpsfast.push_pull(x, True, "forked", out=x)
    child = os.fork()
    if child == 0:
        try:
            bpsfast.push_pull(x, True, "forked", out=x)
        except bpsfast.ClosedError as exc:
            os._exit(7 if "is a fork of" in str(exc) else 1)
        os._exit(2)
    _, status = os.waitpid(child, 0)
    bpsfast.push_pull(x, True, "forked", out=x)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_refused(ranks):
    assert set(ranks.run(forked_child)) == {7}


def lose_one(nbytes, how):
    """Rank 1 ends, or stops, where the others expect it in a direct sum; return their error's text."""
    x = np.ones(nbytes // 4, np.float32)
    for _ in range(3):
        bpsfast.push_pull(x, True, "lost", out=x)
    assert tensor("lost").n_sums >= 1
    bpsfast.barrier()
    if bpsfast.rank() == 1:
        os.kill(os.getpid(), how)
    begin = time.monotonic()
    try:
        bpsfast.push_pull(x, True, "lost", out=x)
    except (bpsfast.PeerLostError, bpsfast.StallError) as exc:
        text = f"{type(exc).__name__}: {exc}"
    waited_s = time.monotonic() - begin
    try:
        bpsfast.push_pull(x, True, "lost", out=x)
    except bpsfast.BpsError as exc:
        return text, waited_s, type(exc).__name__
    raise AssertionError("a lost round was followed by another")


@pytest.mark.parametrize("nbytes", [400, 8 << 20])
def test_a_killed_rank_ends_the_others(job, nbytes):
    running = job(ranks=(3,), direct_sums="auto")
    for outcome in (outcomes := running.attempt(lose_one, nbytes, signal.SIGKILL))[::2]:
        assert outcome.value is not None, outcomes
        text, waited_s, then = outcome.value
        assert text.startswith("PeerLostError") and "rank 1" in text and waited_s < 10 and then == "PeerLostError"
    running.kill()


@pytest.mark.parametrize("nbytes", [400, 8 << 20])
def test_a_stopped_rank_is_named_at_the_deadline(job, nbytes):
    running = job(ranks=(3,), direct_sums="auto", timeout_s=3, lease_s=60)
    running.begin(lose_one, nbytes, signal.SIGSTOP)
    for outcome in running.outcomes(only=(0, 2)):
        assert outcome.value is not None, outcome
        text, waited_s, then = outcome.value
        assert text.startswith("StallError") and "rank 1" in text and 2.9 < waited_s < 6, outcome
        assert then in ("BusyError", "PeerLostError")
    running.kill()


def alone(ready):
    """Sum until a call raises because the node has ended; return the text of that error."""
    n_sums, _ = any_forms("alone", "float32", False)
    assert n_sums > 5
    x = np.arange(1000, dtype=np.float32)
    Path(ready).touch()
    deadline = time.monotonic() + 20
    with pytest.raises(bpsfast.BpsError) as caught:
        while time.monotonic() < deadline:
            bpsfast.push_pull(x, False, "x", out=x)
    return str(caught.value)


def test_the_only_rank_sums_by_itself_and_notices_the_end_of_its_node(job, tmp_path):
    running, ready = job(ranks=(1,), direct_sums="auto"), tmp_path / "ready"
    running.begin(alone, str(ready))
    deadline = time.monotonic() + 30
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.kill_daemon("node 0")
    [outcome] = running.outcomes()
    assert "node 0" in outcome.value, outcome
    running.kill()


def leave_early(nbytes, deferred):
    """Rank 0 leaves; who then sums directly learns that at once. *deferred*: a push waits for a commit meanwhile."""
    x = np.ones(nbytes // 4, np.float32)
    for _ in range(3):
        bpsfast.push_pull(x, True, "left", out=x)
    if bpsfast.rank() == 0:
        bpsfast.shutdown()
        return 0.0, ""
    if deferred:
        bpsfast.push_pull_async(x.copy(), True, "never")
    begin = time.monotonic()
    with pytest.raises(bpsfast.StallError) as caught:
        bpsfast.push_pull(x, True, "left", out=x)
    return time.monotonic() - begin, str(caught.value)


@pytest.mark.parametrize(("nbytes", "deferred", "direct_sums"), [
    (400, False, "auto"), (8 << 20, False, "auto"), (400, True, "auto"), (400, True, "off")])
def test_a_rank_that_left_is_not_waited_for(job, nbytes, deferred, direct_sums):
    running = job(ranks=(3,), direct_sums=direct_sums, timeout_s=60)
    for waited_s, text in running.run(leave_early, nbytes, deferred)[1:]:
        assert "missing: rank 0" in text and "has called shutdown" in text and waited_s < 15
    running.kill()


def without_memory_for_the_node(nbytes):
    """Rank 1 pushes to the node; rank 0, which summed directly until then, has no memory for what that needs."""
    x = np.ones(nbytes // 4, np.float32)
    bpsfast.declare("narrow", x.shape, "float32")
    tensor("narrow")
    bpsfast.barrier()
    for _ in range(3):
        bpsfast.push_pull(x, True, "narrow", out=x)
    assert tensor("narrow").n_sums == 3
    bpsfast.barrier()
    begin = time.monotonic()
    try:
        if bpsfast.rank() == 0:
            InputMemory.allocate = lambda _self, _nbytes: raised(bpsfast.CapacityError("there is none"))
            bpsfast.push_pull(x, True, "narrow", out=x)
        else:
            bpsfast.synchronize(bpsfast.push_pull_async(x, True, "narrow"))
    except bpsfast.BpsError as exc:
        return type(exc).__name__, str(exc), time.monotonic() - begin
    return "", "", 0.0


def raised(error):
    raise error


@pytest.mark.parametrize("nbytes", [400, 12 << 20])
def test_who_has_no_memory_for_a_round_that_another_declined_ends_it_for_all(job, nbytes):
    running = job(ranks=(2,), direct_sums="auto", timeout_s=60)
    first, second = running.run(without_memory_for_the_node, nbytes)
    assert first[:2] == ("CapacityError", "there is none")
    assert second[0] in ("CapacityError", "PeerLostError") and "rank 0" in second[1] and "there is none" in second[1]
    assert second[2] < 20
    running.kill()


def declare_all(shapes):
    """Declare direct tensors {name: bytes}, and others in capitals; return their units once all ranks have them."""
    session = process.current()
    session.tensors.declare([TensorSpec(name=name, dtype="uint8", shape=(nbytes,), average=False,
                                        direct=not name.isupper()) for name, nbytes in shapes.items()])
    units = [session.tensors.unit(name) for name in shapes]
    bpsfast.barrier()
    return units


def memory_in_pieces():
    """There is room for the channel of "big", but not in one piece: its node sums it, and nothing is refused."""
    session, x = process.current(), bpsfast.empty((250 << 10,), np.uint8)
    x[:] = 1
    first, *small = declare_all({"FIRST": 600 << 10, **{f"small {i}": 200 << 10 for i in range(4)}})
    session.retire([first])
    session.retire([small[0], small[2]])
    bpsfast.barrier()
    (big,) = declare_all({"big": 250 << 10})
    return big.channel is not None, [small[1].channel is not None], int(bpsfast.push_pull(x, False, "big")[-1])


def test_a_tensor_whose_channel_does_not_fit_is_summed_by_its_node(job):
    running = job(ranks=(2,), direct_sums="auto", max_bytes=10_600_000)
    assert running.run(memory_in_pieces) == [(False, [True], 2)] * 2
    running.kill()


def a_retire_that_fails():
    x = np.ones(10, np.float32)
    for _ in range(3):
        bpsfast.push_pull(x, True, "stays", out=x)
    unit = process.current().tensors.unit("stays")
    unit.await_readers = lambda: raised(bpsfast.StallError("the device is late"))
    with pytest.raises(bpsfast.StallError, match="the device is late"):
        process.current().retire([unit])
    bpsfast.push_pull(x, True, "stays", out=x)
    del unit.await_readers
    process.current().retire([unit])
    with pytest.raises(bpsfast.ClosedError):
        unit.push()
    return float(x[0])


def test_a_tensor_that_could_not_be_retired_can_still_be_pushed(ranks):
    assert set(ranks.run(a_retire_that_fails)) == {1.0}


def interrupted(nbytes):
    """Ctrl-C ends a direct sum at once; who then waits for what that rank still had to sum learns its name."""
    x = np.ones(nbytes // 4, np.float32)
    for _ in range(2):
        bpsfast.push_pull(x, True, "interrupted", out=x)
    if bpsfast.rank() != 0:
        bpsfast.barrier()
        if nbytes > 4096:
            with pytest.raises(bpsfast.StallError, match="missing: rank 0"):
                bpsfast.push_pull(x, True, "interrupted", out=x)
        else:
            bpsfast.push_pull(x, True, "interrupted", out=x)
        bpsfast.barrier()
        return True
    signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bpsfast.push_pull(x, True, "interrupted", out=x)
    waited_s = time.monotonic() - begin
    timer.join()
    with pytest.raises(bpsfast.BusyError, match=r"cannot be pushed again: its last round ended with an error"):
        bpsfast.push_pull(x, True, "interrupted", out=x)
    bpsfast.barrier()
    process.current().barrier(30)  # the others wait until their deadline before
    return waited_s < 3


@pytest.mark.parametrize("nbytes", [400, 1 << 20])
def test_an_interrupt_ends_a_direct_sum(job, nbytes):
    running = job(ranks=(2,), direct_sums="auto", timeout_s=5)
    assert running.run(interrupted, nbytes) == [True, True]
    running.kill()


def one_declines_while_another_is_late(path):
    """Rank 2 has pushed to the node, rank 0 sums directly, rank 1 is late: it alone is named."""
    x = np.ones(100, np.float32)
    for _ in range(2):
        bpsfast.push_pull(x, False, "declined beside", out=x)
    if bpsfast.rank() == 2:
        handle = bpsfast.push_pull_async(x, False, "declined beside", out=x)
        with pytest.raises(bpsfast.StallError) as caught:
            bpsfast.synchronize(handle, 2.0)
        path.touch()
        bpsfast.synchronize(handle)
        return str(caught.value), float(x[0])
    while bpsfast.rank() == 1 and not path.exists():
        time.sleep(0.01)
    bpsfast.push_pull(x, False, "declined beside", out=x)
    return "", float(x[0])


def test_a_rank_that_waits_in_a_direct_sum_is_not_missing_to_those_that_decline(job, tmp_path):
    found = job(ranks=(3,), direct_sums="auto").run(one_declines_while_another_is_late, tmp_path / "said")
    assert {value for _, value in found} == {27.0}
    assert "missing: rank 1" in found[2][0], found


def counted():
    """Return what node and statistics count for direct sums of 4000 bytes, and the pushes of them."""
    x = np.ones(1000, np.float32)
    bpsfast.push_pull(x, True, "counted", out=x)
    before, n = bpsfast.stats(), tensor("counted").n_sums
    for _ in range(10):
        bpsfast.push_pull(x, True, "counted", out=x)
    after = bpsfast.stats()
    bpsfast.barrier()
    assert tensor("counted").n_sums == n + 10
    return after.pushed_bytes - before.pushed_bytes, after.pulled_bytes - before.pulled_bytes


def test_direct_sums_are_counted(job):
    for pushed, pulled in job(ranks=(2,), direct_sums="auto").run(counted):
        assert pushed == 40_000 <= pulled <= 80_000


def closed_under_way():
    x = np.ones(100, np.float32)
    for _ in range(2):
        bpsfast.push_pull(x, True, "closed", out=x)
    if bpsfast.rank() != 0:
        bpsfast.barrier()
        return ""
    said = []

    def other():
        try:
            bpsfast.push_pull(x, True, "closed", out=x)
        except bpsfast.BpsError as exc:
            said.append(type(exc).__name__)

    thread = threading.Thread(target=other)
    thread.start()
    while not process.current().tensors.unit("closed").in_flight:
        os.sched_yield()
    bpsfast.barrier()
    bpsfast.shutdown()
    thread.join(20)
    return said[0]


def test_a_session_that_is_closed_ends_its_direct_sums(job):
    running = job(ranks=(2,), direct_sums="auto")
    outcomes = running.attempt(closed_under_way)
    assert outcomes[0].value in ("ClosedError", "PeerLostError"), outcomes
    running.kill()


def retired_again_and_again():
    """Push tensors that are retired after use; return the node's segments and this process's descriptors after each."""
    session, found = process.current(), []
    for number in range(12):
        name, x = f"edition {number}", np.full(300_000, number + bpsfast.rank(), np.float32)
        session.tensors.declare([TensorSpec(name=name, dtype="float32", shape=x.shape, average=False, direct=True)])
        unit = session.tensors.unit(name)
        for _ in range(3):
            assert bpsfast.push_pull(x, False, name, out=np.empty_like(x))[-1] == total_of(number)
        assert unit.direct.n_sums == 3
        session.retire([unit])
        bpsfast.barrier()
        found.append((bpsfast.counters()["memory_segments"], len(os.listdir("/proc/self/fd"))))
    return found


def test_what_is_retired_makes_room_for_the_next(job):
    for found in job(ranks=(2,), direct_sums="auto").run(retired_again_and_again):
        assert len(set(found[4:])) == 1, found


_SUSPENDED = """
import numpy as np, bpsfast
from bpsfast.trainer import process
bpsfast.init()
rank, size = bpsfast.rank(), bpsfast.size()
for number in range(3):
    x = np.ones(100, np.float32)
    for step in range(4):
        bpsfast.push_pull(x, False, "in each session", out=x)
        assert x[0] == 2 ** (step + 1), (number, step, x[0])
    assert process.current().tensors.unit("in each session").direct.n_sums >= 3
    process.suspend()
    process.resume(size, 0, rank)
print("resumed", flush=True)
bpsfast.shutdown()
"""


def test_tensors_are_summed_directly_again_after_suspend_and_resume():
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "2", "--elastic", "--", sys.executable, "-c", _SUSPENDED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False,
                          env={**clean_environment(os.environ), "BPSFAST_DIRECT_SUMS": "auto"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("resumed") == 2


def test_declined_rounds_are_summed_by_a_helper_that_has_come(job):
    running = job(ranks=(2,), direct_sums="auto", max_helpers=1, transport="tcp", partition_bytes=65536)
    running.run(any_forms, "a helper comes", "float32", False)
    running.add("helper 0")
    for _ in range(100):
        found = running.run(any_forms, "a helper comes", "float32", False)
        if all(n == 1 for n in running.run(joined)):
            break
    else:
        raise AssertionError("it does not come")
    after = running.run(any_forms, "a helper comes", "float32", False)
    assert all(late[i] > early[i] for early, late in zip(found, after) for i in (0, 1)), "both ways are still used"
