"""For `bench device`: measures whether hooks that push gradients delay the backward pass on the device, or the host.

For each layer the device multiplies matrices and writes a gradient, whose hook begins a push_pull, as in a framework.
The time of the same pass without communication must not be exceeded.
"""
from __future__ import annotations

import time
from typing import NamedTuple

from bpsfast.bench.device.hardware import Hardware, Moment


class Step(NamedTuple):
    """Seconds of one step: `stream_s` from the first kernel to the end of the last one, on the device's clock;
    `hooks_s` and `longest_s` of the host in all hooks and in the longest one; `host_s` until everything is enqueued;
    `step_s` until the stream has the sums.
    """

    stream_s: float
    hooks_s: float
    longest_s: float
    host_s: float
    step_s: float


class BackwardPass:
    """The backward pass of *n_layers* layers, each with *n_products* products of matrices and *nbytes* of gradient."""

    def __init__(self, hardware: Hardware, rank: int, size: int, n_layers: int, nbytes: int, n_products: int) -> None:
        self._hardware = hardware
        self._rank, self._size = rank, size
        self._gradients = [hardware.array(nbytes // 4) for _ in range(n_layers)]
        self._n_products = n_products
        self._n_steps = 0

    def step(self, exchanges: bool) -> Step:
        """Make one step, with or without communication."""
        hardware = self._hardware
        self._n_steps += 1
        value = float(self._rank + self._n_steps % 64)
        hooks_s: list[float] = []
        handles = []
        hardware.idle()
        began = time.perf_counter()
        first: Moment = hardware.moment()
        for i, gradient in enumerate(self._gradients):
            hardware.compute(self._n_products)
            hardware.set(gradient, value)
            before = time.perf_counter()
            if exchanges:
                handles.append(hardware.begin(gradient, f"backward {i}", average=False))
            hooks_s.append(time.perf_counter() - before)
        last: Moment = hardware.moment()
        enqueued = time.perf_counter()
        for handle in handles:
            handle.wait()
        hardware.idle()
        ended = time.perf_counter()
        return Step(last.since(first), sum(hooks_s), max(hooks_s), enqueued - began, ended - began)

    def n_wrong(self) -> int:
        """Return how many elements are not the sum of all ranks' gradients of the last step, which exchanged."""
        value = float(sum(rank + self._n_steps % 64 for rank in range(self._size)))
        return sum(int((self._hardware.read(gradient) != value).sum()) for gradient in self._gradients)
