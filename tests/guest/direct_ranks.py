"""What ranks of jobs in the guest run whose device's memory a card reads and writes. Imported by them: no pytest."""
from __future__ import annotations

from typing import Any

import numpy as np

import bpsfast
from bpsfast.gpu.host import HostArray
from bpsfast.orchestration.errors import BpsError
from bpsfast.trainer import process


def far(values: Any) -> Any:
    return np.ascontiguousarray(values).view(HostArray)


def sum_in_every_way(n_rounds: int) -> dict[str, Any]:
    """Exact sums of several sizes, of fused gradients of which some are missing, in an order of each rank's
    own. Return how the partitions went, and bytes of all results.
    """
    rank, size = bpsfast.rank(), bpsfast.size()
    found = []
    gradients = bpsfast.Gradients({"big": ((300_001,), "float32"), "small": ((10,), "float32"), "rare": ((20,), "f4")},
                                  device="host", average=False)
    for step in range(n_rounds):
        handles = {}
        for n in np.random.default_rng((rank, step)).permutation([400_001, 70_001, 90_001, 3]):
            x = far((np.arange(n) % 97 * (rank + 1) + step).astype("f4"))
            handles[int(n)] = bpsfast.push_pull_async(x, average=False, name=f"{n}")
        for n, handle in sorted(handles.items()):
            expected = sum(np.arange(n) % 97 * (other + 1) + step for other in range(size))
            assert (handle.wait() == expected).all(), (n, step)
            found.append(np.asarray(handle.wait()).tobytes()[:4096])
        for name in ("rare", "small", "big"):
            if name != "rare" or rank == 0:
                gradients[name][...] = (step + 1) * (rank + 1)
                gradients.ready(name)
        gradients.zero_missing()
        gradients.step()
        assert (gradients.wait("big") == (step + 1) * size * (size + 1) // 2).all()
        assert (gradients.wait("small") == (step + 1) * size * (size + 1) // 2).all()
        assert (gradients.wait("rare") == step + 1).all()
    bpsfast.barrier()
    return {"counters": bpsfast.counters(), "found": found,
            "straight": {unit.name: len(unit.on_device) for unit in process.current().tensors.units()}}


def use_the_name_on_the_host() -> str:
    """A name whose sums are on the device is refused from memory of the host, before anything is sent."""
    bpsfast.push_pull(far(np.ones(200_000, "f4")), name="on the device")
    memory = bpsfast.empty(200_000)
    try:
        bpsfast.push_pull(memory, name="on the device")
    except BpsError as exc:
        bpsfast.push_pull(far(np.ones(200_000, "f4")), name="on the device")  # it is as it was
        return f"{type(exc).__name__}: {exc}"
    return "nothing failed"


def push_until_it_fails(n: int) -> str:
    array = far(np.ones(1 << 20, "f4"))
    for _ in range(n):
        total = bpsfast.push_pull(array, average=False, name="x")
        assert (total == bpsfast.size()).all()
    return "nothing failed"


def leave_in_the_middle() -> None:
    """Close the session while sums are on their way: nobody waits for them."""
    for k in range(4):
        bpsfast.push_pull_async(far(np.ones(1 << 19, "f4")), name=f"left {k}")
    bpsfast.shutdown()


def push() -> float:
    return float(bpsfast.push_pull(far(np.ones(1000, "f4")), name="x")[0])
