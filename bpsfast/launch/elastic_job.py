"""``bpsfast run --elastic``: workers that form one job after another, and the service that forms them.

Only workers are started here, on this machine (`run`) or on others (`run_on_hosts`). Scheduler and nodes belong to one
job and end with it; the ranks start them.
"""
from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..base.addresses import configured_host, own_addresses
from ..base.job_key import elastic_key, given_key
from ..base.settings import Settings, environment, parse_address
from ..base.value_formats import parse_ports
from ..orchestration import security
from ..orchestration.elastic import protocol
from ..orchestration.elastic.coordinator import ElasticRules
from ..orchestration.elastic.protocol import Add, Added, Hello
from ..orchestration.errors import DECODE_ERRORS, ConfigError, PeerLostError, StallError
from ..orchestration.host_lookup import format_address
from .daemons import clean_environment
from .elastic_hosts import COOLDOWN_S, HostConnection, HostWorkers
from .elastic_service import ElasticService, WorkerPool, worker
from .host_discovery import HostDiscovery
from .host_list import Host
from .local_job import JobShape, check_program
from .output import Output
from .processes import Command, Kind, thread_defaults
from .remote_hosts import RemoteHosts
from .remote_protocol import Reach
from .ssh import Ssh
from .supervisor import Limits, Supervisor

_LOOPBACK = "127.0.0.1"
#: What libzmq sends first on each connection: by it hosts tell the service from other programs.
_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f"
#: Most ranks if the user has set no limit, and hosts are discovered.
_MOST_RANKS = 1 << 16


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
    common = _of_any_job(settings, coordinator, key)
    workers: list[Command] = []
    for name, n_local in zip(shape.machines, shape.ranks):
        here = msgspec.structs.replace(common, node_id=f"{name} of {coordinator}",
                                       node_host=common.node_host or _LOOPBACK)
        command = Command("", Kind.RANK, tuple(program), {**base, **environment(here)})
        workers += [worker(len(workers) + i, command) for i in range(n_local)]
    return workers


class HostsPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to run an elastic job: on `hosts`, or on those that a `script` lists.

    `slots`: of each host that the script lists without a number. `variables` are for every worker. `cooldown_s`: for
    how long a lost host is not used, at first.
    """

    hosts: Sequence[Host] = ()
    script: Path | None = None
    slots: int = 1
    ssh: Ssh
    variables: Mapping[str, str] = {}
    cooldown_s: float = COOLDOWN_S


def command_on(host: Host, program: Sequence[str], settings: Settings, variables: Mapping[str, str], coordinator: str,
               key: str) -> Command:
    """Return the command of workers on *host*, whose environment is added to that of the host."""
    here = msgspec.structs.replace(_of_any_job(settings, coordinator, key), node_id=f"{host.name} of {coordinator}")
    return Command("", Kind.RANK, tuple(program), {**clean_environment(variables), **environment(here)})


def _of_any_job(settings: Settings, coordinator: str, key: str) -> Settings:
    """Return *settings* for a worker, without what belongs to one job."""
    return msgspec.structs.replace(settings, coordinator=coordinator, job_key=key, job_key_file="", scheduler="",
                                   num_helpers=0, num_servers=-1, num_nodes=-1, size=-1, rank=-1, local_rank=-1,
                                   local_size=-1, node_index=-1, advertise="")


def run_on_hosts(plan: HostsPlan, program: Sequence[str], settings: Settings, rules: Mapping[str, Any],
                 n_ranks: int | None = None, *, limits: Limits | None = None, output: Output | None = None) -> int:
    """Run *program* on other hosts until its training has ended or no further job can be formed; return the exit code.

    *rules*: those of `ElasticRules` that the user has set. *n_ranks*: those of the first job; None: one for each slot.
    Further workers are started on free slots, up to `max_ranks`. Main thread only.

    Raises `BpsError`, and starts no worker, if a host of a fixed list cannot be used, or discovered ones have too few
    slots in time.
    """
    check_program(program)
    for name in ("node_host", "advertise"):
        if getattr(settings, name):
            raise ConfigError(f"BPSFAST_{name.upper()} = {getattr(settings, name)} is the address of one machine, and "
                              "hosts may come and go: name the network by --set interface=NAME")
    if not (plan.hosts and all(host.is_here for host in plan.hosts)):
        plan.ssh.check()
    n_slots = n_ranks or sum(host.slots for host in plan.hosts) or _MOST_RANKS
    chosen, settings = _going_on(ElasticRules(**{"max_ranks": n_slots, **rules}), settings)
    _check_numbers(chosen, n_ranks or (min(n_slots, chosen.max_ranks) if plan.hosts else chosen.min_ranks))
    key = given_key(settings) or secrets.token_hex(32)
    output = output or Output()
    with contextlib.ExitStack() as stack:
        service = ElasticService(chosen, (), security.job_key(key, ""), "", parse_ports(settings.ports))
        stack.callback(service.close)
        service.no_adding = "workers are started by themselves as hosts have free slots, up to --max-ranks"
        service.start()  # hosts try to reach it
        discovery = None if plan.script is None else stack.enter_context(HostDiscovery(plan.script, plan.slots))
        selector = stack.enter_context(selectors.EpollSelector())
        remote = stack.enter_context(RemoteHosts([], plan.ssh, output))

        def connect(host: Host) -> HostConnection:
            addresses = [*_own_addresses(settings), *([_LOOPBACK] if host.is_here else [])]
            return HostConnection(remote.add(host, output), plan.ssh.directory or os.getcwd(),
                                  Reach(addresses, service.port, _GREETING), selector)

        def command_of(host: Host, address: str) -> Command:
            return command_on(host, program, settings, plan.variables, format_address(address, service.port), key)

        pool = HostWorkers(service, chosen, plan.hosts, connect=connect, forget=remote.forget, command_of=command_of,
                           selector=selector, say=output.say, cooldown_s=plan.cooldown_s, discovery=discovery)
        workers, hosts = pool.first(pool.connect_first(n_ranks, chosen.within_s))
        service.expect(chosen, range(len(workers)))
        return Supervisor(workers, limits=limits, output=output, hosts=hosts, workers=pool).run()


def _own_addresses(settings: Settings) -> list[str]:
    """Return this machine's addresses, first that of the interface that *settings* name, if it exists here."""
    chosen = []
    with contextlib.suppress(ConfigError):  # the hosts have that interface; this machine need not
        chosen = [configured_host(settings)]
    return list(dict.fromkeys(filter(None, [*chosen, *own_addresses()])))


def _going_on(rules: ElasticRules, settings: Settings) -> tuple[ElasticRules, Settings]:
    """Return *rules* and *settings* for each other, where the jobs go on without lost workers (on_worker_loss)."""
    if settings.on_worker_loss != "continue":
        return rules, settings
    if rules.lost_worker == "abort":
        raise ConfigError("--elastic with on_worker_loss = continue, and --lost-worker abort (the default): the job "
                          "would go on without a lost worker, and be ended because of it. Add --lost-worker wait, "
                          "which replaces lost workers, or shrink")
    return (msgspec.structs.replace(rules, goes_on=True),
            msgspec.structs.replace(settings, min_workers=max(settings.min_workers, rules.min_ranks)))


def _check_numbers(rules: ElasticRules, n_ranks: int) -> None:
    if not 1 <= rules.min_ranks <= n_ranks <= rules.max_ranks:
        raise ConfigError(f"--min-ranks {rules.min_ranks}, -n {n_ranks}, --max-ranks {rules.max_ranks}: must be in "
                          "this order, and at least 1")


def run(shape: JobShape, program: Sequence[str], settings: Settings, rules: ElasticRules, *,
        limits: Limits | None = None, output: Output | None = None, control: Path | None = None,
        environ: Mapping[str, str] | None = None) -> int:
    """Run *program* until its training has ended or no further job can be formed; return the exit code.

    *control*: a file to create, by which `add` finds the job. Main thread only.

    Raises `ConfigError` if the rules, *settings* and *shape* do not fit together.
    """
    check_program(program)
    rules, settings = _going_on(rules, settings)
    n_ranks = sum(shape.ranks)
    _check_numbers(rules, n_ranks)
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
