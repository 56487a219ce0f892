"""All checks, in the order of their numbers."""
from __future__ import annotations

from . import addressing, caches, congestion, driver, fabric, limits, mtu, pcie, process, transports
from .finding import Check

CHECKS: tuple[Check, ...] = tuple(sorted(
    (check for module in (addressing, caches, congestion, driver, fabric, limits, mtu, pcie, process, transports)
     for check in module.CHECKS), key=lambda check: check.code))
