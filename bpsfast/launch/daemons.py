"""Start, watch and end the daemons of a job: the scheduler, and the node process of this machine.

No daemon outlives its starter:

* Under ``bpsfast run`` every process is a child of the launcher and is killed with it (`tie_to_parent`).
* A rank (torchrun, BytePS's variables, a single process) starts its daemons in sessions of their own, so that a signal
  to the rank's process group does not reach them. If the rank dies, they first report that to the others, then end:
  they have the rank's pidfd, and end at the latest `lease_s` + 5 s after it.
"""
from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from .._version import __version__
from ..base import logs, process_identity
from ..base.addresses import is_loopback, local_hosts_among
from ..base.exit_codes import FAILED, LEFT_BEHIND, code_of_daemon
from ..base.job_key import job_key
from ..base.resources import allow_all_descriptors, is_ready
from ..base.settings import Settings, environment, fingerprint, parse_addresses, take_job_key
from ..orchestration.errors import ConfigError, error_of
from ..orchestration.wake_up import WakeUp
from . import spare_daemons
from .process_role import ProcessRole
from .spare_daemons import SpareDaemons

_log = logging.getLogger("bpsfast.daemons")

#: Variables by which a launcher tells a process its role. A daemon gets its role from its starter alone.
ROLE_PREFIXES = ("BPSFAST_", "DMLC_", "BYTEPS_", "TORCHELASTIC_")
ROLE_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PS_VERBOSE", "PS_HEARTBEAT_INTERVAL",
    "PS_HEARTBEAT_TIMEOUT"})

_STARTER_GRACE_S = 5.0
#: Time to look up a name of the loopback.
_RESOLVE_S = 2.0
#: Interval of the log line of a process that waits for other ranks.
_REMARK_S = 120.0
#: A daemon that is killed more often than this has a lasting reason.
N_RESTARTS = 3


class Restarter:
    """Starts a daemon, and again when a signal has killed it, at most `N_RESTARTS` times, until `stop`. Any thread.

    An exit of the daemon's own ends the restarts. *name* is for the log.
    """

    def __init__(self, name: str, start: Callable[[], subprocess.Popen]) -> None:
        self._name, self._start = name, start
        self._lock = threading.Lock()
        self._n_restarts = 0
        self._stopped = False
        self._wake = WakeUp()
        try:
            self._process = start()
        except OSError:
            self._wake.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="bpsfast-restarter", daemon=True)
        self._thread.start()

    @property
    def process(self) -> subprocess.Popen:
        """The present process, or the last one."""
        with self._lock:
            return self._process

    @property
    def will_restart(self) -> bool:
        """Whether the process is started again if a signal kills it."""
        with self._lock:
            return not self._stopped and self._n_restarts < N_RESTARTS

    def stop(self) -> None:
        """Do not start it again. Idempotent."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._wake.ring()
        self._thread.join()
        self._wake.close()

    def _watch(self) -> None:
        while True:
            process = self.process
            if not self._has_ended(process):
                return
            code = process.wait()
            with self._lock:
                if code >= 0 or self._stopped or self._n_restarts == N_RESTARTS:
                    return
                self._n_restarts += 1
                _log.warning("the %s (pid %d) %s: it is started again (%d of %d times)", self._name, process.pid,
                             describe_exit(code), self._n_restarts, N_RESTARTS)
                try:
                    self._process = self._start()
                except OSError as exc:
                    self._n_restarts = N_RESTARTS
                    _log.error("the %s cannot be started again: %s", self._name, exc)
                    return

    def _has_ended(self, process: subprocess.Popen) -> bool:
        """Wait for the end of *process*; return False if `stop` was called first."""
        try:
            pidfd = os.pidfd_open(process.pid)
        except ProcessLookupError:  # another thread has waited for it
            return True
        try:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.register(self._wake, select.POLLIN)
            return self._wake.fileno() not in dict(poll.poll())
        finally:
            os.close(pidfd)


class Daemons:
    """The daemons that this process has started: none, a node, or a node and the scheduler. Owner thread only.

    A scheduler that a signal has killed is started again (`Restarter`): the job waits for it. `role` is the starter's
    role with the scheduler's port.
    """

    def __init__(self, role: ProcessRole, reserved: socket.socket | None = None) -> None:
        self.role = role
        self.restarter: Restarter | None = None
        self.node: subprocess.Popen | None = None
        self._reserved = reserved

    @property
    def scheduler(self) -> subprocess.Popen | None:
        """The scheduler's process, if this process has started it."""
        return self.restarter.process if self.restarter is not None else None

    def failure(self) -> str | None:
        """Return which daemon has ended with an error, and how; None if none has. (A second node ends with 0.)"""
        for name, process in (("scheduler", self.scheduler), ("node", self.node)):
            if process is not None and process.poll():
                if self.restarter and name == "scheduler" and process.returncode < 0 and self.restarter.will_restart:
                    continue
                return f"the {name} (pid {process.pid}) {describe_exit(process.returncode)}; its output is above"
        return None

    def reap(self) -> bool:
        """Tell whether all daemons have ended; then also close."""
        over = all(process is None or process.poll() is not None for process in (self.node, self.scheduler))
        if over:
            self.close(0.0)
        return over

    def wait_for_job_end(self) -> None:
        """Wait until the other ranks have left the job, too; log that every two minutes.

        There is no deadline but the job's own: it ends if those ranks, or this process's daemons, are lost.
        """
        begin = time.monotonic()
        for name, process in (("node", self.node), ("scheduler", self.scheduler)):
            while process is not None and not _wait(process, time.monotonic() + _REMARK_S):
                _log.warning("this process has left the job, and waits for other ranks to leave it, for %.0f s so far: "
                             "the job's %s (pid %d) would end with this process. The node names the ranks above",
                             time.monotonic() - begin, name, process.pid)
        self.close(0.0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait until the daemons have ended by themselves; at the deadline end those that have not. Idempotent."""
        deadline = time.monotonic() + timeout_s
        if self.restarter is not None:
            self.restarter.stop()
        for name, process in (("node", self.node), ("scheduler", self.scheduler)):
            if process is not None and not _wait(process, deadline):
                _log.warning("the %s (pid %d) is still running %g s after this rank has left: ending it", name,
                             process.pid, timeout_s)
                terminate(process)
        self.node = self.restarter = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def start(role: ProcessRole, settings: Settings) -> Daemons:
    """Start the daemons that *role* starts: the scheduler, the node, both or neither."""
    reserved = role.reserved
    if role.starts_scheduler and role.scheduler[1] == 0:
        reserved = reserve_port(role.scheduler[0])
        role = msgspec.structs.replace(role, scheduler=(role.scheduler[0], reserved.getsockname()[1]))
    daemons = Daemons(role, reserved)
    try:
        if role.starts_scheduler:
            spares = [role.spares]  # for the first start alone: others are made by another thread
            daemons.restarter = Restarter("scheduler", lambda: _start_scheduler(
                role, settings, spares.pop() if spares else None))
        if role.starts_node:
            daemons.node = start_node(role, settings)
    except OSError:
        daemons.close(timeout_s=0.0)
        raise
    return daemons


def start_node(role: ProcessRole, settings: Settings) -> subprocess.Popen:
    """Start the node of this machine as a child that watches this process."""
    return _start("node", msgspec.structs.replace(role.settings(settings), rank=-1, local_rank=-1), role.spares)


def _start_scheduler(role: ProcessRole, settings: Settings, spares: SpareDaemons | None) -> subprocess.Popen:
    return _start("scheduler", msgspec.structs.replace(
        role.settings(settings), rank=-1, local_rank=-1, local_size=-1, node_index=-1, scheduler_index=0), spares)


def _start(command: str, settings: Settings, spares: SpareDaemons | None) -> subprocess.Popen:
    variables = environment(settings)
    found = spares.take(command, variables) if spares is not None else None
    return found or spare_daemons.start(command, clean_environment(os.environ) | variables)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return *environ* without the variables that tell a process its role or settings."""
    return {name: value for name, value in environ.items()
            if not name.startswith(ROLE_PREFIXES) and name not in ROLE_VARIABLES}


def run_scheduler(settings: Settings) -> int:
    """Be the scheduler until the job ends; return the exit code. SIGTERM and SIGINT abort the job with a reason.

    But SIGTERM leaves a job that can go on elsewhere to the next scheduler: this host may be shut down, or have lost
    its launcher. A launcher that ends the job signals all processes.
    """
    from ..orchestration.failover.scheduler import Scheduler
    from ..orchestration.host_lookup import resolve
    from ..orchestration.job.admission import JobSettings
    from ..orchestration.zmq_connections import interface

    if settings.num_nodes < 1 and settings.size < 1:
        raise ConfigError("the scheduler must know how many machines have ranks: set BPSFAST_NUM_NODES (--num-nodes), "
                          "or BPSFAST_SIZE where only the number of ranks is known")
    if not settings.scheduler:
        raise ConfigError("the scheduler must know where to listen: set BPSFAST_SCHEDULER (--scheduler host:port)")
    addresses = parse_addresses(settings.scheduler)
    number = own_address(settings)
    host, port = addresses[number]
    logs.configure(settings.log_level, "scheduler")
    take_job_key()
    allow_all_descriptors()
    is_replaced, is_last = _followers(len(addresses), number)
    job = JobSettings(
        num_nodes=settings.num_nodes, num_helpers=settings.num_helpers, max_helpers=settings.max_helpers,
        num_server_processes=settings.num_servers, size=settings.size, package=__version__,
        fingerprint=fingerprint(settings), placement=settings.placement, partition_nbytes=settings.partition_bytes,
        fusion_nbytes=settings.fusion_bytes, heartbeat_s=settings.heartbeat_s, lease_s=settings.lease_s,
        helper_lease_s=settings.helper_lease_s, start_timeout_s=settings.start_timeout_s,
        awaits_ranks=process_identity.is_below_launcher(), first_round=settings.first_round,
        min_workers=settings.min_workers if settings.on_worker_loss == "continue" else 0,
        has_others=len(addresses) > 1, is_replaced=is_replaced, is_last=is_last)
    scheduler = Scheduler(job, job_key(settings, settings.scheduler),
                          bind_host=resolve(host, _RESOLVE_S) if is_loopback(host) else interface(host), port=port)
    logs.set_identity(job=lambda: scheduler.job_name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: scheduler.stop(
            f"the scheduler got {signal.Signals(number).name}", is_host_ending=number == signal.SIGTERM))
    code, aborted = scheduler.run(), scheduler.aborted
    if scheduler.has_given_up:
        return LEFT_BEHIND
    return code if aborted is None else code_of_daemon(error_of(aborted.error, aborted.reason))


def _followers(n_addresses: int, number: int) -> tuple[bool, bool]:
    """Return `JobSettings.is_replaced` and `is_last` of the scheduler at address *number* of the list.

    A launcher starts them in this order.
    """
    is_one_of_launcher = n_addresses > 1 and process_identity.is_below_launcher()
    is_at_end = number == n_addresses - 1
    return is_one_of_launcher and not is_at_end, is_one_of_launcher and is_at_end


def own_address(settings: Settings) -> int:
    """Return which address of the list BPSFAST_SCHEDULER a scheduler on this machine listens on.

    It is `scheduler_index`, else the first one that is an address of this machine. Raises `ConfigError` if none of
    several is one.
    """
    addresses = parse_addresses(settings.scheduler)
    if settings.scheduler_index >= 0 or len(addresses) == 1:
        return max(0, settings.scheduler_index)
    own = local_hosts_among([host for host, _ in addresses])
    found = next((number for number, (host, _) in enumerate(addresses) if host in own), None)
    if found is None:
        raise ConfigError(f"none of the addresses in BPSFAST_SCHEDULER = {settings.scheduler} is one of this machine: "
                          "start the scheduler on a machine of the list, or say which address leads here by "
                          "BPSFAST_SCHEDULER_INDEX (--index), counted from 0")
    return found


def watch_starter(starter_fd: int, settings: Settings) -> None:
    """End this daemon some time after its starter, whose pidfd is *starter_fd*, in a daemon thread.

    Normally the daemon notices the loss and ends in order before that. In a job that goes on without lost ranks
    (on_worker_loss = continue) the starter may be such a rank: this does nothing, as a node ends once it has no ranks,
    and a scheduler once it has no nodes.
    """
    if settings.on_worker_loss == "continue":
        return
    grace_s = settings.lease_s + _STARTER_GRACE_S

    def wait_and_end() -> None:
        is_ready(starter_fd, None)
        time.sleep(grace_s)
        _log.error("the process that started me ended %g s ago and the job is still not over: ending", grace_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STARTER_GRACE_S)
        os._exit(FAILED)

    threading.Thread(target=wait_and_end, name="bpsfast-starter", daemon=True).start()


def tie_to_parent(argv: Sequence[str]) -> list[str]:
    """Return *argv* wrapped so that its process is killed when this process dies (`die_with_parent`)."""
    program = str(Path(__file__).with_name("die_with_parent.py"))
    return [sys.executable, "-S", "-E", program, process_identity.mark(), str(int(signal.SIGKILL)), *argv]


def reserve_port(host: str) -> socket.socket:
    """Return a bound socket, not listening, that keeps a free port of *host* for a daemon to bind.

    With SO_REUSEADDR on both sockets (ZeroMQ sets it) the daemon can bind the port, too; the kernel gives it to no one
    else.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        holder.bind((host, 0))
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    except OSError:
        holder.close()
        raise
    return holder


def reserve_master_port() -> socket.socket:
    """Return a socket as `reserve_port` does, for torch.distributed's store, which listens on all addresses."""
    try:
        return reserve_port("::")
    except OSError:  # a machine without IPv6
        return reserve_port("0.0.0.0")


def describe_exit(code: int) -> str:
    """Return "ended with exit code 3" or "was killed by SIGKILL" for a `Popen.returncode`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def terminate(process: subprocess.Popen, grace_s: float = 2.0) -> None:
    """End *process* by SIGTERM, after *grace_s* by SIGKILL, and reap it."""
    process.terminate()
    if not _wait(process, time.monotonic() + grace_s):
        process.kill()
        process.wait(timeout=10.0)


def _wait(process: subprocess.Popen, deadline: float) -> bool:
    try:
        process.wait(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        return False
    return True
