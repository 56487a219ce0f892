"""Checks what RDMA needs of a machine against its limits, before anything is allocated.

Two resources are limited: the lengths of a device's queues (max_qp_wr, max_cqe, max_qp), which all peers share; and
memory that may be locked, of which every segment takes its size once per device.

References
----------
Linux, ``drivers/infiniband/core/umem.c`` (ib_umem_get): pinned pages of the process against RLIMIT_MEMLOCK, unless it
has CAP_IPC_LOCK.
"""
from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ....orchestration.errors import CapacityError

#: Slots of a lane if the device's queues are long enough; each needs one receive request.
RECEIVES = 4096
#: Fewer are of no use, even for the layers of a small model.
LEAST_RECEIVES = 64
#: Memory that must be lockable with transport=auto: the segments of a small model.
LEAST_FOR_AUTO = 1 << 30
_CAP_IPC_LOCK = 14


class Depths(NamedTuple):
    """Lengths of one lane's queues, and of the completion queue that all lanes of a device share."""

    send: int
    receive: int
    completions: int


def depths(device: str, attributes: Mapping[str, Any], n_peers: int, n_pairs: int, n_sends: int) -> Depths:
    """Return the queue lengths for *n_pairs* lanes, of *n_sends* writes, to each of *n_peers* peers over *device*.

    Raises
    ------
    CapacityError
        If the device cannot hold them; with what is needed and what there is.
    """
    n_lanes = max(1, n_peers * n_pairs)
    if n_lanes > attributes["max_qp"]:
        raise CapacityError(f"{n_peers} peers x {n_pairs} queue pairs need {n_lanes} queue pairs, {device} has "
                            f"max_qp={attributes['max_qp']}: lower BPSFAST_RDMA_QUEUE_PAIRS, or use tcp")
    send = min(n_sends, attributes["max_qp_wr"])
    receive = min(RECEIVES, attributes["max_qp_wr"], attributes["max_cqe"] // n_lanes - send)
    if receive < LEAST_RECEIVES:
        raise CapacityError(
            f"{n_peers} peers x {n_pairs} queue pairs, each of {send} sends and at least {LEAST_RECEIVES} receives, "
            f"need a completion queue of {n_lanes * (send + LEAST_RECEIVES)} and queues of {LEAST_RECEIVES}; "
            f"{device} has max_cqe={attributes['max_cqe']} and max_qp_wr={attributes['max_qp_wr']}: lower "
            "BPSFAST_RDMA_QUEUE_PAIRS or BPSFAST_RDMA_QUEUE_DEPTH, or use tcp")
    return Depths(send, receive, n_lanes * (send + receive))


def lockable(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process may lock, None without a limit (also with CAP_IPC_LOCK)."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if soft == resource.RLIM_INFINITY or _may_lock_all(root) else soft


def least(transport: str, segment_nbytes: int) -> int:
    """Return how many bytes a node must be able to lock before it connects; *segment_nbytes*: its smallest segment.

    With transport=rdma one segment each of inputs, slots and results is enough. With "auto", tcp can only be chosen
    before that: a limit that the first real model exceeds (8 MiB, the kernel's default) is of no use.
    """
    return 3 * segment_nbytes if transport == "rdma" else max(3 * segment_nbytes, LEAST_FOR_AUTO)


def require(wanted: int, locked: int, n_devices: int, purpose: str, limit: int | None) -> None:
    """Return if *wanted* more bytes can be locked in addition to *locked*, once for each of *n_devices*.

    Raises
    ------
    CapacityError
        With what is needed and what *limit* (bytes; None: no limit) leaves.
    """
    if limit is None:
        return
    needed, left = wanted * n_devices, max(0, limit - locked * n_devices)
    if needed > left:
        raise CapacityError(
            f"{purpose} needs {needed} bytes of locked memory for RDMA ({wanted} bytes x {n_devices} devices), but "
            f"memlock={limit} leaves {left}: `ulimit -l unlimited` (a service: LimitMEMLOCK=infinity; a container: "
            "--ulimit memlock=-1 or --cap-add=IPC_LOCK), or use tcp")


def require_regions(n_regions: int, device: str, attributes: Mapping[str, Any], nbytes: int) -> None:
    """Return if *device* can hold one more region of *nbytes* in addition to *n_regions*; else `CapacityError`."""
    if n_regions >= attributes["max_mr"]:
        raise CapacityError(f"region {n_regions + 1} of this node cannot be registered: {device} has "
                            f"max_mr={attributes['max_mr']}; declare fewer, larger tensors, or use tcp")
    if nbytes > attributes["max_mr_size"]:
        raise CapacityError(f"a segment of {nbytes} bytes cannot be registered: {device} has "
                            f"max_mr_size={attributes['max_mr_size']}; declare smaller tensors at a time, or use tcp")


def _may_lock_all(root: Path) -> bool:
    """Whether this process has CAP_IPC_LOCK in the first user namespace, which the kernel checks."""
    try:
        status = (root / "proc/self/status").read_text()
        namespace = (root / "proc/self/uid_map").read_text().split()
    except OSError:
        return False
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    return bool(effective >> _CAP_IPC_LOCK & 1) and namespace == ["0", "0", str(0xFFFFFFFF)]
