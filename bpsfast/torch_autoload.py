"""What `import torch` calls (entry point ``torch.backends``): with BPSFAST_TORCH_AUTOLOAD=1 the name "bpsfast" is known
to `torch.distributed` afterwards, without any import in the program.

Nothing of bpsfast is loaded before a process group is made, and nothing here can fail: that would break `import torch`.
"""
from __future__ import annotations

import os
from typing import Any


def register() -> None:
    """Register the backend's name if the environment asks for it."""
    if os.environ.get("BPSFAST_TORCH_AUTOLOAD", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    try:
        import torch.distributed as dist

        dist.Backend.register_backend("bpsfast", _create, extended_api=True, devices=["cpu"])
    except (ImportError, AttributeError):  # a torch without distributed, or one that we do not know
        return


def _create(options: Any, more: Any = None) -> Any:
    from .torch.backend.process_group import create

    return create(options, more)
