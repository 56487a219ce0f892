"""Hooks by which lower packages, such as `trainer`, call functions of higher ones without importing them.

`bpsfast/__init__` sets them before any other module is used; each imports what it needs when it is called.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: (session, devices, device) -> what sums a machine's tensors on their GPUs first (`collectives.islands.Islands`).
make_islands: Callable[[Any, Any, Any], Any]
#: (settings) -> this process's connection to the coordinator of its elastic program, opened at the first call.
open_elastic_client: Callable[[Any], Any]
#: () -> the same if it was opened, else None.
current_elastic_client: Callable[[], Any]
#: Registers the `torch.distributed` backend "bpsfast" (`torch_autoload.add_backend`).
add_torch_backend: Callable[[], None]
