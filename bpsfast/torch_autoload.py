"""Registers the `torch.distributed` backend "bpsfast".

`bpsfast.torch.backend` does so, or, without an import in the program, `import torch` itself (entry point
``torch.backends``) if BPSFAST_TORCH_AUTOLOAD=1. Nothing of bpsfast is loaded before a process group is made, and
nothing here can fail: that would break `import torch`.
"""
from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

#: All that torch's handler of env:// needs, and torchrun sets; scripts for other launchers often set some of them.
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Register the backend's name if the environment asks for it."""
    if os.environ.get("BPSFAST_TORCH_AUTOLOAD", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    with contextlib.suppress(ImportError, AttributeError):  # a torch without distributed, or one that we do not know
        add_backend()


def add_backend() -> None:
    """Register the backend with torch, and let ``env://`` support other launchers than torchrun. Idempotent.

    Where a program names no backend, gloo still reduces CPU tensors.
    """
    import torch.distributed as dist

    if "BPSFAST" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("bpsfast", _create, extended_api=True, devices=["cpu", "cuda"])
    # from sys.modules, as in the package the module's name is a function's
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = functools.partial(_env, handlers["env"])


def _create(options: Any, more: Any = None) -> Any:
    from .torch.backend.process_group import create

    return create(options, more)


def _env(torch_handler: Any, url: str, **more: Any) -> Any:
    # under ``bpsfast run`` torch's variables repeat bpsfast's, and there is a job to join
    is_bpsfast_run = all(os.environ.get(own) == os.environ.get(name)
                         for own, name in (("BPSFAST_RANK", "RANK"), ("BPSFAST_SIZE", "WORLD_SIZE")))
    if all(os.environ.get(name) for name in _TORCHRUN_VARIABLES) and not is_bpsfast_run:
        return torch_handler(url, **more)
    from .torch.backend.worlds import env

    return env(torch_handler, url, **more)
