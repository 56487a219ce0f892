"""The training of mnist_ddp.py on Ray Train, which makes the workers' process group by name.

    python examples/mnist_ray.py
"""
import sys
from pathlib import Path

import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

HERE = str(Path(__file__).resolve().parent)


def train():
    """Train on one of Ray's workers, which already has a process group."""
    import torch

    sys.path.insert(0, HERE)
    import mnist_ddp

    torch.set_num_threads(1)  # like torchrun
    print(f"rank {torch.distributed.get_rank()}: weights {mnist_ddp.train()}", flush=True)


def main():
    ray.init(num_cpus=2, include_dashboard=False, runtime_env={"env_vars": {"BPSFAST_TORCH_AUTOLOAD": "1"}})
    TorchTrainer(train, torch_config=TorchConfig(backend="bpsfast"),
                 scaling_config=ScalingConfig(num_workers=2)).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
