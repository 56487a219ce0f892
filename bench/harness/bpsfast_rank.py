"""One rank of a bpsfast job, with all operations that benchmarks measure."""
from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.compressed import step
from bpsfast.bench.harness import memory_bound, pattern
from bpsfast.bench.harness.contestant import JobMember, Operation
from bpsfast.bench.post import ping_pong
from bpsfast.collectives.p2p import P2PEndpoint
from bpsfast.tools.planner import catalog
from bpsfast.trainer.process import current


class BpsfastRank(JobMember):
    """One rank. Variants of `operation`:

    ``numpy``
        push_pull of an array of `bpsfast.empty`.
    ``torch``
        push_pull_inplace of a private tensor.
    ``gradients``, ``one tensor``
        ResNet-50's gradients with `bpsfast.Gradients`, and the same bytes as one array (*nbytes* has no effect).
    ``gradients of MODEL/N``
        Those of a built-in model, each tensor N times smaller, in float32 (*nbytes* has no effect).
    ``memory of OPERATION``
        What memory alone takes for the arrays of ``numpy`` or ``torch``; ``, past caches`` with non-temporal stores
        (`memory_bound`).
    ``ping-pong``
        A message from rank 0 to rank 1 and back.
    ``step of [...]``
        A training step of a built-in model with a codec (`compressed.step`).
    """

    def __init__(self) -> None:
        super().__init__(bpsfast)
        self._memory = memory_bound.RankMemory()
        self._burning: threading.Event | None = None

    def operation(self, variant: str, nbytes: int) -> Operation:
        if variant == "gradients":
            variant = "gradients of resnet50"
        if variant.startswith("gradients of "):
            model, _, divisor = variant.removeprefix("gradients of ").partition("/")
            return self._gradients_of(model, int(divisor or 1))
        if memory_bound.is_row(variant):
            return self._memory.operation(variant, nbytes)
        if variant.startswith(step.PREFIX):
            return step.operation(variant, self.rank, self.size)
        make = {"numpy": self._numpy, "torch": self._torch, "one tensor": self._numpy,
                ping_pong.VARIANT: self._ping_pong}[variant]
        return make(nbytes)

    def close(self) -> None:
        """Stop `burn` and leave the job."""
        self.burn(False)
        super().close()

    # -- operations ------------------------------------------------------------------------------------------------

    def _numpy(self, nbytes: int) -> Operation:
        array, name = bpsfast.empty(nbytes // 4, np.float32), f"numpy {nbytes}"
        result: list[Any] = [None]

        def run() -> None:
            result[0] = bpsfast.push_pull(array, average=False, name=name)

        return Operation(run, lambda known: pattern.fill(array, self.rank, known),
                         lambda: pattern.n_wrong(result[0], self.size))

    def _torch(self, nbytes: int) -> Operation:
        import torch

        from bpsfast.torch import push_pull_inplace

        tensor, name = torch.zeros(nbytes // 4, dtype=torch.float32), f"torch {nbytes}"
        array = tensor.numpy()
        return pattern.operation(lambda: push_pull_inplace(tensor, average=False, name=name), array, self.rank,
                                 self.size)

    def _gradients_of(self, model: str, divisor: int) -> Operation:
        shapes = catalog.load(model).shapes if divisor == 1 else catalog.divided(model, divisor)
        gradients = bpsfast.Gradients({name: (shape, np.float32) for name, shape in shapes.items()}, average=False)
        backward, forward = list(shapes)[::-1], list(shapes)
        results: dict[str, Any] = {}

        def run() -> None:
            for name in backward:
                gradients.ready(name)
            for name in forward:
                results[name] = gradients.wait(name)
            gradients.step()

        def fill(known: bool) -> None:
            for name in forward:
                pattern.fill(gradients[name].reshape(-1), self.rank, known)

        def n_wrong() -> int:
            return sum(pattern.n_wrong(results[name].reshape(-1), self.size) for name in forward)

        return Operation(run, fill, n_wrong)

    def _ping_pong(self, nbytes: int) -> Operation:
        endpoint, array = current().extension(P2PEndpoint), np.zeros(nbytes, np.uint8)
        address = array.ctypes.data
        return ping_pong.operation(
            self.rank, array, lambda to: endpoint.send(0, to, 0, address, nbytes, array).wait(),
            lambda source: endpoint.receive(0, source, 0, address, nbytes, array).wait())

    # -- other measurements ----------------------------------------------------------------------------------------

    def counters(self) -> dict[str, int]:
        """Return the counters of this machine's node."""
        return bpsfast.counters()

    def yield_to_all(self) -> None:
        """Set the scheduling class of all threads to idle."""
        for thread in os.listdir("/proc/self/task"):
            os.sched_setscheduler(int(thread), os.SCHED_IDLE, os.sched_param(0))

    def burn(self, burning: bool) -> None:
        """Start or stop a thread that only runs Python code."""
        if self._burning is not None:
            self._burning.set()
            self._burning = None
        if burning:
            stop = self._burning = threading.Event()
            threading.Thread(target=_burn, args=(stop,), daemon=True).start()

    def process(self) -> dict[str, Any]:
        """Return this process's private resident bytes, CPU seconds, and the heavy modules that it has imported."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        resident = sum(int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile"))
        return {"pid": os.getpid(), "resident_outside_segments_nbytes": resident, "cpu_s": time.process_time(),
                "modules": sorted({"numba", "torch", "llvmlite", "zmq"} & set(sys.modules))}


def _burn(stop: threading.Event) -> None:
    x = 0
    while not stop.is_set():
        for _ in range(10_000):
            x += 1
