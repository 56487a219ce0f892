"""The `torch.distributed` backend "bpsfast".

    import bpsfast.torch.backend
    torch.distributed.init_process_group("bpsfast")

registers it. Without the import: BPSFAST_TORCH_AUTOLOAD=1 (`bpsfast.torch_autoload`).

    process_group   torch's calls -> a `collective.Group` and its conductor, or messages
    base_group      how a group's calls are started, how it ends; named_group: what torch calls it
    replica_group   a group of other ranks again and again, as torchft asks for it
    work            what a call returns
    launched        env:// where the launcher is not torch's
    worlds          sessions, each made by the first group of its ranks
    operands        tensors as memory; sparse: those that are not dense
    messages        send, receive, the monitored barrier
    shim            what depends on the version of torch, or on its C++
"""
from __future__ import annotations

from ...torch_autoload import add_backend
from .barrier import monitored_barrier
from .process_group import ProcessGroup
from .replica_group import ReplicaGroup
from .worlds import end_with_torchs_groups

__all__ = ["ProcessGroup", "ReplicaGroup", "monitored_barrier"]

add_backend()
end_with_torchs_groups()
