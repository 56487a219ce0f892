"""Runs the node: one process per machine that sums, owns memory and connections, and executes the scheduler's plans.

    gather    local ranks attach (a helper has none)
    join      Join -> Welcome -> connect to all peers -> Attached
    serve     Plan -> prepare -> Ready -> Commit -> Declared; memory for ranks; barriers; stall reports
              a helper is lost, or has joined: Freeze -> FreezeReport, Recover -> prepare -> Ready -> Commit
              the scheduler is lost: `SchedulerFailover`
    end       Finish: all ranks have left. Or an abort: every rank raises the same error; exit codes as in `exit_codes`

Threads: this control loop and the one that hears of lost connections (`dispatch`), both idle in steady state; the
native threads of the engine and of the streams. A helper is a node without ranks.
"""
from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import msgspec
import zmq

from .._version import __version__
from ..base import logs
from ..base.addresses import is_loopback, listening_socket, local_host, no_scheduler_hint
from ..base.end_reports import report
from ..base.exit_codes import ABORTED, FAILED, LEFT_BEHIND, code_of_daemon
from ..base.job_key import default_node_id, job_key
from ..base.process_identity import is_below_launcher
from ..base.resources import allow_all_descriptors
from ..base.settings import Settings, fingerprint, format_addresses, parse_addresses, take_job_key
from ..hardware.host import Host
from ..orchestration import messages
from ..orchestration.errors import (
    BpsError,
    ClosedError,
    ConfigError,
    PeerLostError,
    ProtocolError,
    StallError,
    error_of,
)
from ..orchestration.failover.control_log import ControlLog
from ..orchestration.host_lookup import format_address
from ..orchestration.long_lists import pieces, with_digest
from ..orchestration.scheduler_client import SchedulerClient
from . import capacity, cpu_quota, local_listener, metrics, transport
from .affinity import NodeAffinity
from .event_loop import EventLoop, stop_signals
from .local_ranks import LocalRanks
from .metrics import Reading, Status
from .peers import GRACE_S, Peers
from .plans import Plans
from .recovery import Recovery, SchedulerFailover
from .regions import PAGE_NBYTES
from .runtime import NodeRuntime
from .transport import Epochs

log = logging.getLogger("bpsfast.node")

_TICK_S = 0.25
_HEARTBEAT_CHECK_S = 0.1
#: The number of the node's own question which ranks have not left; ranks number theirs from 0 on.
_OWN_QUESTION = -1

T = TypeVar("T")


def run_node(settings: Settings, is_awaited: bool = False) -> int:
    """Be this machine's node (or a helper) until the job ends; return the exit code.

    *is_awaited*: see `main`.
    """
    if not settings.scheduler:
        raise ConfigError("the node must know where the scheduler is: set BPSFAST_SCHEDULER (--scheduler host:port)")
    logs.configure(settings.log_level, "node")
    take_job_key()
    settings = cpu_quota.take(settings)
    return main(msgspec.structs.replace(settings, job_key=job_key(settings, settings.scheduler).hex(),
                                        node_id=default_node_id(settings, settings.scheduler)),
                is_awaited=is_awaited, awaits_ranks=is_below_launcher())


def main(settings: Settings, host: Host | None = None, is_awaited: bool = False, awaits_ranks: bool = False) -> int:
    """Run the node of this machine until the job ends; return the exit code.

    If the machine already has a node, a BytePS-style server process (local_size unknown) waits beside it, and any other
    process returns 0 at once: the ranks attach to the existing node.

    *host*: the machine; a recorded one in tests. *is_awaited*: a rank started this process, and cannot end before it
    does: log for which ranks it waits. *awaits_ranks*: `start_timeout_s` begins when the first rank attaches, not now.
    The launcher that started this process ends it if no rank attaches.
    """
    logs.configure(settings.log_level, "node" if settings.local_size else "helper")
    allow_all_descriptors()
    key = bytes.fromhex(settings.job_key)
    try:
        transport.check(settings)
        metrics.check(settings)
        listener = local_listener.bind(key, settings.node_id)
        if listener is None:
            log.info("this machine already has a node (node_id %r)", settings.node_id)
            if settings.local_size >= 0:
                return 0
            return local_listener.attach_server(key, settings.node_id, os.getpid(), settings.start_timeout_s)
        return Node(settings, key, listener, host, is_awaited, awaits_ranks).run()
    except BpsError as exc:
        log.error("%s: %s", type(exc).__name__, exc)
        return code_of_daemon(exc)


class Node:
    """The control loop of a node. Implements `ControlLoop`, which describes what the other parts call.

    Made and run by one thread; owns everything it makes.
    """

    def __init__(self, settings: Settings, key: bytes, listener: socket.socket, host: Host | None = None,
                 is_awaited: bool = False, awaits_ranks: bool = False) -> None:
        self._settings = settings
        self._is_awaited = is_awaited
        self._awaits_ranks = awaits_ranks
        self._starter_left_at = 0.0  # when the rank left that started this process
        self._key = key
        self._fingerprint = fingerprint(settings)
        self._loop = EventLoop(self._broken)
        self._local_ranks = LocalRanks(self, self._loop, settings, __version__, self._fingerprint)
        self._local_listener = local_listener.LocalListener(
            self._loop, listener, key, self._local_ranks.attach_rank, self._local_ranks.attach_server,
            lambda link: self._peers.add_shm_link(link))
        self._schedulers = parse_addresses(settings.scheduler)
        self._data_listener = listening_socket(local_host(settings, [host for host, _ in self._schedulers]),
                                               settings.ports)
        address = self._data_listener.getsockname()[0]
        self._affinity = NodeAffinity(settings, address, host)  # before there are threads
        self._epochs = Epochs()
        self._runtime = NodeRuntime(
            settings, lambda source, code: self._peers.source_lost_soon(source, code), self._affinity,
            self.run_with_heartbeats)
        self._plans = Plans(self, self._loop, self._runtime, self._local_ranks, settings.start_timeout_s)
        self._capacity = capacity.of(settings, address)
        self._membership: SchedulerClient | None = None
        self._peers = Peers(self, self._loop, settings, key, self._data_listener, self._plans, self._local_ranks,
                            self._epochs)
        self._control_log = ControlLog(__version__, self._fingerprint)
        self._scheduler_failover = SchedulerFailover(self, self._control_log, self._peers, self._plans,
                                                     settings.start_timeout_s)
        self._recovery = Recovery(self, self._runtime, self._plans, self._peers.drop_peer,
                                  self._peers.add_peer, self._epochs, self._local_ranks.tell_all)
        self._peers.on_connected = self._recovery.connected
        self._welcome: messages.Welcome | None = None
        self._exporter: metrics.Exporter | None = None
        self._generation = 0  # the last one that was committed
        self._ran_at = time.monotonic()  # when the control loop ran last
        self._dialled: tuple[zmq.Socket[bytes], ...] = ()
        self._unread: list[messages.Message] = []
        self._is_alone = False  # the scheduler is lost, and there will be no other
        self._n_control = 0
        self._exit_code: int | None = None
        self._leave_at = 0.0
        self._handlers: dict[type, Callable[..., None]] = {
            messages.Welcome: self._on_welcome, messages.Joined: self._peers.expect,
            messages.NewcomerGone: self._peers.not_coming, messages.ProbeRequest: self._peers.probe,
            messages.RejoinRequest: self._scheduler_failover.recalled,
            messages.ListWanted: self._on_list_wanted,
            messages.Resume: self._scheduler_failover.resumed,
            messages.Rates: self._peers.rates_known,
            messages.Refuse: self._on_refuse, messages.Plan: self._plans.prepare,
            messages.Commit: self._on_commit, messages.Freeze: self._recovery.freeze,
            messages.Recover: self._recovery.prepare, messages.DeclareFailed: self._plans.refused,
            messages.Retired: self._plans.retired,
            messages.CreditChanged: lambda message: self._runtime.set_credit(message.nbytes),
            messages.BarrierDone: self._local_ranks.tell_all, messages.StallReportRequest: self._on_stall_ask,
            messages.StallAnswer: self._on_answer, messages.LagReportRequest: self._on_lag_ask,
            messages.LagAnswer: self._on_answer, messages.KeyValueReply: self._on_answer,
            messages.FirstRankLeft: self._local_ranks.first_rank_left, messages.Abort: self._on_abort,
            messages.Finish: self._on_finish,
        }

    def run(self) -> int:
        """Serve until the job ends; return the exit code."""
        if not self._awaits_ranks:
            self._gather()
        self._export()
        with stop_signals(lambda name: self._loop.call_soon(lambda: self._stopped(name))):
            try:
                if self._settings.local_size <= 0:
                    self.join()
                while not self._over():
                    self._loop.run_once(_TICK_S)
                    self._ran_at = time.monotonic()
                    self._turn()
            finally:
                self._close()
        assert self._exit_code is not None
        return self._exit_code

    def _gather(self) -> None:
        """Start the timeout of the ranks of this machine to attach."""
        self._loop.call_at(time.monotonic() + self._settings.start_timeout_s, self._check_gathered)

    def first_rank_attached(self) -> None:
        report("attached")
        if self._awaits_ranks:
            self._gather()

    def join(self) -> None:
        if self._membership is None:
            host, port = self._schedulers[0]
            self._membership = SchedulerClient(
                host, port, self._key, further=self._schedulers[1:], now=time.monotonic(),
                heartbeat_s=self._settings.heartbeat_s, lease_s=self._settings.lease_s,
                start_timeout_s=self._settings.start_timeout_s, pulse_s=self._settings.helper_lease_s / 4,
                asks_time=bool(self._settings.trace_dir))
            self._watch(*self._membership.sockets)
        host, port = self._data_listener.getsockname()[:2]
        ranks = self._local_ranks.requested_ranks()
        self._local_ranks.set_affinity(self._affinity)
        self._membership.send(messages.Join(
            version=messages.VERSION, package=__version__, host=socket.gethostname(), pid=os.getpid(),
            index=self._settings.node_index, ranks=ranks,
            server_processes=self._local_ranks.n_servers + (self._settings.local_size <= 0),
            address=format_address(self._settings.advertise or host, port),
            shm_name=self._local_listener.name.lstrip(b"\0").decode(), settings=self._fingerprint,
            page_nbytes=PAGE_NBYTES, room_nbytes=-1 if ranks else self._runtime.regions.room_nbytes,
            **self._capacity._asdict()))

    def _watch(self, *sockets: zmq.Socket[bytes]) -> None:
        for sock in self._dialled:
            self._loop.forget(sock)
        self._dialled = sockets
        for sock in sockets:
            self._loop.watch(sock, lambda: None)  # `_tick` reads after every turn

    @property
    def admitted(self) -> bool:
        return self._welcome is not None

    @property
    def ending(self) -> bool:
        return self._exit_code is not None

    @property
    def is_without_scheduler(self) -> bool:
        return self._scheduler_failover.lasts

    @property
    def runtime(self) -> NodeRuntime:
        return self._runtime

    def send(self, message: messages.Message) -> None:
        if isinstance(message, messages.Declare):
            message = with_digest(message)
        self._control_log.said(message)
        self.send_unrecorded(message)

    def send_unrecorded(self, message: messages.Message) -> None:
        self._n_control += 1
        if self._membership is not None:
            self._membership.send(message)

    def fail(self, error: BpsError, who: str = "", reason: str = "", tell: bool = True,
             level: int | None = None, code: int | None = None) -> None:
        """End the job with *error* on all ranks.

        *who*, *reason*, *tell*: the scheduler is told that *who* (default: this node) is lost for *reason*; not *tell*:
        it knows. *level*: of the log line; by default an error if no other process reports it. *code*: the exit code,
        by default that of `code_of_daemon`.
        """
        if self._exit_code is not None:
            return
        if level is None:
            level = logging.INFO if self._is_said_by_others(error) else logging.ERROR
        log.log(level, "%s%s: %s", "" if level == logging.ERROR else logs.ABORTED, type(error).__name__, error)
        if tell and self._membership is not None:
            self.send(messages.Lost(who=who or self.name, reason=reason or str(error),
                                    is_fatal=isinstance(error, ProtocolError)))
        # A job that has begun survives the failure of a helper, unless its scheduler has ended.
        survives = tell and self._welcome is not None and not self._local_ranks.ranks and not self._is_alone
        self._leave(error, LEFT_BEHIND if survives else code_of_daemon(error) if code is None else code)

    def _is_said_by_others(self, error: BpsError) -> bool:
        """Whether another process reports *error*: a rank of this machine, or, if a peer is lost, ranks of others.

        A rank that is lost has raised an error itself, or its launcher reports what has ended it.
        """
        return self._local_ranks.is_heard or (isinstance(error, PeerLostError) and not self._is_alone)

    def _leave(self, error: BpsError, code: int) -> None:
        if self._welcome is not None:  # else ranks of this job may still attach, and are told why it ended
            self._free_address()
        self._runtime.abort(error)
        self._local_ranks.abort(error)
        self._end(code)

    def _free_address(self) -> None:
        """Close the machine's local socket, before ranks are told of the end.

        A process that is told may at once look for, or become, the next job's node under the same name.
        """
        self._local_listener.close()

    def starter_left(self, rank: int) -> None:
        self._starter_left_at = time.monotonic()
        if self._is_awaited:
            self._ask_later_who_remains(rank)

    def _ask_later_who_remains(self, rank: int) -> None:
        """Ask the scheduler, after a while, for which ranks *rank* waits; the answer is logged."""
        self._loop.call_at(time.monotonic() + self._settings.stall_warn_s, lambda: self._ask_who_remains(rank))

    def _ask_who_remains(self, rank: int) -> None:
        if self._exit_code is None:
            self.send_unrecorded(messages.StallQuestion(rank=rank, question=_OWN_QUESTION, part=-1, round=0,
                                                        name=messages.THE_END))
            self._ask_later_who_remains(rank)

    def count_message(self) -> None:
        self._n_control += 1

    def counters(self) -> dict[str, int]:
        return self._runtime.flat_counters(self._n_control) | {
            "recoveries": self._recovery.count, "joined": self._recovery.n_joined}

    def _end(self, code: int) -> None:
        self._exit_code = code
        self._leave_at = time.monotonic() + GRACE_S

    def _over(self) -> bool:
        if self._exit_code is None:
            return False
        return self._local_ranks.settled(self._exit_code) or time.monotonic() >= self._leave_at

    def run_with_heartbeats(self, work: Callable[[], T]) -> T:
        """Return what *work* returns, and send heartbeats meanwhile: it may fault in gigabytes, or compile a kernel.

        Nothing else happens in this thread until it is done, so *work* may use this thread's objects.
        """
        with ThreadPoolExecutor(1, thread_name_prefix="bpsfast-work") as executor:
            future = executor.submit(work)
            while not wait([future], _HEARTBEAT_CHECK_S).done:
                self._send_heartbeat()
        return future.result()

    def _send_heartbeat(self) -> None:
        self._ran_at = time.monotonic()
        if self._membership is not None and self._exit_code is None:
            now = time.monotonic()
            self._unread += self._membership.recv_nowait(now)
            try:
                dialled = self._membership.tick(now)
            except BpsError:
                self._is_alone = True
                raise
            if dialled:
                self._dialled_anew()

    def _dialled_anew(self) -> None:
        """Send everything again over a new connection: the scheduler that answers may know nothing."""
        assert self._membership is not None
        self._watch(*self._membership.sockets)
        self._unread.clear()  # of a scheduler that is lost
        if not self.admitted:
            self.join()
            return
        self._scheduler_failover.begin(self._membership.address)

    def catch_up(self) -> None:
        self._send_heartbeat()
        while self._unread:
            message = self._unread.pop(0)
            self._n_control += 1
            self._control_log.heard(message)
            self._handlers[type(message)](message)

    def _tick(self) -> None:
        self.catch_up()
        if self._exit_code is None and self._scheduler_failover.is_over():
            log.info("all ranks have left, and there is no scheduler any more: this node ends")
            self._finish()
        self._local_ranks.flush()
        self._runtime.flush()

    def _turn(self) -> None:
        try:
            self._tick()
        except Exception as exc:
            self._broken(exc)

    def _broken(self, exc: Exception) -> None:
        """End the job, whatever was raised: a node that goes on in a broken state would make all ranks hang."""
        if isinstance(exc, BpsError):
            self.fail(exc)
        else:
            log.error("the node failed", exc_info=exc)
            self.fail(ProtocolError(f"{self.name} failed: {type(exc).__name__}: {exc}"))

    def _stopped(self, name: str) -> None:
        # The sender of the signal knows of it; the ranks are told.
        self.fail(PeerLostError(f"{self.name} (pid {os.getpid()} on {socket.gethostname()}) was stopped by {name}"),
                  level=logging.INFO, code=FAILED)

    def _check_gathered(self) -> None:
        if self._membership is None and self._exit_code is None:
            self.fail(StallError(f"{self._local_ranks.missing()} did not attach to the node of this machine (pid "
                                 f"{os.getpid()}) within {self._settings.start_timeout_s:g} s."
                                 f"{no_scheduler_hint(self._schedulers)}"))

    @property
    def name(self) -> str:
        return f"node {self._welcome.index}" if self._welcome else f"the node on {socket.gethostname()}"

    def _role(self, welcome: messages.Welcome) -> str:
        """Return the node's name in log lines: a helper is numbered among helpers."""
        if welcome.nodes[welcome.index].ranks:
            return self.name
        return f"helper {welcome.index - sum(bool(node.ranks) for node in welcome.nodes)}"

    def _close(self) -> None:
        if self._exporter is not None:
            self._exporter.close()
        if self._membership is not None:
            self._membership.close()
        self._local_listener.close()
        self._peers.close()
        self._data_listener.close()
        self._runtime.stop()
        if self._welcome is not None and self._membership is not None:
            self._runtime.write_trace(self._welcome.nodes[self._welcome.index], self._membership.clock.points)
        self._local_ranks.close()
        self._runtime.close()
        self._loop.close()

    # -- metrics and health -------------------------------------------------------------------------------

    def _export(self) -> None:
        """Start to serve metrics and health, if a setting asks for it."""
        settings = self._settings
        if settings.metrics_port or settings.metrics_textfile:
            # If all nodes run on one host, the index tells how many ports are taken; else `welcomed` does.
            n_before = max(0, settings.node_index) if is_loopback(self._schedulers[0][0]) else 0
            self._exporter = metrics.Exporter(settings, self._loop, self._status, self._reading, self._progress,
                                              n_before)

    def _status(self) -> Status:
        """Return what this node is, and whether it is ready. Any thread."""
        welcome, membership = self._welcome, self._membership
        return Status(-1 if welcome is None else welcome.index, "" if welcome is None else welcome.job,
                      self._why_not_ready(), membership is not None and membership.is_heard,
                      time.monotonic() - self._ran_at)

    def _why_not_ready(self) -> str:
        scheduler = f"the scheduler at {format_addresses(self._schedulers)}"
        if self.ending:
            return "the job is over"
        if self._membership is None:
            return f"waits for ranks of this machine: {self._local_ranks.missing()} has not attached yet"
        if self._welcome is None:
            return (f"waits for others to join the job that {scheduler} gathers" if self._membership.is_heard
                    else f"waits for {scheduler}")
        if not self._runtime.connected:
            return "connects to its peers"
        if self.is_without_scheduler or not self._membership.is_heard:
            return f"{scheduler} is lost: the job goes on, and waits for another one there"
        return ""

    def _progress(self) -> tuple[int, ...]:
        return self._runtime.progress() if self._runtime.connected else ()

    def _reading(self) -> Reading | None:
        runtime, recovery, welcome = self._runtime, self._recovery, self._welcome
        if welcome is None or not runtime.connected:
            return None
        return Reading(runtime.counters(), runtime.regions.nbytes_by_kind(),
                       {index: link.kind for index, link in runtime.links.items()}, runtime.lags(owned=False),
                       runtime.lags(owned=True), self._peers.members(), recovery.count, recovery.n_joined,
                       max(welcome.epoch, recovery.epoch), self._generation)

    # -- messages of the scheduler ------------------------------------------------------------------------

    def _on_welcome(self, message: messages.Welcome) -> None:
        self._welcome = message
        self._scheduler_failover.welcomed(message)
        logs.set_identity(self._role(message), message.job)
        self._local_ranks.admitted(message.nodes[message.index])
        self._epochs.begin(message.epoch)
        self._peers.welcomed(message)
        self._local_listener.set_node(message.index, self._epochs, self._runtime.shm_endpoint)
        if self._exporter is not None:
            me = message.nodes[message.index]
            self._exporter.welcomed(message.index, sum(node.host == me.host for node in message.nodes[:message.index]))

    def _on_list_wanted(self, message: messages.ListWanted) -> None:
        for piece in pieces(message.digest, self._control_log.list_of(message.digest)):
            self.send_unrecorded(piece)

    def _on_commit(self, message: messages.Commit) -> None:
        self._generation = message.generation
        self._peers.await_slots(message.generation)
        if not self._recovery.commit(message):
            self._plans.commit(message)

    def _on_refuse(self, message: messages.Refuse) -> None:
        # The job goes on without a refused helper; without a node with ranks it cannot begin.
        is_helper = not self._local_ranks.ranks and self._settings.local_size <= 0
        self.fail(error_of(message.error, message.reason), tell=False, code=LEFT_BEHIND if is_helper else None)

    def _on_abort(self, message: messages.Abort) -> None:
        error = error_of(message.error, message.reason)
        if message.goes_on:
            if not self.ending:
                log.warning("%s: %s", type(error).__name__, error)
                self._leave(error, LEFT_BEHIND)
            return
        # Ranks report it themselves; whoever stopped the scheduler knows that it was stopped.
        quiet = self._local_ranks.is_heard or isinstance(error, ClosedError)
        self.fail(error, tell=False, level=logging.INFO if quiet else logging.WARNING, code=ABORTED)

    def _on_finish(self, message: messages.Finish) -> None:
        self.send_unrecorded(messages.FinishAck())
        self._finish()

    def _finish(self) -> None:
        if self._exit_code is None:
            self._free_address()
            self._local_ranks.finish()
            self._end(0)

    def _on_stall_ask(self, message: messages.StallReportRequest) -> None:
        stage, ranks, nodes = self._runtime.missing(message.part, message.round)
        self.send(messages.StallReport(part=message.part, round=message.round, stage=stage, missing_ranks=ranks,
                                       missing_nodes=nodes, gone_ranks=self._local_ranks.gone(ranks)))

    def _on_lag_ask(self, message: messages.LagReportRequest) -> None:
        self.send(messages.LagReport(number=message.number, local=self._runtime.lags(owned=False),
                                     owned=self._runtime.lags(owned=True)))

    def _on_answer(self, message: messages.StallAnswer | messages.LagAnswer | messages.KeyValueReply) -> None:
        if isinstance(message, messages.StallAnswer) and message.question == _OWN_QUESTION:
            log.warning("rank %d has left the job and has waited %.0f s for the other ranks to leave: %s",
                        message.rank, time.monotonic() - self._starter_left_at, message.missing)
            return
        self._local_ranks.tell(message.rank, message)

