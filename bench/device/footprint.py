"""For `bench device`: measures memory per byte of gradient: on the device, pinned by each rank, in all segments."""
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import bpsfast
from bpsfast.trainer.process import current

if TYPE_CHECKING:
    from bpsfast.bench.device.hardware import Hardware

#: Methods to exchange gradients on a device, in the order in which they are measured.
METHODS = ("push_pull in place", "push_pull", "Gradients", "DistributedOptimizer", "DistributedOptimizer fp16")
_N_TENSORS = 4


class Footprint(NamedTuple):
    """Bytes that a method added for *nbytes* of gradient.

    On the device, without the gradients themselves: after the steps, and the peak within one (None: unknown). On the
    host: this rank's input segments, the result segments that it maps, the pinned bytes of both, and all segments of
    the machine.
    """

    method: str
    nbytes: int
    device_nbytes: int | None
    device_peak_nbytes: int | None
    input_nbytes: int
    result_nbytes: int
    pinned_nbytes: int
    machine_nbytes: int


class _Count(NamedTuple):
    device: int | None
    inputs: int
    results: int
    pinned: int
    machine: int


def measure(hardware: Hardware, method: str, nbytes: int) -> Footprint:
    """Measure some steps of *method* with *nbytes* of gradients; all ranks call this at once."""
    bpsfast.barrier()
    before = _count(hardware)
    with _prepared(hardware, method, nbytes) as (own_nbytes, step):
        for _ in range(3):
            step()
        hardware.idle()
        with _peak(hardware) as peak:
            step()
            hardware.idle()
        bpsfast.barrier()
        after = _count(hardware)
    known = after.device is not None and before.device is not None
    return Footprint(
        method, nbytes, after.device - before.device - own_nbytes if known else None,  # type: ignore[operator]
        peak[0] - before.device - own_nbytes if known else None,  # type: ignore[operator]
        after.inputs - before.inputs, after.results - before.results, after.pinned - before.pinned,
        after.machine - before.machine)


def _count(hardware: Hardware) -> _Count:
    session = current()
    inputs = sum(segment.nbytes for (owner, _), segment in session.memory.segments.items() if owner == "rank")
    results = sum(segment.nbytes for segment in session.memory.segments.values()) - inputs
    known = filter(None, session.devices._pinned.values())  # None: not pinned; there is no public reader
    pinned = sum(segment.nbytes for _, segment in known)
    return _Count(hardware.allocated_nbytes(), inputs, results, pinned,
                  bpsfast.counters()["memory_segments"])


@contextlib.contextmanager
def _peak(hardware: Hardware) -> Iterator[list[int]]:
    """Yield a list whose element is, at the end, the peak of the bytes of the device's arrays."""
    found = [0]
    if hardware.allocated_nbytes() is None:
        yield found
        return
    import torch

    torch.cuda.reset_peak_memory_stats()
    others = (hardware.allocated_nbytes() or 0) - torch.cuda.memory_allocated()
    yield found
    found[0] = torch.cuda.max_memory_allocated() + others


@contextlib.contextmanager
def _prepared(hardware: Hardware, method: str, nbytes: int) -> Iterator[tuple[int, Callable[[], Any]]]:
    """Yield the bytes of the user's own gradients and parameters on the device, and a function that makes a step."""
    n = nbytes // _N_TENSORS // 4
    if method == "Gradients":
        device = "host" if hardware.name == "host" else "cuda"
        gradients = bpsfast.Gradients({f"{method} {i}": ((n,), np.float32) for i in range(_N_TENSORS)}, device=device)
        yield nbytes, lambda: _gradients_step(gradients)
        return
    if method.startswith("DistributedOptimizer"):
        weights, optimizer = _model(hardware, method, n)
        yield 2 * nbytes, lambda: _model_step(weights, optimizer)
        return
    arrays = [hardware.array(n) for _ in range(_N_TENSORS)]
    names = [f"{method} {i}" for i in range(_N_TENSORS)]
    results: list[Any] = []
    if method == "push_pull in place":
        yield nbytes, lambda: [handle.wait() for handle in
                               [hardware.begin(x, name, average=True) for x, name in zip(arrays, names)]]
        return

    def step() -> None:
        results[:] = [bpsfast.push_pull(x, name=name) for x, name in zip(arrays, names)]

    yield nbytes, step


def _gradients_step(gradients: bpsfast.Gradients) -> None:
    for name in gradients:
        gradients.ready(name)
    gradients.step()
    for name in gradients:
        gradients.wait(name)


def _model(hardware: Hardware, method: str, n: int) -> tuple[Any, Any]:
    import torch

    from bpsfast import torch as bps

    device = "cpu" if hardware.name == "host" else "cuda"
    weights = [torch.nn.Parameter(torch.zeros(n, device=device)) for _ in range(_N_TENSORS)]
    named = [(f"{method} {i}", weight) for i, weight in enumerate(weights)]
    compression = bps.Compression.fp16 if method.endswith("fp16") else bps.Compression.none
    return weights, bps.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1), named_parameters=named,
                                             compression=compression)


def _model_step(weights: Any, optimizer: Any) -> None:
    import torch

    for weight in weights:  # zeroed in place, so that the allocator does not hold old and new gradients at once
        if weight.grad is not None:
            weight.grad.zero_()
    torch.stack([weight.sum() for weight in weights]).sum().backward()
    optimizer.step()
