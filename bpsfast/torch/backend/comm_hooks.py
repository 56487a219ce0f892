"""Communication hooks of torch's DistributedDataParallel that are written in C++ for torch's own groups."""
from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from . import shim


@functools.cache
def serve() -> None:
    """Let DistributedDataParallel over a group of ours take the hook in Python in place of the built-in FP16_COMPRESS.

    That one wants its future's value as a list of C++ tensors, which a future made in Python never has.
    """
    module: Any = torch.nn.parallel.DistributedDataParallel
    builtin = getattr(module, "_register_builtin_comm_hook", None)
    if builtin is None:
        return

    @functools.wraps(builtin)
    def register(self: Any, comm_hook_type: Any) -> None:
        is_fp16 = comm_hook_type == dist.BuiltinCommHookType.FP16_COMPRESS
        if is_fp16 and dist.get_backend(self.process_group) == shim.NAME:
            from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

            self.register_comm_hook(self.process_group, fp16_compress_hook)
        else:
            builtin(self, comm_hook_type)

    module._register_builtin_comm_hook = register
