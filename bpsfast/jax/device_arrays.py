"""Arrays on GPUs outside jit: they take the way of `bpsfast.push_pull` of devices, by DLPack and CuPy."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from ..orchestration.errors import UnsupportedError
from ..trainer.handle import push_pull_async
from .push_pull_call import PushPullCall


def is_on_device(leaf: Any) -> bool:
    """Whether *leaf* lies elsewhere than on the CPU.

    Raises
    ------
    UnsupportedError
        If it lies on several devices.
    """
    devices = leaf.devices()
    if len(devices) != 1:
        raise UnsupportedError(f"an array of shape {leaf.shape} lies on {len(devices)} devices: bpsfast sums arrays of "
                               "one device for each rank; start one process for each device")
    (device,) = devices
    return bool(device.platform != "cpu")


def push_pull(site: PushPullCall, leaves: Sequence[Any]) -> list[Any]:
    """Sum *leaves*, which may also lie on the CPU; the sums are where the leaves are."""
    handles = [push_pull_async(leaf, site.average, each.name, site.priority, compression=each.codec)
               for leaf, each in zip(leaves, site.leaves)]
    sums = [handle.wait() for handle in handles]
    return [jax.dlpack.from_dlpack(total) if is_on_device(leaf) else jax.device_put(total, leaf.sharding)
            for leaf, total in zip(leaves, sums)]
