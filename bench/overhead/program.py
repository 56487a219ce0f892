"""A rank of `bench overhead`: times backward passes with the optimizer's hooks and without.

Run by path (`bpsfast run -n 2 -- python program.py JSON`), so that other versions of bpsfast can run it: it uses
only their public names. Rank 0 prints one line for `harness.job_output`.
"""
from __future__ import annotations

import json
import sys
import threading
import time


class CountingLock:
    """A lock that counts how often the main thread takes it while `is_counting`."""

    is_counting = False
    n_taken = 0

    def __init__(self, inner) -> None:
        self._inner = inner

    def acquire(self, *args, **kwargs):
        if CountingLock.is_counting and threading.get_ident() == _MAIN:
            CountingLock.n_taken += 1
        return self._inner.acquire(*args, **kwargs)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error) -> None:
        self._inner.release()

    def __getattr__(self, name):
        return getattr(self._inner, name)


_MAIN = threading.get_ident()


def main() -> None:
    """Measure with the JSON object in the first argument: n_tensors, n_elements, n_steps, counts (bool)."""
    options = json.loads(sys.argv[1])
    if options["counts"]:
        lock, rlock = threading.Lock, threading.RLock
        setattr(threading, "Lock", lambda: CountingLock(lock()))  # noqa: B010
        setattr(threading, "RLock", lambda: CountingLock(rlock()))  # noqa: B010

    import torch

    import bpsfast.torch as bps

    torch.set_num_threads(1)
    bps.init()
    n_tensors = options["n_tensors"]

    def parameters():
        return [torch.nn.Parameter(torch.ones(options["n_elements"])) for _ in range(n_tensors)]

    wrapped, plain = parameters(), parameters()
    named = [(f"layer{i}", parameter) for i, parameter in enumerate(wrapped)]
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(wrapped, lr=0.0), named_parameters=named)
    n_calls = 0

    def count(frame, event, argument) -> None:
        nonlocal n_calls
        n_calls += event == "call"

    def backward_s(of) -> float:
        for parameter in of:
            parameter.grad = None
        loss = torch.stack([parameter.sum() for parameter in of]).sum()
        begin = time.perf_counter()
        loss.backward()
        return time.perf_counter() - begin

    samples_s, n_locks = [], 0
    for step in range(options["n_steps"] + 5):
        without_s = backward_s(plain)
        is_counted = options["counts"] and step == options["n_steps"] + 4
        if is_counted:
            n_locks, CountingLock.is_counting = CountingLock.n_taken, True
            sys.setprofile(count)
        with_s = backward_s(wrapped)
        if is_counted:
            sys.setprofile(None)
            CountingLock.is_counting, n_locks = False, CountingLock.n_taken - n_locks
        optimizer.step()
        if step >= 5:
            samples_s.append((with_s - without_s) / n_tensors)
    if bps.rank() == 0:
        found = {"rank": 0, "samples_s": samples_s, "calls": n_calls / n_tensors, "locks": n_locks / n_tensors}
        print(f"bpsfast bench: {json.dumps(found)}", flush=True)
    bps.shutdown()


if __name__ == "__main__":
    main()
