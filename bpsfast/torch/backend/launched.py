"""torch's ``env://`` under launchers that do not set torch's variables: ``bpsfast run``, Slurm, MPI, BytePS's.

`init_process_group` asks the environment for RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where these are not set,
but bpsfast knows from another launcher's variables which rank this is (`launch.roles`), it joins that job, and the
store that torch wants is made on rank 0's machine and found through the job.
"""
from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist

from ...base import logs
from ...base.addresses import format_address
from ...base.settings import load, parse_address
from ...launch import roles
from ...orchestration.errors import ClosedError, MismatchError
from ...trainer import process
from ...trainer.session import Session

Handler = Callable[..., Iterator[tuple[Any, int, int]]]
_NOTICE = "torch/store"


def env(torchs: Handler) -> Handler:
    """Return what torch is to ask for ``env://`` in place of its own handler *torchs*, which serves whenever it can.

    It raises `MismatchError` where the program says another world_size than the launcher.
    """

    def handler(url: str, timeout: timedelta = timedelta(minutes=30), **more: Any) -> Iterator[tuple[Any, int, int]]:
        given = dict(parse_qsl(urlsplit(url).query))  # arguments of init_process_group
        if "rank" in given or not _is_in_job(given):
            yield from torchs(url, timeout=timeout, **more)
            return
        session = process.current()
        if given.get("world_size", str(session.size)) != str(session.size):
            raise MismatchError(f"init_process_group is given world_size={given['world_size']}, but the launcher has "
                                f"started {session.size} ranks: leave it out, or start as many")
        yield store_of(session, timeout), session.rank, session.size
        raise RuntimeError("the ranks of a job of bpsfast do not change: env:// cannot be asked again")

    return handler


def _is_served_by_torch(given: dict[str, str]) -> bool:
    """Whether torch's variables are there, and a world_size that is *given* is theirs."""
    size = os.environ.get("WORLD_SIZE", "")
    return given.get("world_size", size) == size and all(
        os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _is_in_job(given: dict[str, str]) -> bool:
    """Join the job whose rank this process is by another launcher's word; return False if there is none, or if this
    process has left it and torch's variables are there.

    Raises what `bpsfast.init` raises.
    """
    if process.session() is None:
        settings = load({})
        logs.configure(settings.log_level, "rank")
        place = roles.detect(settings)
        if place.launcher == "single":
            return False
        try:
            process.begin(place, settings)
        except ClosedError:
            if _is_served_by_torch(given):
                return False
            raise
    return True


def _store_numbers(session: Session) -> Iterator[int]:
    """Return a count of the stores of *session* (`Session.extension`)."""
    return itertools.count()


def store_of(session: Session, timeout: timedelta) -> Any:
    """Return a store that all ranks of *session* share; rank 0's process holds it. All ranks call this equally often.

    Raises
    ------
    StallError
        If rank 0 does not come within *timeout*.
    """
    number = next(session.extension(_store_numbers))
    key = f"{_NOTICE}/{number}"
    if session.rank == 0:
        host = session.host
        store = dist.TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        session.notices.publish(key, format_address(host, store.port).encode())
        return store
    found = session.notices.lookup(key, timeout.total_seconds(), "rank 0").decode()
    host, port = parse_address(found, "rank 0")
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
