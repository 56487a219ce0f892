"""Handwritten digits with torchft: replicas are lost and return while the others train on; bpsfast sums.

    python examples/mnist_torchft.py

Three replicas train. The last one is killed in the middle of a step and started again while the others train on; it
gets its state from them. At the end all three have the same weights. torchft decides which replicas take part in a
step; `ReplicaGroup` is its process group.
"""
import argparse
import hashlib
import os
import signal
import subprocess
import sys
from datetime import timedelta

import mnist_ddp
import torch
import torch.distributed as dist
from torchft import Manager, Optimizer
from torchft.coordination import LighthouseServer

from bpsfast.torch.backend import ReplicaGroup

#: Steps of all replicas after which the training ends, and the earlier step in which one replica is killed.
N_STEPS, KILLED = 60, 20
N_REPLICAS, BATCH = 3, 32
TIMEOUT = timedelta(seconds=60)


def replica(number, lighthouse, dies):
    """Train as one replica, which kills itself if *dies*."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    training, testing = mnist_ddp.digits()
    network = mnist_ddp.network()
    sgd = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)

    n_full = 0  # steps that all replicas have made together

    def load(state):
        nonlocal n_full
        n_full = state["n_full"]
        network.load_state_dict(state["network"])
        sgd.load_state_dict(state["sgd"])

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(pg=ReplicaGroup(TIMEOUT), load_state_dict=load,
                      state_dict=lambda: {"n_full": n_full, "network": network.state_dict(), "sgd": sgd.state_dict()},
                      min_replica_size=2, rank=0, world_size=1, store_addr="127.0.0.1", store_port=store.port,
                      hostname="127.0.0.1", lighthouse_addr=lighthouse, replica_id=f"digits_{number}", timeout=TIMEOUT)
    optimizer = Optimizer(manager, sgd)
    while n_full < N_STEPS:
        step = manager.current_step()
        draw = torch.Generator().manual_seed(1000 * step + number)
        images, labels = training[torch.randint(len(training), (BATCH,), generator=draw)]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(network(images), labels)
        if dies and n_full == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        # torchft's DistributedDataParallel (0.2.0) raises an AssertionError if a call fails on the CPU.
        for work in [manager.allreduce(weight.grad) for weight in network.parameters()]:
            work.wait()
        optimizer.step()
        n_full += manager.current_step() > step and manager.num_participants() == N_REPLICAS
        print(f"replica {number}: step {step} of {manager.num_participants()} replicas, loss {loss.item():.4f}",
              flush=True)
    network.eval()
    images, labels = testing[:]
    read_right = (network(images).argmax(1) == labels).float().mean()
    weights = b"".join(weight.detach().numpy().tobytes() for weight in network.parameters())
    print(f"replica {number}: weights {hashlib.sha256(weights).hexdigest()[:16]}, {read_right:.1%} of the test images "
          "read right", flush=True)
    manager.shutdown()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replica", type=int)
    parser.add_argument("--lighthouse")
    parser.add_argument("--dies", action="store_true")
    options = parser.parse_args()
    if options.replica is not None:
        replica(options.replica, options.lighthouse, options.dies)
        return 0
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, join_timeout_ms=5000)
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    def start(number, *more):
        return subprocess.Popen([sys.executable, __file__, "--replica", str(number), "--lighthouse", address, *more])

    replicas = [start(number) for number in range(N_REPLICAS - 1)] + [start(N_REPLICAS - 1, "--dies")]
    try:
        assert replicas[-1].wait() == -signal.SIGKILL
        print(f"replica {N_REPLICAS - 1} is lost, and started again", flush=True)
        replicas[-1] = start(N_REPLICAS - 1)
        return max(process.wait() for process in replicas)
    finally:
        for process in replicas:
            process.kill()
        lighthouse.shutdown()


if __name__ == "__main__":
    sys.exit(main())
