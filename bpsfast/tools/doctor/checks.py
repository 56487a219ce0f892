"""All checks, in the order of their numbers."""
from __future__ import annotations

from . import addressing, congestion, driver, fabric, hardware, memory, mtu, process, shared_cache, transports
from .finding import Check

CHECKS: tuple[Check, ...] = tuple(sorted(
    (check for module in (addressing, shared_cache, congestion, driver, fabric, memory, mtu, hardware, process, transports)
     for check in module.CHECKS), key=lambda check: check.code))
