"""The hosts of an elastic job: they are discovered, connected, lost, blacklisted and released while the job runs.

    a host                              what follows
    is listed, and slots are wanted     an agent is started there by ssh (`HostConnection`), then workers
    is lost, or cannot be connected     its workers are lost; it is blacklisted for a time, then connected again
    is not listed any more              its workers leave at the next commit, then its agent ends
    is listed with fewer slots          the newest workers there leave at the next commit

`HostWorkers` decides that, and where workers run, for the supervisor. Workers are started as long as there are free
slots and fewer than `max_ranks` of them. The slot of a worker that ended is free only for its replacement (the policy
*wait*) until the host is connected anew: else a program that fails at once would be started again and again.
"""
from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from ..orchestration.elastic.coordinator import ElasticRules
from ..orchestration.errors import BpsError, ConfigError, ProtocolError, StallError
from . import host_list, remote_protocol as messages
from .elastic_service import ElasticService, HasFileno, ReplaceWorker, StartWorkers, WorkerPool, member_of, worker
from .host_discovery import HostDiscovery
from .host_list import Host
from .processes import Command, Process, ProcessHost
from .remote_hosts import AGENT_TIMEOUT_S, ANSWER_TIMEOUT_S, LOOK_S, SSH_END_S, RemoteHost, together

#: Time for which a lost host is blacklisted, by default; it doubles with each further loss, up to the second one.
COOLDOWN_S, LONGEST_COOLDOWN_S = 60.0, 3600.0
#: How long a worker that was told to leave may run on once it has no rank; and ssh, once its input is closed.
_LEAVE_S, _END_S = 60.0, 6.0
#: Interval at which hosts that are to be released are looked at.
_RELEASE_LOOK_S = 0.5


class HostConnection:
    """Brings *remote* to where workers can be started, without blocking: `tick` until it `is_ready` or has an `error`.

    Its events go to *selector*, with handlers as data. The agent enters *directory*; *question* asks it by which
    address the host reaches the launcher, which is `address` then.
    """

    def __init__(self, remote: RemoteHost, directory: str, question: messages.Reach,
                 selector: selectors.BaseSelector) -> None:
        self.remote = remote
        self.error: BpsError | None = None
        self.address = ""
        self._requests: list[object] = [messages.Prepare(directory), question]
        self._question = question
        self._selector = selector
        self._limit_s = AGENT_TIMEOUT_S
        self._due_s = time.monotonic() + self._limit_s
        self._ssh_ends_by_s = math.inf
        self._awaits_agent = True
        selector.register(remote.connection.source, selectors.EVENT_READ, self._on_messages)
        selector.register(remote.stderr, selectors.EVENT_READ, lambda: remote.on_errors(selector))

    @property
    def is_ready(self) -> bool:
        """Whether workers can be started there."""
        return bool(self.address)

    def tick(self, now_s: float) -> float:
        """Do what is due; return when to call again (`time.monotonic`)."""
        if self.is_ready or self.error is not None:
            return math.inf
        if self._ssh_ends_by_s < math.inf:
            if not self.remote.has_ended and now_s < self._ssh_ends_by_s:
                return now_s + LOOK_S
            self._fail(self.remote.why_it_ended(0.0))
        elif now_s >= self._due_s:
            self._fail(self.remote.late(self._limit_s))
        else:
            return self._due_s
        return math.inf

    def abort(self) -> None:
        """Take no further messages. Idempotent."""
        for source in (self.remote.connection.source, self.remote.stderr):
            if source in self._selector.get_map():
                self._selector.unregister(source)

    def _fail(self, error: BpsError) -> None:
        self.error = error
        self.abort()

    def _on_messages(self) -> None:
        try:
            self.remote.receive_if_any()
        except EOFError:  # ssh is about to print why: `tick` waits for that
            if self.remote.connection.source in self._selector.get_map():
                self._selector.unregister(self.remote.connection.source)
            self._ssh_ends_by_s = time.monotonic() + SSH_END_S
            return
        except BpsError as exc:
            self._fail(exc)
            return
        if self._awaits_agent and self.remote.agent is not None:
            self._awaits_agent = False
            self._ask()
        while self.remote.answers and self.error is None:
            self._take(self.remote.answers.pop(0))

    def _ask(self) -> None:
        """Send the next request, if there is one."""
        if self._requests:
            self._limit_s = ANSWER_TIMEOUT_S
            self._due_s = time.monotonic() + self._limit_s
            self.remote.send(self._requests.pop(0))

    def _take(self, answer: object) -> None:
        name = self.remote.host.name
        if isinstance(answer, messages.Ready):
            self._ask()
        elif isinstance(answer, messages.Refused):
            self._fail(ConfigError(f"{name}: {answer.reason}"))
        elif isinstance(answer, messages.Reached):
            tries = dict(zip(self._question.addresses, answer.errors))
            self.address = next((address for address, error in tries.items() if not error), "")
            if self.address:
                self.abort()
                return
            tried = "; ".join(f"{address}: {error}" for address, error in tries.items()) or "it has none but loopback"
            self._fail(ConfigError(f"{name}: no address of the launcher's machine is reached from there at port "
                                   f"{self._question.port}, where the workers find each other ({tried}): open it "
                                   f"for {name} (--set ports=FIRST-LAST), or name the network (--set interface=NAME)"))
        else:
            self._fail(ProtocolError(f"{name}: the agent has sent {type(answer).__name__}, which was not asked for"))


class Connection(Protocol):
    """What `HostWorkers` needs of a `HostConnection`."""

    error: BpsError | None
    address: str

    @property
    def remote(self) -> RemoteHost:
        """The host, to open once the connection is ready."""

    @property
    def is_ready(self) -> bool:
        """See `HostConnection`."""

    def tick(self, now_s: float) -> float:
        """See `HostConnection`."""

    def abort(self) -> None:
        """See `HostConnection`."""


class _JobHost:
    """What is known of one host. `members` are the workers that run there, `leaving` those that were told to leave."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_listed = True
        self.connection: Connection | None = None
        self.remote: RemoteHost | None = None
        self.address = ""
        self.members: set[int] = set()
        self.leaving: set[int] = set()
        self.n_spent = 0  # slots whose workers have ended
        self.n_failures = 0
        self.barred_until_s = -math.inf
        self.release_by_s = math.inf
        self.error: BpsError | None = None

    @property
    def n_slots(self) -> int:
        """Slots for workers that may be started there now."""
        return self.host.slots if self.is_listed and self.remote is not None and not self.remote.lost else 0

    @property
    def n_free(self) -> int:
        """Slots for further workers."""
        return max(0, self.n_slots - len(self.members) - self.n_spent)

    @property
    def n_free_to_replace(self) -> int:
        """Slots for workers in place of lost ones."""
        return max(0, self.n_slots - len(self.members))


class HostWorkers(WorkerPool):
    """An elastic job's workers on several hosts, for the supervisor. Main thread only.

    *connect* begins to connect a host, *forget* is called with one that has ended; *command_of* returns the command of
    a worker on a host, which reaches the launcher by an address. *hosts* is the list of hosts; those of *discovery*
    follow. *selector* has the events of connections. *say* writes a line for the user.
    """

    def __init__(self, service: ElasticService, rules: ElasticRules, hosts: Sequence[Host], *,
                 connect: Callable[[Host], Connection], forget: Callable[[RemoteHost], None],
                 command_of: Callable[[Host, str], Command], selector: selectors.EpollSelector,
                 say: Callable[[str], None], cooldown_s: float = COOLDOWN_S,
                 discovery: HostDiscovery | None = None) -> None:
        super().__init__(service, [], rules.lost_worker != "abort")
        self._rules = rules
        self._connect_to, self._forget, self._command_of, self._say = connect, forget, command_of, say
        self._selector = selector
        self._cooldown_s = cooldown_s
        self._discovery = discovery
        self._hosts: dict[str, _JobHost] = {}
        self._host_of: dict[int, _JobHost] = {}
        self._to_replace: list[int] = []  # lost members whose replacement waits for a free slot
        self._lost: set[int] = set()  # lost members that the service is about to have replaced
        self._instead_of: dict[int, int] = {}  # replacement -> the lost member
        self._told: set[int] = set()  # members that were told to leave
        self._lists: list[list[Host] | BpsError] = []  # discovered, and not looked at yet
        self._adopted: list[ProcessHost] = []
        self._closing: dict[RemoteHost, float] = {}  # hosts that end -> when they began to
        self._list(hosts)

    # -- before the job ---------------------------------------------------------------------------------------------

    def connect_first(self, n_ranks: int | None, within_s: float) -> int:
        """Connect hosts, and wait until there are slots for the first workers; return how many workers there are to be.

        *n_ranks*: as many as that; None: as many as there are slots, up to `max_ranks`.

        Raises `BpsError` if a host of a fixed list cannot be used, or discovered ones have too few slots *within_s*.
        """
        deadline = time.monotonic() + within_s
        needed = n_ranks or max(1, self._rules.min_ranks)
        if self._discovery is None:
            host_list.assign([each.host for each in self._hosts.values()], needed)  # raises if there are too few
        with selectors.DefaultSelector() as events:
            for source, handler in self.sources:
                events.register(source, selectors.EVENT_READ, handler)
            while True:
                now_s = time.monotonic()
                next_s = min(self._advance(now_s), self._connect(now_s))
                is_connecting = any(each.connection is not None for each in self._hosts.values())
                n_slots = sum(each.n_slots for each in self._hosts.values())
                if self._discovery is None and not is_connecting:
                    self._raise_errors()
                may_begin = not is_connecting or (
                    self._discovery is not None and (n_ranks is not None or now_s >= deadline))
                if n_slots >= needed and may_begin:
                    return min(n_slots, n_ranks or self._rules.max_ranks)
                if self._discovery is not None and now_s >= deadline:
                    raise self._too_few(n_slots, needed, within_s)
                until_s = min(next_s, deadline) if self._discovery is not None else next_s
                for key, _ in events.select(max(0.0, until_s - time.monotonic()) if until_s < math.inf else None):
                    key.data()

    def first(self, n_workers: int) -> tuple[list[Command], list[ProcessHost]]:
        """Return the first workers, which fill the connected hosts in their order, and the host of each."""
        commands: list[Command] = []
        hosts: list[ProcessHost] = []
        for each in self._hosts.values():
            while len(commands) < n_workers and each.n_free and each.remote is not None:
                member, self._next = self._next, self._next + 1
                self._commands[member] = worker(member, self._command_of(each.host, each.address))
                self._note(member, each)
                commands.append(self._commands[member])
                hosts.append(each.remote)
        return commands, hosts

    def _raise_errors(self) -> None:
        failed = [each.error for each in self._hosts.values() if each.error is not None]
        if failed:
            raise together(failed, len(self._hosts))

    def _too_few(self, n_slots: int, needed: int, within_s: float) -> StallError:
        errors = "; ".join(str(each.error) for each in self._hosts.values() if each.error is not None)
        listed = ", ".join(f"{each.host.name}:{each.host.slots}" for each in self._hosts.values() if each.is_listed)
        return StallError(f"{n_slots} slots are connected after {within_s:g} s (--within), and {needed} ranks are to "
                          f"begin; the script lists {listed or 'no host'}" + (f" ({errors})" if errors else ""))

    # -- for the supervisor -----------------------------------------------------------------------------------------

    @property
    def sources(self) -> Sequence[tuple[HasFileno, Callable[[], object]]]:
        """See `WorkerPool`."""
        found: list[tuple[HasFileno, Callable[[], object]]] = [(self._selector, self._on_events)]
        if self._discovery is not None:
            found.append((self._discovery, self._take_lists))
        return found

    def step(self, now_s: float) -> float:
        """See `WorkerPool`."""
        next_s = self._advance(now_s)
        self._lost = set(filter(self._service.holds_rank, self._lost))
        if not (self._service.is_over or self._service.has_failed):
            self._place()
            next_s = min(next_s, self._connect(now_s))
        return next_s

    def adopted(self) -> list[ProcessHost]:
        """See `WorkerPool`."""
        found, self._adopted = self._adopted, []
        return found

    def released(self) -> list[ProcessHost]:
        """See `WorkerPool`."""
        found = [remote for remote in self._closing if remote.has_ended and not remote.has_running]
        for remote in found:
            del self._closing[remote]
            self._forget(remote)
        return list(found)

    def take(self, order: ReplaceWorker | StartWorkers) -> None:
        """See `WorkerPool`; a replacement is started once there is a free slot, others without an order."""
        if isinstance(order, ReplaceWorker):
            self._lost.discard(order.member)
            self._to_replace.append(order.member)

    def has_ended(self, process: Process) -> bool:
        """See `WorkerPool`."""
        self._note_gone(process)
        return super().has_ended(process)

    def is_superfluous(self, process: Process) -> bool:
        """See `WorkerPool`; also whether the training goes on without *process*, which was told to leave."""
        member = member_of(process.command)
        return super().is_superfluous(process) or (member in self._told and not self._service.holds_rank(member))

    def outlives(self, process: Process) -> None:
        """See `WorkerPool`."""
        self._note_gone(process)
        super().outlives(process)

    def _note_gone(self, process: Process) -> None:
        """Note that the worker *process* has ended, or that it outlives SIGKILL and keeps its slot's processors."""
        member = member_of(process.command)
        each = self._host_of.get(member)
        if each is not None and member in each.members:
            each.members.discard(member)
            each.n_spent += process.code is None or (member not in each.leaving and not process.is_lost)
            each.leaving.discard(member)
        if process.code != 0 and self._rules.lost_worker == "wait" and member not in self._told:
            self._lost.add(member if self._service.holds_rank(member) else self._instead_of.get(member, member))

    # -- hosts ------------------------------------------------------------------------------------------------------

    def _take_lists(self) -> None:
        if self._discovery is not None:
            self._lists += self._discovery.take()

    def _on_events(self) -> None:
        for key, _ in self._selector.select(0):
            if key.fileobj in self._selector.get_map():  # else an event before it has ended the watch
                key.data()

    def _advance(self, now_s: float) -> float:
        """Take lists of hosts and events of connections; return when something is due next."""
        lists, self._lists = self._lists, []
        for found in lists:
            if isinstance(found, BpsError):
                if not self._hosts and not self._running:
                    raise found  # there is no list to keep
                self._say(f"{found}: the last list of hosts is kept")
            else:
                self._list(found)
        return min([math.inf, *(self._advance_host(each, now_s) for each in list(self._hosts.values())),
                    *self._end_hosts(now_s)])

    def _list(self, hosts: Iterable[Host]) -> None:
        """Take *hosts* as the list of hosts, in its order."""
        before, self._hosts = self._hosts, {}
        for host in hosts:
            each = before.pop(host.name, None) or _JobHost(host)
            each.host, each.is_listed = host, True
            self._hosts[host.name] = each
        for name, each in before.items():  # their workers are to leave, and failures are remembered
            each.is_listed = False
            self._hosts[name] = each

    def _advance_host(self, each: _JobHost, now_s: float) -> float:
        if each.connection is not None:
            next_s = each.connection.tick(now_s)
            if each.connection.error is not None:
                each.error = each.connection.error
                self._has_failed(each, each.connection.remote, f"cannot be used ({each.error})", now_s)
            elif each.connection.is_ready:
                each.remote, each.address = each.connection.remote, each.connection.address
                each.connection, each.error, each.n_spent = None, None, 0
                self._adopted.append(each.remote)
                self._say(f"host {each.host.name} is connected, with {each.host.slots} slots")
            elif not each.is_listed:
                self._end(each.connection.remote, now_s)
                each.connection.abort()
                each.connection = None
            if each.connection is not None:
                return next_s
        if each.remote is None:
            return math.inf
        if each.remote.lost:
            self._has_failed(each, each.remote, f"is lost ({each.remote.why_lost})", now_s)
            return math.inf
        return self._let_go(each, each.remote, now_s)

    def _let_go(self, each: _JobHost, remote: RemoteHost, now_s: float) -> float:
        """Tell workers beyond the host's slots to leave, and release a host that is not listed and has none left."""
        n_wanted = each.host.slots if each.is_listed else 0
        surplus = sorted(each.members - each.leaving)[n_wanted:]
        if surplus:
            why = f"has {n_wanted} slots now" if each.is_listed else "is not listed any more"
            self._say(f"host {each.host.name} {why}: {', '.join(f'worker {member}' for member in surplus)} will leave "
                      "at the next commit")
            each.leaving.update(surplus)
            self._told.update(surplus)
            self._service.leave(surplus)
        if each.is_listed:
            each.release_by_s = math.inf
            return math.inf
        if any(self._service.holds_rank(member) for member in each.members):
            return now_s + _RELEASE_LOOK_S
        each.release_by_s = min(each.release_by_s, now_s + _LEAVE_S)
        if each.members and now_s < each.release_by_s:
            return now_s + _RELEASE_LOOK_S
        self._say(f"host {each.host.name} is released")
        each.remote, each.release_by_s = None, math.inf
        self._end(remote, now_s)
        return math.inf

    def _has_failed(self, each: _JobHost, remote: RemoteHost, why: str, now_s: float) -> None:
        """Blacklist a host that was lost, or could not be connected."""
        if each.connection is not None:
            each.connection.abort()
        each.connection = each.remote = None
        each.n_spent, each.release_by_s = 0, math.inf
        each.n_failures += 1
        cooldown_s = cooldown(self._cooldown_s, each.n_failures)
        each.barred_until_s = now_s + cooldown_s
        how_long = f"for {cooldown_s:g} s" if cooldown_s < math.inf else "for the rest of the job"
        self._say(f"host {each.host.name} {why}: no worker is started there {how_long}")
        self._end(remote, now_s)

    def _end(self, remote: RemoteHost, now_s: float) -> None:
        remote.begin_close()
        self._closing[remote] = now_s

    def _end_hosts(self, now_s: float) -> list[float]:
        """Kill connections that do not end; return when to look again."""
        for remote, since_s in self._closing.items():
            if now_s >= since_s + _END_S:
                remote.kill()
        return [now_s + _RELEASE_LOOK_S] if self._closing else []

    @property
    def _n_further(self) -> int:
        """How many workers are to be started besides replacements, as soon as there are slots."""
        n_staying = sum(len(each.members - each.leaving) for each in self._hosts.values())
        n_lost = len({*self._to_replace, *self._lost})
        return max(0, self._rules.max_ranks - n_staying - n_lost)

    def _connect(self, now_s: float) -> float:
        """Begin to connect as many hosts as are needed; return when a blacklisted one may be tried again."""
        n_coming = sum(each.host.slots for each in self._hosts.values() if each.connection is not None)
        n_free = sum(each.n_free for each in self._hosts.values())
        n_wanted = len(self._to_replace) + self._n_further - n_free - n_coming
        next_s = math.inf
        for each in list(self._hosts.values()):
            if n_wanted <= 0:
                break
            if not each.is_listed or each.connection is not None or each.remote is not None or each.members:
                continue
            if now_s < each.barred_until_s:
                next_s = min(next_s, each.barred_until_s)
                continue
            try:
                each.connection = self._connect_to(each.host)
            except (BpsError, OSError) as exc:  # ssh cannot be started: no memory, no descriptor
                each.error = exc if isinstance(exc, BpsError) else ConfigError(
                    f"{each.host.name}: ssh cannot be started: {exc}")
                each.n_failures += 1
                each.barred_until_s = now_s + cooldown(self._cooldown_s, each.n_failures)
                next_s = min(next_s, each.barred_until_s)
                self._say(str(each.error))
                continue
            n_wanted -= each.host.slots
            next_s = min(next_s, now_s)
        return next_s

    # -- workers ----------------------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Start replacements and further workers where there are slots."""
        for member in list(self._to_replace):
            if not self._service.holds_rank(member):  # a newcomer has its rank
                self._to_replace.remove(member)
                continue
            own = self._host_of[member]
            found = next((each for each in (own, *self._hosts.values()) if each.n_free_to_replace), None)
            if found is not None:
                self._to_replace.remove(member)
                found.n_spent = max(0, found.n_spent - 1)
                self._start_on(found, member)
        while self._n_further and (found := next((each for each in self._hosts.values() if each.n_free), None)):
            self._start_on(found)

    def _start_on(self, each: _JobHost, instead_of: int | None = None) -> None:
        command = self._command_of(each.host, each.address)
        member = self._start(command, instead_of, each.remote, was_ordered=False)
        self._note(member, each)
        if instead_of is not None:
            self._instead_of[member] = instead_of

    def _note(self, member: int, each: _JobHost) -> None:
        self._running.add(member)
        each.members.add(member)
        self._host_of[member] = each


def cooldown(first_s: float, n_failures: int) -> float:
    """Return for how long a host is blacklisted after its *n_failures*-th failure; *first_s* 0 means for ever."""
    if first_s <= 0.0:
        return math.inf
    return max(first_s, min(LONGEST_COOLDOWN_S, first_s * 2.0 ** min(n_failures - 1, 32)))
