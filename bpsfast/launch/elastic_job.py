"""``bpsfast run --elastic``: workers on this machine that form one job after another, and the service that forms them.

Only workers are started here. Scheduler and nodes belong to one job and end with it; the ranks start them.
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

from ..base.job_key import elastic_key, given_key
from ..base.settings import Settings, environment, parse_address
from ..orchestration import security
from ..orchestration.elastic import protocol
from ..orchestration.elastic.coordinator import ElasticRules
from ..orchestration.elastic.protocol import Add, Added, Hello
from ..orchestration.errors import DECODE_ERRORS, ConfigError, PeerLostError, StallError
from .daemons import clean_environment
from .elastic_service import ElasticService, WorkerPool, worker
from .local_job import JobShape, check_program
from .output import Output
from .processes import Command, Kind, thread_defaults
from .supervisor import Limits, Supervisor

_LOOPBACK = "127.0.0.1"


class Control(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `add` needs to reach a running job, in a file that only its owner can read."""

    coordinator: str
    job_key: str


def plan(shape: JobShape, program: Sequence[str], settings: Settings, environ: Mapping[str, str], coordinator: str,
         key: str) -> list[Command]:
    """Return the first workers by rank.

    *coordinator* is the address of the elastic service, *key* the job's key in hex.

    Raises `ConfigError` for helpers, which cannot follow from job to job.
    """
    if shape.n_helpers:
        raise ConfigError(f"--helpers {shape.n_helpers} with --elastic: helpers do not follow the workers from job to "
                          "job; do without them, or without --elastic")
    base = {**thread_defaults(sum(shape.ranks)), **clean_environment(environ)}
    common = msgspec.structs.replace(settings, coordinator=coordinator, job_key=key, job_key_file="", scheduler="",
                                     num_helpers=0, num_servers=-1, num_nodes=-1, size=-1, rank=-1, local_rank=-1,
                                     local_size=-1, node_index=-1, advertise="")
    workers: list[Command] = []
    for name, n_local in zip(shape.machines, shape.ranks):
        here = msgspec.structs.replace(common, node_id=f"{name} of {coordinator}",
                                       node_host=common.node_host or _LOOPBACK)
        command = Command("", Kind.RANK, tuple(program), {**base, **environment(here)})
        workers += [worker(len(workers) + i, command) for i in range(n_local)]
    return workers


def run(shape: JobShape, program: Sequence[str], settings: Settings, rules: ElasticRules, *,
        limits: Limits | None = None, output: Output | None = None, control: Path | None = None,
        environ: Mapping[str, str] | None = None) -> int:
    """Run *program* until its training has ended or no further job can be formed; return the exit code.

    *control*: a file to create, by which `add` finds the job. Main thread only.

    Raises `ConfigError` if the rules, *settings* and *shape* do not fit together.
    """
    check_program(program)
    goes_on = settings.on_worker_loss == "continue"
    if goes_on and rules.lost_worker == "abort":
        raise ConfigError("--elastic with on_worker_loss = continue, and --lost-worker abort (the default): the job "
                          "would go on without a lost worker, and be ended because of it. Add --lost-worker wait, "
                          "which replaces lost workers, or shrink")
    n_ranks = sum(shape.ranks)
    if not 1 <= rules.min_ranks <= n_ranks <= rules.max_ranks:
        raise ConfigError(f"--min-ranks {rules.min_ranks}, -n {n_ranks}, --max-ranks {rules.max_ranks}: must be in "
                          "this order, and at least 1")
    if goes_on:
        rules = msgspec.structs.replace(rules, goes_on=True)
        settings = msgspec.structs.replace(settings, min_workers=max(settings.min_workers, rules.min_ranks))
    key = given_key(settings) or secrets.token_hex(32)
    service = ElasticService(rules, range(n_ranks), security.job_key(key, ""), _LOOPBACK)
    try:
        workers = plan(shape, program, settings, os.environ if environ is None else environ, service.address, key)
        with _published(control, Control(coordinator=service.address, job_key=key)):
            service.start()
            pool = WorkerPool(service, workers, goes_on=rules.lost_worker != "abort")
            return Supervisor(workers, limits=limits, output=output, workers=pool).run()
    finally:
        service.close()


def add(control: Path, count: int, timeout_s: float = 10.0) -> Added:
    """Have the job with the file *control* start *count* more workers; return its answer.

    Raises `ConfigError` if the file does not belong to a running job. `StallError` or `PeerLostError` if the job does
    not answer in time, or ends.
    """
    try:
        found = msgspec.json.decode(control.read_bytes(), type=Control)
    except (OSError, *DECODE_ERRORS) as exc:
        raise ConfigError(f"{control} is no file that `bpsfast run --elastic --control` has made and whose job still "
                          f"runs: {exc}") from exc
    host, port = parse_address(found.coordinator, str(control))
    channel = protocol.connect(host, port, elastic_key(security.job_key(found.job_key, "")))
    me = -1 - secrets.randbits(31)  # workers have numbers from 0 on
    with contextlib.closing(channel):
        channel.tell(Hello(rank=me))
        channel.tell(Add(member=me, count=count))
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0.0:
            channel.wait(None, left_s)
            for message in channel.recv_nowait():
                if isinstance(message, Added):
                    return message
    raise (StallError if channel.is_connected else PeerLostError)(
        f"the job of {control} has not answered at {found.coordinator} within {timeout_s:g} s")


@contextlib.contextmanager
def _published(path: Path | None, control: Control) -> Iterator[None]:
    """Keep *control* in the file *path*, for this user only, until the block ends.

    Raises `ConfigError` if the file exists, unless an ended job of this user has left it, or cannot be created.
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
    """Create a file of *data* atomically. The descriptor keeps the inode number from being used for another file."""
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}")
    with contextlib.ExitStack() as stack:
        try:
            _make_room(path)
            file = stack.enter_context(os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb"))
            try:
                file.write(data)
                file.flush()
                os.link(new, path)  # fails if another file is there
            finally:
                new.unlink()
        except OSError as exc:
            raise ConfigError(f"--control {path}: no file can be made there: {exc}") from exc
        yield file.fileno()


def _make_room(path: Path) -> None:
    """Remove the file that a killed launcher has left at *path*; raise `ConfigError` for any other file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    problem = "it was not made by `bpsfast run --elastic --control`"
    if stat.S_ISREG(found.st_mode) and stat.S_IMODE(found.st_mode) == 0o600 and found.st_uid == os.getuid():
        with contextlib.suppress(*DECODE_ERRORS):
            left = msgspec.json.decode(path.read_bytes(), type=Control)
            if not _is_listening(left.coordinator):
                path.unlink()
                return
            problem = f"its job runs, and listens at {left.coordinator}"
    raise ConfigError(f"--control {path}: there is such a file, and {problem}: name another one, or remove it")


def _is_listening(address: str) -> bool:
    try:
        socket.create_connection(parse_address(address, "the control file"), timeout=1.0).close()
    except (OSError, ConfigError):
        return False
    return True
