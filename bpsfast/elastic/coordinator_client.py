"""A worker's connection to the coordinator of its elastic program, which forms one job after another.

`bpsfast run --elastic` gives each worker the coordinator's address and a number (settings *coordinator*, *member*). The
coordinator names the ranks of the next job. The ranks then find scheduler and nodes as those of a torch process group
do (`launch.rendezvous`), with the coordinator as their key-value store.
"""
from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

import msgspec

from ..base.addresses import is_loopback
from ..base.job_key import elastic_key, given_key
from ..base.process_identity import network_id
from ..base.settings import Settings, parse_address
from ..launch import rendezvous
from ..launch.daemons import clean_environment
from ..launch.spare_daemons import SpareDaemons
from ..orchestration import security
from ..orchestration.elastic import protocol
from ..orchestration.elastic.protocol import Dismissed, Formed, Over, Refused
from ..orchestration.errors import CapacityError, ConfigError, PeerLostError, StallError, error_of
from ..trainer import process

_log = logging.getLogger("bpsfast.elastic")
_POLL_S, _LOAD_POLL_S = 0.5, 0.05
#: How often a job is tried that cannot be formed although no worker was lost.
_MAX_TRIES = 3
#: Periodic messages of the coordinator that may be missing.
_MAX_MISSED_PINGS = 5
#: How long a worker that joins a running job waits for its spare daemons before it has itself let in.
_SPARES_S = 10.0
_DAEMONS = ("scheduler", "node")


class TrainingOver(SystemExit):
    """The training has ended before this worker joined. Nothing failed, and no rank waits for this worker.

    If it is not caught, the program ends with exit code 0 and without a traceback.
    """

    def __init__(self) -> None:
        super().__init__(0)

    def __str__(self) -> str:
        return "the training has ended without this worker, which came too late"


class WorkerDismissed(TrainingOver):
    """The training goes on without this worker, whose host was taken from the job. A SystemExit of code 0, too."""

    def __init__(self, reason: str) -> None:
        super().__init__()
        self._reason = reason

    def __str__(self) -> str:
        return self._reason


class CoordinatorClient:
    """This process's connection to the coordinator. Used by the training thread only."""

    def __init__(self, settings: Settings) -> None:
        key = given_key(settings)
        if not key or settings.member < 0:
            raise ConfigError("BPSFAST_COORDINATOR is set, but BPSFAST_JOB_KEY or BPSFAST_MEMBER is not: workers of an "
                              "elastic job are started by `bpsfast run --elastic` or `bpsfast add`")
        self.number = settings.member
        #: The coordinator's policy for a job that loses a worker.
        self.lost_worker = "abort"
        self.pid = os.getpid()
        self._settings = msgspec.structs.replace(settings, coordinator="", member=-1)
        self._node = f"{network_id()} {settings.node_id}"
        host, port = parse_address(settings.coordinator, "BPSFAST_COORDINATOR")
        #: Where the other machines may be, for a rank that does not know by which address they reach it.
        self._hint = {} if is_loopback(host) else {"MASTER_ADDR": host}
        self._channel = protocol.connect(host, port, elastic_key(security.job_key(key, "")))
        self._channel.tell(protocol.Hello(rank=self.number))
        #: The job that was joined last, counted from 1.
        self.job = 0
        #: How often the member of that job had committed that has most commits.
        self.n_commits = 0
        #: The ranks that the last job went on without.
        self.lost: tuple[int, ...] = ()
        #: Whether this process has the state of the training: `State.sync` was completed.
        self.has_state = False
        self._formed: Formed | Refused | Over | Dismissed | None = None
        self._values: dict[str, str] = {}
        self._void: dict[int, str] = {}
        self._heard_s = 0.0
        self._awaited, self._prepares = "nothing is known", False
        #: For the next job, so that it starts sooner.
        self._spares = SpareDaemons()
        self._is_ready = False  # to be let into a running job
        self._newcomers = protocol.Newcomers(0, 0)  # of the job it names: what is read late is not of the next one
        atexit.register(self.close)  # before those of sessions, so that it runs after them

    def join(self, n_commits: int = 0, reason: str = "") -> None:
        """Wait for the next job and join it. The process must have left its last job.

        Parameters
        ----------
        n_commits, reason
            This worker's number of commits, and why the last job failed, if it did. The coordinator gives up when jobs
            fail again and again without progress.

        Raises
        ------
        PeerLostError, StallError
            There is no next job: too many workers were lost ("no quorum") or are late, the launcher is gone or silent,
            or the job could not be formed several times although all workers were there.
        TrainingOver
            The training has ended meanwhile, or goes on without this worker (`WorkerDismissed`).
        """
        tries = 0
        while True:
            formed = self._await_job(n_commits, reason)
            try:
                place = rendezvous.role_of(_Store(self, formed.job), formed.rank, formed.size, self._settings,
                                           self._settings.start_timeout_s, {**os.environ, **self._hint})
                process.begin(msgspec.structs.replace(place, launcher="elastic", spares=self._spares), self._settings,
                              self._why_void)
                started = [place.starts_scheduler, place.starts_node]
                self._keep_spares([command for command, is_ours in zip(_DAEMONS, started) if is_ours])
                self._is_ready = True
                return
            except (PeerLostError, StallError) as exc:
                void = self._why_void()
                tries += void is None
                if tries == _MAX_TRIES:
                    raise
                reason = f"it did not come together: {void or exc}"
                _log.info("job %d: %s; another one is awaited", formed.job, reason)

    def newcomers(self) -> int:
        """Return how many workers are known to wait for this rank's job to let them in."""
        self._listen(0.0)
        return self._newcomers.count if self._newcomers.job == self.job else 0

    def leavers(self) -> int:
        """Return how many ranks of this rank's job are known to be told to leave it."""
        self._listen(0.0)
        return self._newcomers.n_leaving if self._newcomers.job == self.job else 0

    def _keep_spares(self, commands: Sequence[str]) -> None:
        self._spares.keep(commands, clean_environment(os.environ))

    def done(self) -> None:
        """Tell the coordinator that the training has ended on all ranks."""
        self._channel.tell(protocol.Done(member=self.number, lost=self.lost))
        self._spares.close()

    def close(self) -> None:
        """Send pending messages, for at most a second, and close. Does nothing in a fork, or when called again."""
        if self.pid == os.getpid():
            self._spares.close()
            self._channel.close()
            atexit.unregister(self.close)

    def _await_job(self, n_commits: int, reason: str) -> Formed:
        """Wait as long as the coordinator reports what it waits for. It has deadlines for all but a full job."""
        self._formed, self._prepares = None, False
        self._channel.tell(protocol.Come(member=self.number, node=self._node, has_state=self.has_state,
                                         n_commits=n_commits, reason=reason, is_ready=self._is_ready,
                                         lost=self.lost))
        loads_until_s = 0.0
        settings = self._settings
        begin_s = self._heard_s = time.monotonic()
        warn_s = begin_s + settings.stall_warn_s
        while self._formed is None:
            self._listen(_POLL_S if loads_until_s == 0.0 else _LOAD_POLL_S)
            now_s = time.monotonic()
            if self._prepares and not self._is_ready and self._formed is None:  # the others train meanwhile
                if loads_until_s == 0.0:
                    self._keep_spares(_DAEMONS)
                    _load_early()
                    now_s = self._heard_s = time.monotonic()  # nothing was read meanwhile
                    loads_until_s = now_s + _SPARES_S
                if self._spares.are_ready(0.0) or now_s >= loads_until_s:
                    self._is_ready, loads_until_s = True, 0.0
                    self._channel.tell(protocol.Prepared(member=self.number))
            if now_s - self._heard_s > max(settings.start_timeout_s, _MAX_MISSED_PINGS * protocol.WORD_EVERY_S
                                           if self._channel.is_connected else 0.0):
                raise self._silence(now_s - self._heard_s)
            if 0.0 < settings.stall_warn_s and now_s >= warn_s:
                warn_s += settings.stall_warn_s
                _log.warning("worker %d waits for its next job for %.0f s: %s", self.number, now_s - begin_s,
                             self._awaited)
        found = self._formed
        if isinstance(found, Over):
            raise TrainingOver()
        if isinstance(found, Dismissed):
            raise WorkerDismissed(found.reason)
        if isinstance(found, Refused):
            raise error_of(found.error, found.reason)
        self.job, self.lost_worker, self.n_commits = found.job, found.lost_worker, found.n_commits
        self._values = {}
        self.lost = ()
        return found

    def _silence(self, silent_s: float) -> StallError:
        if self._channel.is_connected:
            return StallError(f"worker {self.number}: bpsfast run, at {self._channel.address}, says nothing for "
                              f"{silent_s:.0f} s: is it stopped? Its last message was: {self._awaited}")
        return StallError(f"worker {self.number}: no process answers at {self._channel.address}, where bpsfast run "
                          f"should listen (BPSFAST_COORDINATOR), for {silent_s:.0f} s: has it ended, or is the job key "
                          "a different one?")

    def _why_void(self) -> str | None:
        """Return why the job that is being joined cannot be formed; None if no reason is known."""
        self._listen(0.0)
        return self._void.get(self.job)

    def _listen(self, timeout_s: float) -> None:
        if timeout_s > 0.0:
            self._channel.wait(None, timeout_s)
        for message in self._channel.recv_nowait():
            self._heard_s = time.monotonic()
            match message:
                case protocol.Wait():
                    self._awaited, self._prepares = message.awaited, message.prepares
                case Formed() | Refused() | Over() | Dismissed():
                    self._formed = message
                case protocol.Value() if message.job == self.job:
                    self._values[message.key] = message.value
                case protocol.Void():
                    self._void = {message.job: message.reason}
                case protocol.Newcomers():
                    self._newcomers = message

    # -- the store of a job ----------------------------------------------------------------------------------------

    def put(self, job: int, key: str, value: str) -> None:
        """Store *value* under *key* for *job*. Raises `CapacityError` if the coordinator does not store as much."""
        nbytes = protocol.stored_nbytes(key, value)
        if nbytes > protocol.MOST_VALUE_NBYTES or len(key) > protocol.MOST_KEY_LENGTH:
            raise CapacityError(f"{key[:protocol.MOST_KEY_LENGTH]!r} has {nbytes} bytes with its key of {len(key)} "
                                f"characters; the coordinator stores {protocol.MOST_VALUE_NBYTES} bytes under a key of "
                                f"{protocol.MOST_KEY_LENGTH}")
        self._channel.tell(protocol.Put(member=self.number, job=job, key=key, value=value))

    def value(self, job: int, key: str, timeout_s: float) -> str:
        """Wait for the value of *key*; raises `PeerLostError` once the job is void, `TimeoutError` at the deadline."""
        deadline = time.monotonic() + timeout_s
        if key not in self._values:
            self._channel.tell(protocol.Want(member=self.number, job=job, key=key))
        while key not in self._values:
            if job in self._void:
                raise PeerLostError(self._void[job])
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                raise TimeoutError(f"nobody has set {key} within {timeout_s:g} s")
            self._listen(min(left_s, _POLL_S))
        return self._values[key]


class _Store:
    """`rendezvous.Store` of one job."""

    def __init__(self, member: CoordinatorClient, job: int) -> None:
        self._member, self.job = member, job
        self._counters: dict[str, int] = {}

    def set(self, key: str, value: str, /) -> None:
        self._member.put(self.job, key, value)

    def get(self, key: str, /) -> bytes:
        return self._member.value(self.job, key, 0.0).encode()

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        for key in keys:
            self._member.value(self.job, key, timeout.total_seconds())

    def add(self, key: str, amount: int, /) -> int:
        """Count in this process: `rendezvous` counts only per rank, and each job has its own store."""
        self._counters[key] = self._counters.get(key, 0) + amount
        return self._counters[key]


def _load_early() -> None:
    """Load what a program loads after it has joined its job, while the others train instead of waiting for it.

    PyTorch loads this, in a second or more, when the first optimizer is made.
    """
    if "torch" in sys.modules:
        with contextlib.suppress(ImportError):
            importlib.import_module("torch._dynamo")


_member: CoordinatorClient | None = None


def open_client(settings: Settings) -> CoordinatorClient:
    """Return this process's connection to the coordinator that *settings* name; the first call makes it."""
    global _member
    if _member is None or _member.pid != os.getpid():
        _member = CoordinatorClient(settings)
    return _member


def current_client() -> CoordinatorClient | None:
    """Return this process's connection to a coordinator; None if it belongs to no elastic program."""
    return _member if _member is not None and _member.pid == os.getpid() else None
