"""The `torch.distributed` backend "bpsfast".

    import bpsfast.torch.backend
    torch.distributed.init_process_group("bpsfast")

registers it. Without the import: BPSFAST_TORCH_AUTOLOAD=1 (`bpsfast.torch_autoload`).

    process_group   torch's calls, carried out by a `collectives.Group` in the order of the calls
    base_group      how a call starts, how a group ends, and its names in torch
    replica_group   a group that is made again with other ranks, as torchft asks for it
    device_calls    calls with GPU tensors, through staging buffers in shared memory
    work            what a call returns
    messages        send, receive, the monitored barrier
    operands        tensors as memory, dense and sparse
    worlds          the sessions behind groups, and env:// under launchers that are not torch's
    torch_compat    what depends on the version of torch or on its C++ bindings
"""
from __future__ import annotations

from ...base import hooks
from .process_group import ProcessGroup, monitored_barrier
from .replica_group import ReplicaGroup
from .worlds import end_with_torchs_groups

__all__ = ["ProcessGroup", "ReplicaGroup", "monitored_barrier"]

hooks.add_torch_backend()
end_with_torchs_groups()
