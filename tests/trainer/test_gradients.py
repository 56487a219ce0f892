"""The step API on real ranks, and the example that uses it."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bpsfast
from bpsfast.trainer import process
from bpsfast.trainer.gradients import Gradients

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_trainer.py"
LAYERS = {"conv.weight": ((16, 3, 3, 3), "f4"), "conv.bias": ((16,), "f4"), "fc.weight": ((1500, 1000), "f4"),
          "fc.bias": ((1000,), "f4"), "scale": ((), "f4"), "half": ((7,), "f2"), "nothing": ((0,), "f4")}


@pytest.fixture(params=[((2, 1), "tcp"), ((2, 1), "shm"), ((3,), "auto")], ids=["tcp", "shm", "one-node"])
def ranks(request, shared_job):
    shape, transport = request.param
    return shared_job(ranks=shape, transport=transport)


@pytest.fixture
def three(shared_job):
    return shared_job(ranks=(3,), transport="auto")


def steps(prefix, group_small, average, n):
    """Fill by backward order, wait in forward order, before and after the step's end; return the first wrong place."""
    g = Gradients(LAYERS, group_small, average, prefix)
    for step in range(n):
        for name in reversed(list(g)):
            g[name][...] = step + bpsfast.rank()
            g.ready(name)
        want = (step + 1) if average else 3 * step + 3
        for ended in (False, True):
            for name in g:
                view = g.wait(name)
                shape, dtype = LAYERS[name]
                if view.shape != shape or view.dtype != np.dtype(dtype) or view.flags.writeable or (view != want).any():
                    return step, ended, name, view
            if not ended:
                g.step()
    return None


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("group_small", [True, False])
def test_steps(ranks, group_small, average):
    assert ranks.run(steps, f"steps {group_small} {average} ", group_small, average, 10) == [None] * 3


def rounds_of_units():
    g = Gradients({f"t{i}": ((100,), "f4") for i in range(50)}, prefix="fused ")
    return len({id(g._session.tensors.unit(f"fused {name}")) for name in g})


def test_small_tensors_are_one_round(three):
    assert three.run(rounds_of_units) == [1] * 3


def in_the_segment():
    g = Gradients(LAYERS, prefix="segment ")
    session = process.current()
    return all(session.memory.locate(g[name].ctypes.data, g[name].nbytes) is not None for name in g)


def test_arrays_lie_in_the_segment(three):
    assert three.run(in_the_segment) == [True] * 3


def filled():
    """`fill` and `deliver` move private memory in and out."""
    g = Gradients(LAYERS, prefix="filled ")
    for step in range(3):
        private = {name: np.full(shape, step + bpsfast.rank(), dtype) for name, (shape, dtype) in LAYERS.items()}
        for name, array in private.items():
            g.fill(name, array.ctypes.data, array.nbytes)
        for name, array in private.items():
            g.deliver(name, array.ctypes.data, array.nbytes)
            if (array != step + 1).any():
                return name
        g.step()
    return None


def test_fill_and_deliver(ranks):
    assert ranks.run(filled) == [None] * 3


def overlapping():
    """The trainer's own order: wait for a layer before its next forward, end the step before the next backward."""
    g = Gradients(LAYERS, prefix="overlapping ")
    seen = []
    for step in range(5):
        if step:
            for name in g:
                seen.append(float(g.wait(name).sum(dtype="f8")) == (step) * g[name].size)
            g.step()
        for name in reversed(list(g)):
            g[name][...] = step + bpsfast.rank()
            g.ready(name)
    g.step()
    return all(seen) and len(seen) == 4 * len(LAYERS)


def test_waiting_may_reach_into_the_next_forward(ranks):
    assert ranks.run(overlapping) == [True] * 3


def zeros():
    g = Gradients(LAYERS, average=False, prefix="zeros ")
    if bpsfast.rank() == 0:
        for name in g:
            g[name][...] = 5
            g.ready(name)
    missing = g.zero_missing()
    g.step()
    return len(missing), {float(g.wait(name).sum(dtype="f8")) / max(1, g[name].size) for name in g if g[name].size}


def test_missing_gradients_may_be_zero(three):
    everything = len(LAYERS)
    assert three.run(zeros) == [(0, {5.0}), (everything, {5.0}), (everything, {5.0})]


def misuse(kind):
    g = Gradients({"a": ((3,), "f4"), "b": ((3,), "f4")}, prefix=f"misuse {kind} ")
    if kind == "order":
        Gradients({"a": ((3,), "f4"), "b": ((3,), "f4")}, order=["a", "a"])
    if kind == "unknown":
        g.ready("c")
    if kind == "never ready":
        g.wait("a")
    g.ready("a")
    if kind == "twice":
        g.ready("a")
    if kind == "fused neighbour":
        g.wait("a")
    if kind == "missing":
        g.step()
    if kind == "size":
        g.fill("b", g["a"].ctypes.data, 4)


@pytest.mark.parametrize(("kind", "error", "text"), [
    ("unknown", "MismatchError", "no gradient 'c'"), ("never ready", "MismatchError", "never ready"),
    ("twice", "BusyError", "'a' is ready for the second time"), ("fused neighbour", "MismatchError", "together with b"),
    ("missing", "MismatchError", "not ready: b"), ("size", "MismatchError", "12 bytes"),
    ("order", "MismatchError", "the names of all 2 gradients, got ['a', 'a']"),
])
def test_misuse(three, kind, error, text):
    for outcome in three.attempt(misuse, kind):
        assert outcome.error == error and text in outcome.text


def ordered():
    tensors, found = {name: ((1 << 20,), "f4") for name in "abc"}, []
    for order in ("cab", "bca"):
        g = Gradients(tensors, prefix="ordered ", order=order)
        for name in g:
            g[name][:] = bpsfast.rank() + 1
            g.ready(name)
        g.step()
        found.append(sorted(g, key=lambda name: g._gradients[name].unit.first_part))
        assert {float(g.wait(name)[0]) for name in g} == {2.0}
    return found


def test_the_first_order_counts(three):
    assert three.run(ordered) == [[["c", "a", "b"]] * 2] * 3


def resumed():
    g = Gradients({"a": ((3,), "f4"), "b": ((3,), "f4")}, prefix="resumed ")
    g.ready("a")
    try:
        g.step()
    except bpsfast.MismatchError:
        g.ready("b")
    g.step()
    return g.wait("b").tolist()


def test_a_step_goes_on_after_the_error(three):
    assert three.run(resumed) == [[0, 0, 0]] * 3


def made_again():
    values = []
    for attempt in range(3):
        g = Gradients({"a": ((3,), "f4"), "b": ((5000, 1000), "f4")}, prefix="again ")
        g["a"][:] = attempt
        g["b"][:] = attempt
        g.ready("b")
        g.ready("a")
        g.step()
        values += [float(g.wait("a")[0]), float(g.wait("b")[0, 0])]
    return values


def test_the_same_gradients_may_be_made_again(three):
    assert three.run(made_again) == [[0, 0, 1, 1, 2, 2]] * 3


def lists_differ():
    names = {"a": ((3,), "f4")} if bpsfast.rank() else {"a": ((4,), "f4")}
    Gradients(names, prefix="differ ")["a"][:] = 1


def test_ranks_with_different_models(three):
    for outcome in three.attempt(lists_differ):
        assert outcome.error == "MismatchError" and "shape" in outcome.text and "differ a" in outcome.text


def nothing():
    g = Gradients({}, prefix="none ")
    g.step()
    return len(g)


def test_no_gradients_at_all(three):
    assert three.run(nothing) == [0] * 3


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) < 80


def test_the_example_trains():
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "3", "--nodes", "2", "--set", "transport=tcp", "--",
               sys.executable, str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same parameters on 3 of 3 ranks" in done.stdout


_RANK_1_DIFFERS = f"""
import sys
sys.path.insert(0, {str(EXAMPLE.parent)!r})
import bpsfast, custom_trainer

def update(parameters, gradients, names):
    for name in names:
        parameters[name] -= gradients.wait(name) * (2 if bpsfast.rank() == 1 else 1)

custom_trainer.N_STEPS, custom_trainer.update = 3, update
custom_trainer.main()
"""


def test_the_example_says_how_many_ranks_differ():
    command = [sys.executable, "-m", "bpsfast", "run", "-n", "3", "--set", "timeout_s=20", "--", sys.executable, "-c",
               _RANK_1_DIFFERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "same parameters on 2 of 3 ranks" in done.stdout
