"""barrier and join: ranks wait for each other."""
from __future__ import annotations

import threading

from ..orchestration.priority.negotiation import Request
from . import runtime
from .process_sets import ProcessSet, global_process_set
from .service import Operation


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of *process_set* are here."""
    service = runtime.service_of(process_set, "barrier")
    service.submit_unnamed(
        "barrier", lambda name: Operation(Request(rank=service.rank, name=name, kind="barrier"))).wait()


def join(device: int = -1) -> int:
    """Say that this rank has no more data, take part in the others' allreduces until all have, and return the last one.

    Meanwhile this rank counts as zeros (for Min, Max and Product: as nothing), also in averages and in the sums of
    `DistributedOptimizer`, of which it gets nothing. Other operations fail on the ranks that still make them. *device*
    is Horovod's, and not used.

    Raises
    ------
    StallError
        If nothing comes from the others for `timeout_s`; the text names them.
    """
    found = runtime.current()
    join_proxies = list(found.join_proxies)
    for each in join_proxies:
        each.begin()
    service = found.service(0, "join")
    operation = service.submit(Operation(Request(
        rank=service.rank, name="join", kind="join", is_patient=bool(join_proxies),
        n_steps=sum(each.count_anew() for each in join_proxies))))
    over = threading.Event()
    try:
        for each in join_proxies:
            each.start(over)
        errors = [error for each in join_proxies if (error := each.wait()) is not None]
    finally:
        over.set()  # also if the wait was interrupted
    if errors:
        raise errors[0]
    return int(operation.wait())
