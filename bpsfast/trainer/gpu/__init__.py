"""Tensors on devices (GPUs) in the trainer process: copied to the node's shared memory and back, one round at a time.

    devices          the devices of a session: rounds of units from a device and back, pinned segments
    device_path      tensors of a unit that lie on a device: gathered until the unit is whole, then sent
    staging_buffers  shared memory in place of a device's, for collectives and broadcasts
    gpu_direct       memory of a device that RDMA cards read and write themselves (GPUDirect)
"""
from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..unit import UnitOwner


class DeviceSession(UnitOwner, Protocol):
    """What this package needs of the session (`trainer.session.Session`)."""

    rank: int
    size: int
    local_rank: int
    tensors: Any  # `TensorRegistry`
    devices: Any  # `devices.Devices`

    def share_device(self, request: Callable[[int], Any], what: str, fd: int) -> Any: ...
    def say_direct(self, names: tuple[str, ...]) -> None: ...
