"""The `torch.distributed` backend "bpsfast".

    import bpsfast.torch.backend
    torch.distributed.init_process_group("bpsfast")

registers it. Without the import: BPSFAST_TORCH_AUTOLOAD=1 (`bpsfast.torch_autoload`).

    process_group   torch's calls -> a `collective.Group` and its conductor, or messages
    base_group      who a group is, how its calls are started, how it ends
    work            what a call returns
    launched        env:// where the launcher is not torch's
    worlds          sessions, each made by the first group of its ranks
    operands        tensors as memory; sparse: those that are not dense
    messages        send, receive, the monitored barrier
    shim            what differs between versions of torch
"""
from __future__ import annotations

from ...torch_autoload import add_backend
from .barrier import monitored_barrier
from .process_group import ProcessGroup

__all__ = ["ProcessGroup", "monitored_barrier"]

add_backend()
