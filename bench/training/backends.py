"""The backends of `bench model` that average gradients: bpsfast, torch's DDP over gloo or NCCL, or Horovod."""
from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from bpsfast.bench.harness.contestant import GroupMember, JobMember
from bpsfast.orchestration.errors import ConfigError, LackingError

if TYPE_CHECKING:
    import torch


class Backend(Protocol):
    """One rank's membership in a job."""

    rank: int
    size: int
    local_rank: int

    def distributed(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
                    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        """Return a model and an optimizer that train with all ranks, starting from rank 0's weights."""

    def barrier(self) -> None:
        """Wait for all ranks."""

    def close(self) -> None:
        """Leave the job."""


class _Library(JobMember):
    """Membership by `bpsfast.torch` or `horovod.torch`, which have the same functions."""

    def __init__(self, module: str) -> None:
        super().__init__(importlib.import_module(module))
        self.local_rank = self._library.local_rank()

    def distributed(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
                    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        self._library.broadcast_parameters(model.state_dict(), root_rank=0)
        return model, self._library.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


class _Ddp(GroupMember):
    """Membership in a process group, with DistributedDataParallel's defaults (buckets, buffers from rank 0)."""

    def __init__(self, backend: str) -> None:
        import torch

        self.local_rank = int(os.environ.get("LOCAL_RANK") or os.environ.get("RANK") or 0)
        if backend == "nccl":
            torch.cuda.set_device(self.local_rank % torch.cuda.device_count())
        super().__init__(backend)

    def distributed(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer
                    ) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model), optimizer


#: Name -> function with which a rank joins.
BACKENDS: Mapping[str, Callable[[], Backend]] = {
    "bpsfast": lambda: _Library("bpsfast.torch"), "gloo": lambda: _Ddp("gloo"), "nccl": lambda: _Ddp("nccl"),
    "horovod": lambda: _Library("horovod.torch")}


def check(name: str) -> None:
    """Raise `ConfigError` if there is no backend *name*, and `LackingError` if it cannot run here."""
    if name not in BACKENDS:
        raise ConfigError(f"backend {name!r} is none of {', '.join(BACKENDS)}")
    if importlib.util.find_spec("torch") is None:
        raise LackingError("these models need torch: pip install torch")
    import torch
    import torch.distributed as dist

    if name == "gloo" and not dist.is_gloo_available():
        raise LackingError("backend gloo: this torch is built without it")
    if name == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise LackingError("backend nccl: " + ("torch sees no GPU" if dist.is_nccl_available() else
                                               "this torch is built without it"))
    if name == "horovod" and importlib.util.find_spec("horovod") is None:
        raise LackingError("backend horovod is not installed (pip install horovod); bpsfast.hvd, which has its API, "
                           "is measured as backend bpsfast")
