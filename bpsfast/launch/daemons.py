"""The two daemons of a job, scheduler and node: how they are started, tied to their starter, and ended.

Two ways of not outliving the starter, for two situations:

* Under ``bpsfast run`` every process has the launcher as its parent and is killed with it (`tethered`).
* Started by a rank (torchrun, BytePS's variables, a single process) a daemon must see that rank die, tell the others in
  words, and only then end. It gets a session of its own, so that a signal to the rank's process group passes it by, and
  the rank's pidfd: `lease_s` + 5 s after the rank has ended, a daemon that is still there ends itself.
"""
from __future__ import annotations

import functools
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..base import logs, process_mark
from ..base.exit_codes import FAILED, code_of_daemon
from ..base.settings import Settings, environment, fingerprint, parse_address, take_job_key
from ..hardware.affinity.binding import unbound_cpus
from ..hardware.affinity.device_threads import on_cores
from ..orchestration.errors import ConfigError, error_of
from .die_with_parent import VARIABLE as LAUNCHER_VARIABLE
from .process_role import ProcessRole, default_node_id, is_loopback, job_key
from .restarter import Restarter

_log = logging.getLogger("bpsfast.daemons")

#: Variables by which a launcher tells a process its place: a daemon gets its place from its starter alone.
PLACE_PREFIXES = ("BPSFAST_", "DMLC_", "BYTEPS_", "TORCHELASTIC_")
PLACE_VARIABLES = frozenset({
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME",
    "ROLE_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "PS_VERBOSE", "PS_HEARTBEAT_INTERVAL",
    "PS_HEARTBEAT_TIMEOUT",
})

_STARTER_GRACE_S = 5.0
#: How often a process that waits for others' end says so.
_REMARK_S = 120.0


class Daemons:
    """The daemons that this process has started: none, a node, or a node and the scheduler. Owner thread only.

    A scheduler that a signal has ended is started again (`Restarter`): the job waits for it. `place` is the place they
    were started from, its scheduler port resolved.
    """

    def __init__(self, place: ProcessRole, reserved: socket.socket | None = None) -> None:
        self.place = place
        self.keeper: Restarter | None = None
        self.node: subprocess.Popen | None = None
        self._reserved = reserved

    @property
    def scheduler(self) -> subprocess.Popen | None:
        """The scheduler's process, if this process has started it."""
        return self.keeper.process if self.keeper is not None else None

    def failure(self) -> str | None:
        """Return which daemon has ended with an error, in words, or None. (A node ends with 0 if another one runs.)"""
        for name, process in (("scheduler", self.scheduler), ("node", self.node)):
            if process is not None and process.poll():
                if process is not self.node and process.returncode < 0 and self.keeper and self.keeper.returns:
                    continue
                return f"the {name} (pid {process.pid}) {describe_exit(process.returncode)}; its output is above"
        return None

    def reap(self) -> bool:
        """Tell whether all have ended; then nothing is left to close."""
        over = all(process is None or process.poll() is not None for process in (self.node, self.scheduler))
        if over:
            self.close(0.0)
        return over

    def wait_for_job_end(self) -> None:
        """Wait as long as the job lives, which other ranks have not left; say so now and then.

        There is no deadline but the job's own: it ends if those ranks, or this process's daemons, are lost. The node
        names the ranks (`node.control`).
        """
        begin = time.monotonic()
        for name, process in (("node", self.node), ("scheduler", self.scheduler)):
            while process is not None and not _wait(process, time.monotonic() + _REMARK_S):
                _log.warning("this process has left the job and waits for other ranks to leave it, too, for %.0f s so "
                             "far: the job's %s (pid %d) ends with it, and its node says above who they are",
                             time.monotonic() - begin, name, process.pid)
        self.close(0.0)

    def close(self, timeout_s: float = 10.0) -> None:
        """Wait until the daemons have ended by themselves; end those that do not. Idempotent."""
        deadline = time.monotonic() + timeout_s
        if self.keeper is not None:
            self.keeper.stop()
        for name, process in (("node", self.node), ("scheduler", self.scheduler)):
            if process is not None and not _wait(process, deadline):
                _log.warning("the %s (pid %d) is still running %g s after this rank has left: ending it", name,
                             process.pid, timeout_s)
                end(process)
        self.node = self.keeper = None
        if self._reserved is not None:
            self._reserved.close()
            self._reserved = None


def start(place: ProcessRole, settings: Settings) -> Daemons:
    """Start what *place* has to start on this machine: the scheduler, the node, both or neither."""
    reserved = place.reserved
    if place.starts_scheduler and place.scheduler[1] == 0:
        reserved = reserve_port(place.scheduler[0])
        place = msgspec.structs.replace(place, scheduler=(place.scheduler[0], reserved.getsockname()[1]))
    daemons = Daemons(place, reserved)
    try:
        if place.starts_scheduler:
            daemons.keeper = Restarter("scheduler", functools.partial(start_scheduler, place, settings), describe_exit)
        if place.starts_node:
            daemons.node = start_node(place, settings)
    except OSError:
        daemons.close(timeout_s=0.0)
        raise
    return daemons


def start_node(place: ProcessRole, settings: Settings) -> subprocess.Popen:
    """Start the node of this machine as a child that watches this process."""
    return _start("node", msgspec.structs.replace(place.settings(settings), rank=-1, local_rank=-1))


def start_scheduler(place: ProcessRole, settings: Settings) -> subprocess.Popen:
    """Start the job's scheduler as a child that watches this process."""
    return _start("scheduler", msgspec.structs.replace(
        place.settings(settings), rank=-1, local_rank=-1, local_size=-1, node_index=-1))


def _start(role: str, settings: Settings) -> subprocess.Popen:
    starter_fd = os.pidfd_open(os.getpid())
    try:
        with on_cores(unbound_cpus()):  # this rank's seat in another job is not the daemon's
            return subprocess.Popen(
                [sys.executable, "-m", "bpsfast", role, "--starter-fd", str(starter_fd)], pass_fds=[starter_fd],
                env=_daemon_environment() | environment(settings) | {"PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
            )
    finally:
        os.close(starter_fd)


def _daemon_environment() -> dict[str, str]:
    """Return the environment of a daemon that watches this process: a launcher's guardian leaves it to that."""
    return {name: value for name, value in clean_environment(os.environ).items() if name != LAUNCHER_VARIABLE}


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return *environ* without the variables that tell a process its place or settings."""
    return {name: value for name, value in environ.items()
            if not name.startswith(PLACE_PREFIXES) and name not in PLACE_VARIABLES}


def run_node(settings: Settings, is_awaited: bool = False) -> int:
    """Be this machine's node (or a helper) until the job is over; return the exit code.

    *is_awaited*: by a rank that started it, and cannot end before.
    """
    # kernels and the engine: ranks and the launcher, which load this file too, do without them
    from ..node import cpu_quota, main as node

    if not settings.scheduler:
        raise ConfigError("the node must know where the scheduler is: set BPSFAST_SCHEDULER (--scheduler host:port)")
    logs.configure(settings.log_level, "node")
    take_job_key()
    settings = cpu_quota.take(settings)
    return node.main(msgspec.structs.replace(settings, job_key=job_key(settings, settings.scheduler).hex(),
                                             node_id=default_node_id(settings, settings.scheduler)),
                     is_awaited=is_awaited, awaits_ranks=_is_ended_by_launcher())


def run_scheduler(settings: Settings) -> int:
    """Be the scheduler until the job is over; return the exit code. SIGTERM and SIGINT abort the job in words."""
    from .. import __version__
    from ..orchestration.failover.scheduler import Scheduler
    from ..orchestration.job.admission import JobSettings
    from ..orchestration.zmq_connections import interface

    if settings.num_nodes < 1 and settings.size < 1:
        raise ConfigError("the scheduler must know how many machines have ranks: set BPSFAST_NUM_NODES (--num-nodes), "
                          "or BPSFAST_SIZE where only the number of ranks is known")
    if not settings.scheduler:
        raise ConfigError("the scheduler must know where to listen: set BPSFAST_SCHEDULER (--scheduler host:port)")
    host, port = parse_address(settings.scheduler, "BPSFAST_SCHEDULER")
    logs.configure(settings.log_level, "scheduler")
    take_job_key()
    job = JobSettings(
        num_nodes=settings.num_nodes, num_helpers=settings.num_helpers, max_helpers=settings.max_helpers,
        num_server_processes=settings.num_servers, size=settings.size, package=__version__,
        fingerprint=fingerprint(settings), placement=settings.placement, partition_nbytes=settings.partition_bytes,
        fusion_nbytes=settings.fusion_bytes, heartbeat_s=settings.heartbeat_s, lease_s=settings.lease_s,
        helper_lease_s=settings.helper_lease_s, start_timeout_s=settings.start_timeout_s,
        awaits_ranks=_is_ended_by_launcher(), first_round=settings.first_round,
    )
    scheduler = Scheduler(job, job_key(settings, settings.scheduler),
                          bind_host="127.0.0.1" if is_loopback(host) else interface(host), port=port)
    logs.set_identity(job=lambda: scheduler.job_name)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: scheduler.stop(f"the scheduler got {signal.Signals(number).name}"))
    code, aborted = scheduler.run(), scheduler.aborted
    return code if aborted is None else code_of_daemon(error_of(aborted.error, aborted.reason))


def _is_ended_by_launcher() -> bool:
    """Whether a launcher has started this process, and ends it with the program that runs beside it.

    So there is no deadline for the first rank to come: the program may load data for long before it joins the job, or
    be none of bpsfast.
    """
    return LAUNCHER_VARIABLE in os.environ


def watch_starter(starter_fd: int, settings: Settings) -> None:
    """Make sure that this daemon ends after its starter has: *starter_fd* is the starter's pidfd.

    The daemon itself notices the loss and ends in order; this is the net below it. Starts a daemon thread.
    """
    grace_s = settings.lease_s + _STARTER_GRACE_S

    def wait_and_end() -> None:
        poll = select.poll()
        poll.register(starter_fd, select.POLLIN)
        poll.poll()
        time.sleep(grace_s)
        _log.error("the process that started me ended %g s ago and the job is still not over: ending", grace_s)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_STARTER_GRACE_S)
        os._exit(FAILED)

    threading.Thread(target=wait_and_end, name="bpsfast-starter", daemon=True).start()


def tie_to_parent(argv: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """Return *argv* so wrapped that the started process gets signal *number* when this process dies (see `tether`)."""
    program = str(Path(__file__).with_name("die_with_parent.py"))
    return [sys.executable, "-S", "-E", program, process_mark.mark(), str(int(number)), *argv]


def reserve_port(host: str) -> socket.socket:
    """Return a bound, not listening socket that keeps a free port of *host* for a daemon to bind.

    With SO_REUSEADDR on both sockets the daemon (ZeroMQ sets it) can bind beside it; nobody else is given it.
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
    """Return a socket as of `reserve_port` for the store of torch.distributed, which listens on all addresses."""
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


def end(process: subprocess.Popen, grace_s: float = 2.0) -> None:
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
