"""``bpsfast run --elastic``: workers of this machine that form one job after another, and the muster where they meet.

Only workers are started here. Scheduler and nodes belong to a job, and end with it: the ranks start them.
"""
from __future__ import annotations

import contextlib
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from ..base.settings import Settings, environment, parse_address
from ..orchestration import security
from ..orchestration.elastic import protocol
from ..orchestration.elastic.coordinator import ElasticRules
from ..orchestration.elastic.protocol import Add, Added, Hello
from ..orchestration.errors import DECODE_ERRORS, ConfigError, PeerLostError, StallError
from .daemons import clean_environment
from .elastic_service import ElasticService, elastic_key
from .local_job import JobShape, check_program
from .output import Output
from .process_role import given_key
from .processes import Command, Kind, thread_defaults
from .supervisor import Limits, Supervisor
from .worker_pool import WorkerPool, worker

_LOOPBACK = "127.0.0.1"


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `add` needs to reach a running job; the file that holds it is its owner's alone."""

    muster: str
    job_key: str


def plan(shape: JobShape, program: Sequence[str], settings: Settings, environ: Mapping[str, str], muster: str,
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
        here = msgspec.structs.replace(common, node_id=f"{name} of {muster}", node_host=common.node_host or _LOOPBACK)
        command = Command("", Kind.RANK, tuple(program), {**base, **environment(here)})
        workers += [worker(len(workers) + i, command, {}) for i in range(n_local)]
    return workers


def run(shape: JobShape, program: Sequence[str], settings: Settings, rules: ElasticRules, *, limits: Limits | None = None,
        output: Output | None = None, control: Path | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run *program* until its training has ended, or no next job can be formed; return the exit code.

    *control*: a file to make, through which `add` finds the job. Main thread only.
    """
    check_program(program)
    n_ranks = sum(shape.ranks)
    if not 1 <= rules.min_ranks <= n_ranks <= rules.max_ranks:
        raise ConfigError(f"--min-ranks {rules.min_ranks}, -n {n_ranks}, --max-ranks {rules.max_ranks}: must be in "
                          "this order, and at least 1")
    key = given_key(settings) or secrets.token_hex(32)
    service = ElasticService(rules, range(n_ranks), security.job_key(key, ""), _LOOPBACK)
    try:
        workers = plan(shape, program, settings, os.environ if environ is None else environ, service.address, key)
        with _shown(control, Control(muster=service.address, job_key=key)):
            service.start()
            crew = WorkerPool(service, workers, goes_on=rules.lost_worker != "abort")
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
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"{control} is no file that `bpsfast run --elastic --control` has made and whose job still "
                          f"runs: {exc}") from exc
    host, port = parse_address(found.muster, str(control))
    line = protocol.connect(host, port, elastic_key(security.job_key(found.job_key, "")))
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
    """Let *path* hold *control* meanwhile, for nobody but this user. What was there before is left alone.

    Raises
    ------
    ConfigError
        If there is such a file and it is not what an ended job of this user has left, or none can be made there.
    """
    if path is None:
        yield
        return
    with _made(path, msgspec.json.encode(control)) as fd:
        try:
            yield
        finally:
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), os.fstat(fd)):
                    path.unlink()


@contextlib.contextmanager
def _made(path: Path, data: bytes) -> Iterator[int]:
    """Make a file of *data*, whole at once; the descriptor keeps its number from becoming another file's."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with contextlib.ExitStack() as stack:
        try:
            _make_room(path)
            file = stack.enter_context(os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"))
            try:
                file.write(data)
                file.flush()
                os.link(new, path)  # never in the place of another file
            finally:
                new.unlink()
        except OSError as exc:
            raise ConfigError(f"--control {path}: no file can be made there: {exc}") from exc
        yield file.fileno()


def _make_room(path: Path) -> None:
    """Remove the file that a launcher has left at *path* which was killed; `ConfigError` if it is another one."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    problem = "it was not made by `bpsfast run --elastic --control`"
    if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.getuid():
        with contextlib.suppress(*DECODE_ERRORS):
            left = msgspec.json.decode(path.read_bytes(), type=Control)
            if not _is_listening(left.muster):
                path.unlink()
                return
            problem = f"its job runs, and listens at {left.muster}"
    raise ConfigError(f"--control {path}: there is such a file, and {problem}: name another one, or remove it")


def _is_listening(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address, "the control file"), timeout=1.0).close()
    except (OSError, ConfigError):
        return False
    return True
