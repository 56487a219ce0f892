"""``bpsfast run --elastic``: workers of this machine that form one job after another, and the muster where they meet.

Only workers are started here. Scheduler and nodes belong to a job, and end with it: the ranks start them.
"""
from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ..orchestration import muster_line, security
from ..orchestration.errors import ConfigError, PeerLostError, StallError
from ..orchestration.muster import Rules
from ..orchestration.muster_line import Add, Added, Hello
from ..orchestration.unreadable import UNREADABLE
from ..settings import Settings, environment, parse_address
from .child import Command, Kind, thread_defaults
from .crew import Crew, worker
from .daemons import clean_environment
from .job import Shape, check_program
from .muster_service import MusterService, line_key
from .output import Output
from .supervisor import Limits, Supervisor

_LOOPBACK = "127.0.0.1"


class Control(msgspec.Struct, frozen=True):
    """What `add` needs to reach a running job; the file that holds it is its owner's alone."""

    muster: str
    job_key: str


def plan(shape: Shape, program: Sequence[str], settings: Settings, environ: Mapping[str, str], muster: str,
         key: str) -> list[Command]:
    """Return the workers that are started at first, by rank; *muster* is an address, *key* the job's in hex.

    Raises
    ------
    ConfigError
        For helpers: they would have to find each next job.
    """
    if shape.n_helpers:
        raise ConfigError(f"--helpers {shape.n_helpers} with --elastic: helpers do not follow the workers from job to "
                          "job; do without them, or without --elastic")
    base = {**thread_defaults(sum(shape.ranks)), **clean_environment(environ)}
    common = msgspec.structs.replace(settings, muster=muster, job_key=key, job_key_file="", scheduler="",
                                     num_helpers=0, num_servers=-1, num_nodes=-1, size=-1, rank=-1, local_rank=-1,
                                     local_size=-1, node_index=-1)
    workers: list[Command] = []
    for name, n_local in zip(shape.machines, shape.ranks):
        here = msgspec.structs.replace(common, node_id=name, node_host=common.node_host or _LOOPBACK)
        command = Command("", Kind.RANK, tuple(program), {**base, **environment(here)})
        workers += [worker(len(workers) + i, command, {}) for i in range(n_local)]
    return workers


def run(shape: Shape, program: Sequence[str], settings: Settings, rules: Rules, *, limits: Limits | None = None,
        output: Output | None = None, control: Path | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run *program* until its training has ended, or no next job can be formed; return the exit code.

    *control*: a file to make, through which `add` finds the job. Main thread only.
    """
    check_program(program)
    n_ranks = sum(shape.ranks)
    if not 1 <= rules.min_ranks <= n_ranks <= rules.max_ranks:
        raise ConfigError(f"--min-ranks {rules.min_ranks}, -n {n_ranks}, --max-ranks {rules.max_ranks}: must be in "
                          "this order, and at least 1")
    key = settings.job_key or secrets.token_hex(32)
    service = MusterService(rules, range(n_ranks), security.job_key(key, ""), _LOOPBACK)
    try:
        workers = plan(shape, program, settings, os.environ if environ is None else environ, service.address, key)
        with _shown(control, Control(muster=service.address, job_key=key)):
            service.start()
            crew = Crew(service, workers, goes_on=rules.lost_worker != "abort")
            return Supervisor(workers, limits=limits, output=output, crew=crew).run()
    finally:
        service.close()


def add(control: Path, count: int, timeout_s: float = 10.0) -> Added:
    """Have the job whose file is *control* start *count* more workers; return what it answers.

    Raises
    ------
    ConfigError
        If the file is none of a running job.
    StallError, PeerLostError
        If the job does not answer in time, or ends.
    """
    try:
        found = msgspec.json.decode(control.read_bytes(), type=Control)
    except (OSError, *UNREADABLE) as exc:
        raise ConfigError(f"{control} is no file that `bpsfast run --elastic --control` has made and whose job still "
                          f"runs: {exc}") from exc
    host, port = parse_address(found.muster, str(control))
    line = muster_line.connect(host, port, line_key(security.job_key(found.job_key, "")))
    me = -1 - secrets.randbits(31)  # members are numbered from 0 on
    quiet_fd = os.eventfd(0)
    try:
        line.tell(Hello(rank=me))
        line.tell(Add(member=me, count=count))
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0.0:
            line.wait(quiet_fd, left_s)
            for message in line.recv_nowait():
                if isinstance(message, Added):
                    return message
    finally:
        line.close()
        os.close(quiet_fd)
    raise (StallError if line.is_connected else PeerLostError)(
        f"the job of {control} has not answered at {found.muster} within {timeout_s:g} s")


@contextlib.contextmanager
def _shown(path: Path | None, control: Control) -> Iterator[None]:
    """Let *path* hold *control* meanwhile, for nobody but this user."""
    if path is None:
        yield
        return
    new = path.with_name(path.name + ".new")
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(control))
        os.replace(new, path)
        yield
    finally:
        for each in (new, path):
            with contextlib.suppress(FileNotFoundError):
                each.unlink()
