"""The training of `bench autotune`: four layers of WIDTH, STEPS steps. Prints each rank's weights and step times."""
from __future__ import annotations

import hashlib
import os
import time


def main() -> None:
    """Train with WIDTH, STEPS and CROSSES (1: no barrier between steps) from the environment.

    In half of the steps gradients are in shared memory at the start, so that tuning moves those as well.
    """
    import torch

    import bpsfast.torch as bps
    from bpsfast.bench.harness import job_output

    torch.set_num_threads(1)
    bps.init()
    torch.manual_seed(bps.rank())
    width = int(os.environ["WIDTH"])
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
    bps.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = bps.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(),
                                         cross_barrier=os.environ.get("CROSSES") == "1")
    times_s = []
    for step in range(int(os.environ["STEPS"])):
        begin = time.monotonic()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        model(torch.randn(8, width)).square().mean().backward()
        optimizer.step()
        times_s.append(time.monotonic() - begin)
    weights = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    job_output.tell(bps.rank(), weights=weights, times_s=times_s)
    bps.shutdown()


if __name__ == "__main__":
    main()
