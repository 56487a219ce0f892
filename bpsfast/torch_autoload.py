"""How `torch.distributed` comes to know the backend "bpsfast": by `bpsfast.torch.backend`, or, without an import in the
program, by what `import torch` calls (entry point ``torch.backends``) if BPSFAST_TORCH_AUTOLOAD=1.

Nothing of bpsfast is loaded before a process group is made, and nothing here can fail: that would break `import torch`.
"""
from __future__ import annotations

import contextlib
import functools
import os
import sys
from typing import Any

#: What torch's own launcher sets, and all that it asks for; scripts for other launchers often set some of them.
_TORCHS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def register() -> None:
    """Register the backend's name if the environment asks for it."""
    if os.environ.get("BPSFAST_TORCH_AUTOLOAD", "").strip().lower() not in ("1", "true", "on", "yes"):
        return
    with contextlib.suppress(ImportError, AttributeError):  # a torch without distributed, or one that we do not know
        add_backend()


def add_backend() -> None:
    """Let `init_process_group` and `new_group` know the name, and ``env://`` other launchers than torch's. Idempotent.

    gloo stays what CPU tensors are reduced by where a program names no backend.
    """
    import torch.distributed as dist

    if "BPSFAST" in dist.Backend._plugins:
        return
    dist.Backend.register_backend("bpsfast", _create, extended_api=True, devices=["cpu", "cuda"])
    # of the module: in the package its name is a function's
    handlers = getattr(sys.modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
    if "env" in handlers:
        handlers["env"] = functools.partial(_env, handlers["env"])


def _create(options: Any, more: Any = None) -> Any:
    from .torch.backend.process_group import create

    return create(options, more)


def _env(torchs: Any, url: str, **more: Any) -> Any:
    if all(os.environ.get(name) for name in _TORCHS) and not _are_of_bpsfast_run():
        return torchs(url, **more)
    from .torch.backend.worlds import env

    return env(torchs, url, **more)


def _are_of_bpsfast_run() -> bool:
    """Whether torch's variables only repeat what ``bpsfast run`` says: then its job is there to be joined."""
    return all(os.environ.get(own) == os.environ.get(torchs)
               for own, torchs in (("BPSFAST_RANK", "RANK"), ("BPSFAST_SIZE", "WORLD_SIZE")))
