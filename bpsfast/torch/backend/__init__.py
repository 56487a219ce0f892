"""The `torch.distributed` backend "bpsfast".

    import bpsfast.torch.backend
    torch.distributed.init_process_group("bpsfast")

registers it. Without the import: BPSFAST_TORCH_AUTOLOAD=1 (`bpsfast.torch_autoload`).

    process_group   torch's collective calls, which a `collectives.Group` executes in the order of the calls
    base_group      the start of a call, the end of a group, and its names in torch
    replica_group   a group that is made again with other ranks, for torchft
    device_calls    calls with GPU tensors, through staging buffers in shared memory
    work            the object that a call returns
    messages        send, receive, the monitored barrier
    operands        tensors as memory, dense and sparse
    worlds          the sessions behind groups, and env:// under other launchers than torch's
    torch_compat    differences between versions of torch, and its C++ bindings
"""
from __future__ import annotations

from ...base import hooks
from .process_group import ProcessGroup, monitored_barrier
from .replica_group import ReplicaGroup
from .worlds import end_with_torchs_groups

__all__ = ["ProcessGroup", "ReplicaGroup", "monitored_barrier"]

hooks.add_torch_backend()
end_with_torchs_groups()
