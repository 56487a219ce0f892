"""The `torch.distributed` backend "bpsfast".

    import bpsfast.torch.backend
    torch.distributed.init_process_group("bpsfast")

registers it. Without the import: `bpsfast torch-autoload`.
"""
from __future__ import annotations

from . import shim
from .barrier import monitored_barrier
from .process_group import ProcessGroup, create

__all__ = ["ProcessGroup", "monitored_barrier"]

shim.register(create)
