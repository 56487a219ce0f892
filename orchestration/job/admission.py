"""Admits nodes to a job: collects joins until all are there, then fixes node order and ranks; rates of NICs. Pure."""
from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from .. import messages as m
from ..errors import ConfigError, MismatchError
from ..messages import VERSION, Join, NodeInfo


@dataclass(frozen=True)
class JobSettings:
    """The settings that the scheduler needs. `fingerprint` None: all nodes must agree with the first node's settings.

    `num_nodes` (machines with ranks) and `size` (ranks): -1: not known, but one of them must be. If only `size` is
    known, the machines are complete when all ranks are there. `num_server_processes` >= 0 counts as BytePS does: server
    processes on machines with ranks are those machines' nodes, the others are helpers, and `num_helpers` is ignored.
    `awaits_ranks`: the deadline of the start counts from the first node with ranks, because the launcher stops the
    scheduler if none comes. `min_workers`: the fewest ranks with which the job goes on after a loss; 0: it ends with
    any loss of a rank. `has_others`: there may be another scheduler, at another address of the list; `is_replaced`: the
    launcher starts one when this one ends because it hears too few nodes; `is_last`: the launcher starts none any more.
    """

    num_nodes: int
    num_helpers: int = 0
    max_helpers: int = 0
    num_server_processes: int = -1
    size: int = -1
    package: str = ""
    fingerprint: Mapping[str, str] | None = None
    placement: str = "optimal"
    partition_nbytes: int = 4096000
    fusion_nbytes: int = 4096000
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    helper_lease_s: float = 1.0
    start_timeout_s: float = 60.0
    awaits_ranks: bool = False
    first_round: int = 1
    min_workers: int = 0
    has_others: bool = False
    is_replaced: bool = False
    is_last: bool = False
    name: str = ""  # that no other job has

    @property
    def most_nodes(self) -> int:
        """The most nodes that a running job has at a time."""
        return (self.num_nodes if self.num_nodes >= 0 else self.size) + self.most_helpers

    @property
    def most_helpers(self) -> int:
        """The most helpers that a running job has at a time: those it starts with, or more if so set.

        BytePS's server processes count as helpers here: it is not known in advance on which machines they are.
        """
        return max(self.num_helpers, self.num_server_processes, self.max_helpers)


#: The most nodes of a kind that a text names one by one.
MOST_NAMED = 16


class Admission:
    """The joins so far, by sender, in the order of their first arrival."""

    def __init__(self, settings: JobSettings) -> None:
        self._expected = settings
        self._package = settings.package
        self._fingerprint = settings.fingerprint
        self._whose = "the scheduler"
        self.joins: dict[bytes, Join] = {}
        self._sender_of: dict[tuple[str, int, str], bytes] = {}  # by the process's place

    def check(self, join: Join) -> MismatchError | None:
        """Return why *join* cannot be in one job with the others: the field and both values; None if it can."""
        if join.version != VERSION:
            return self._mismatch(join, "protocol version", join.version, VERSION, "the scheduler")
        if self._package and join.package != self._package:
            return self._mismatch(join, "package version", join.package, self._package, "the scheduler")
        if self._fingerprint is None:
            return None
        differs = difference(join.settings, self._fingerprint)
        return self._mismatch(join, f"setting {differs[0]}", *differs[1:], self._whose) if differs is not None else None

    @staticmethod
    def _mismatch(join: Join, field: str, theirs: object, ours: object, whose: str) -> MismatchError:
        return MismatchError(f"{field} differs: {theirs} on host {join.host} (pid {join.pid}), {ours} on {whose}; "
                             "all roles of a job must agree")

    def add(self, sender: bytes, join: Join) -> bytes | None:
        """Admit *join*, or replace the earlier one of its process. `check` it first.

        Returns the connection of the earlier one if the process has reconnected: messages from there no longer count.
        """
        if self._fingerprint is None:
            self._fingerprint = dict(join.settings)
            self._whose = f"host {join.host} (pid {join.pid})"
        before = self._sender_of.get(process_of(join), sender)
        self._sender_of[process_of(join)] = sender
        if before != sender:  # its turn stays
            self.joins = {sender if each == before else each: other for each, other in self.joins.items()}
        self.joins[sender] = join
        return before if before != sender else None

    def remove(self, sender: bytes) -> None:
        """Forget the join of *sender*, which is refused, or gone."""
        join = self.joins.pop(sender, None)
        if join is not None:
            self._sender_of.pop(process_of(join), None)

    def surplus(self, join: Join) -> ConfigError | None:
        """Return why *join* is one too many: all nodes with ranks are there, and its process is none of them."""
        if not join.ranks or process_of(join) in self._sender_of or not self.has_all_ranks():
            return None
        workers, _ = self._split()
        return ConfigError(f"the job has all its nodes with ranks ({', '.join(other.host for _, other in workers)}); "
                           f"the node on host {join.host} (pid {join.pid}, {_ranks(len(join.ranks))}) is one too many")

    def contradiction(self) -> ConfigError | None:
        """Return why the joins so far can never become a complete job, if so."""
        try:
            workers, helpers = self._split()
            _check_wishes(workers, self._expected.num_nodes if self._expected.num_nodes >= 0 else None)
            _check_wishes(helpers, None)
        except ConfigError as exc:
            return exc
        expected = self._expected
        n_ranks = _count(workers)
        if expected.num_nodes < 0 and n_ranks > expected.size:
            hosts = ", ".join(f"{len(join.ranks)} on host {join.host}" for _, join in workers)
            return ConfigError(f"size is {expected.size}, but {n_ranks} ranks came: {hosts}")
        if 0 <= expected.num_nodes < len(workers):
            hosts = ", ".join(join.host for _, join in workers)
            return ConfigError(f"num_nodes is {expected.num_nodes}, but {len(workers)} nodes with ranks came: {hosts}")
        if expected.num_server_processes >= 0:
            found = self._server_processes()
            if found > expected.num_server_processes:
                return ConfigError(
                    f"DMLC_NUM_SERVER is {expected.num_server_processes}, but {found} server processes joined")
        elif len(helpers) > expected.num_helpers:
            hosts = ", ".join(join.host for _, join in helpers)
            return ConfigError(
                f"num_helpers is {expected.num_helpers}, but {len(helpers)} nodes without ranks joined: {hosts}")
        return None

    def has_all_ranks(self, but: bytes = b"") -> bool:
        """Whether all nodes with ranks have joined, not counting the one behind *but*."""
        workers = [each for each in self._split()[0] if each[0] != but]
        if self._expected.num_nodes < 0:
            return _count(workers) == self._expected.size
        return len(workers) == self._expected.num_nodes

    def complete(self) -> bool:
        """Whether all nodes have joined."""
        return self.has_all_ranks() and not self.n_missing_helpers

    @property
    def n_missing_helpers(self) -> int:
        """The number of helpers, or server processes where those are counted, that have not joined."""
        if self._expected.num_server_processes >= 0:
            return self._expected.num_server_processes - self._server_processes()
        return self._expected.num_helpers - len(self._split()[1])

    def roster(self) -> list[tuple[bytes, NodeInfo]]:
        """Return all nodes in node order: machines with ranks, then helpers.

        Raises `ConfigError` if the ranks are no permutation, or not as many as the promised size.
        """
        workers, helpers = self._split()
        indices = _node_indices(workers, self._expected.num_nodes)
        ordered = [workers[i] for i in sorted(range(len(workers)), key=indices.__getitem__)]
        ranks = _number_ranks([join for _, join in ordered], self._expected.size)
        ordered += sorted(helpers, key=lambda each: (each[1].index < 0, each[1].index))
        ranks += [()] * len(helpers)
        return [(sender, node_of(index, join, ranks[index])) for index, (sender, join) in enumerate(ordered)]

    def describe(self) -> str:
        """Describe who is here and who is not: "have node 0 (a, 2 ranks), ...; missing node 1 (never joined)"."""
        workers, helpers = self._split()
        indices = _node_indices(workers, self._expected.num_nodes)
        have = sorted(zip(indices, (join for _, join in workers)), key=lambda pair: pair[0])
        texts = [f"node {index} ({join.host}, {_ranks(len(join.ranks))})" for index, join in have[:MOST_NAMED]]
        if len(have) > MOST_NAMED:
            texts.append(f"{len(have) - MOST_NAMED} more nodes with ranks")
        texts += [f"helper {i} ({join.host})" for i, (_, join) in enumerate(helpers[:MOST_NAMED])]
        if len(helpers) > MOST_NAMED:
            texts.append(f"{len(helpers) - MOST_NAMED} more helpers")
        missing = _never_joined("node", [index for index in range(self._expected.num_nodes) if index not in indices])
        if self._expected.num_nodes < 0:
            came = {rank for _, join in workers for rank in join.ranks}
            missing += _never_joined("rank", [rank for rank in range(self._expected.size) if rank not in came],
                                     "its node never joined")
        if self._expected.num_server_processes >= 0:
            found = self._server_processes()
            if found < self._expected.num_server_processes:
                n_missing = self._expected.num_server_processes - found
                missing.append(f"{n_missing} of {self._expected.num_server_processes} server processes (never joined)")
        else:
            missing += _never_joined("helper", list(range(len(helpers), self._expected.num_helpers)))
        return f"have {', '.join(texts) or 'nobody'}; missing {', '.join(missing) or 'nobody'}"

    def _server_processes(self) -> int:
        return sum(join.server_processes for join in self.joins.values())

    def _split(self) -> tuple[list[tuple[bytes, Join]], list[tuple[bytes, Join]]]:
        everybody = list(self.joins.items())
        return [each for each in everybody if each[1].ranks], [each for each in everybody if not each[1].ranks]


def _never_joined(kind: str, numbers: list[int], why: str = "never joined") -> list[str]:
    """Return the nodes or ranks *numbers* in words: one by one, or as ranges if there are many."""
    if len(numbers) <= MOST_NAMED:
        return [f"{kind} {number} ({why})" for number in numbers]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    shown = [str(first) if first == last else f"{first} to {last}" for first, last in ranges[:MOST_NAMED]]
    more = ", ..." if len(ranges) > MOST_NAMED else ""
    return [f"{len(numbers)} {kind}s, {', '.join(shown)}{more} ({why})"]


def difference(theirs: Mapping[str, str], ours: Mapping[str, str]) -> tuple[str, str, str] | None:
    """Return the first setting that differs, and both values; None if none does."""
    for field in sorted({*ours, *theirs}):
        values = theirs.get(field, "(not sent)"), ours.get(field, "(not known)")
        if values[0] != values[1]:
            return field, *values
    return None


def process_of(node: Join | NodeInfo) -> tuple[str, int, str]:
    """Return what identifies *node*'s process, whatever connection it uses."""
    return node.host, node.pid, node.address


def find_node(join: Join, nodes: Iterable[NodeInfo]) -> NodeInfo | None:
    """Return the node whose process has sent *join*; None if it is new."""
    here = process_of(join)
    return next((node for node in nodes if process_of(node) == here), None)


def node_of(index: int, join: Join, ranks: tuple[int, ...] = ()) -> NodeInfo:
    """Return the `NodeInfo` of a node that has joined by *join*."""
    return NodeInfo(index=index, host=join.host, pid=join.pid, address=join.address, shm_name=join.shm_name,
                    ranks=ranks, nic_rate_bytes=join.nic_rate_bytes, page_nbytes=join.page_nbytes,
                    nic_limit_bytes=join.nic_limit_bytes, sum_rate_bytes=join.sum_rate_bytes, probes=join.probes,
                    room_nbytes=join.room_nbytes, copy_rate_bytes=join.copy_rate_bytes)


def _count(workers: list[tuple[bytes, Join]]) -> int:
    return sum(len(join.ranks) for _, join in workers)


def _ranks(n: int) -> str:
    return f"{n} rank" if n == 1 else f"{n} ranks"


def _check_wishes(nodes: list[tuple[bytes, Join]], n_indices: int | None) -> None:
    """Raise ConfigError if two nodes want the same index, or one that does not exist."""
    taken: dict[int, Join] = {}
    for _, join in nodes:
        if join.index < 0:
            continue
        if n_indices is not None and join.index >= n_indices:
            raise ConfigError(f"the node on host {join.host} has node_index {join.index}, but num_nodes is {n_indices} "
                              "(machines with ranks come first)")
        other = taken.setdefault(join.index, join)
        if other is not join:
            raise ConfigError(f"two nodes have node_index {join.index}: host {other.host} (pid {other.pid}) and "
                              f"host {join.host} (pid {join.pid})")


def _node_indices(workers: list[tuple[bytes, Join]], n_indices: int) -> list[int]:
    """Return each worker's index: as wanted, the others by lowest explicit rank, then by arrival, into free indices."""
    indices = [join.index for _, join in workers]
    free = iter(sorted(set(range(max(n_indices, len(workers)))) - set(indices)))
    lowest = [min((rank for rank in join.ranks if rank >= 0), default=-1) for _, join in workers]
    for i in sorted((i for i, index in enumerate(indices) if index < 0), key=lambda i: (lowest[i] < 0, lowest[i], i)):
        indices[i] = next(free, len(workers))
    return indices


def _number_ranks(joins: list[Join], size: int) -> list[tuple[int, ...]]:
    """Return each node's global ranks: the explicit ones, else numbered in node order."""
    explicit = [rank for join in joins for rank in join.ranks]
    n_ranks = len(explicit)
    if size >= 0 and n_ranks != size:
        raise ConfigError(f"size is {size}, but {n_ranks} ranks are there: "
                          + ", ".join(f"{len(join.ranks)} on host {join.host}" for join in joins))
    if all(rank < 0 for rank in explicit):
        firsts = [sum(len(join.ranks) for join in joins[:i]) for i in range(len(joins))]
        return [tuple(range(first, first + len(join.ranks))) for first, join in zip(firsts, joins)]
    if sorted(explicit) != list(range(n_ranks)):
        raise ConfigError(f"the ranks must be 0 to {n_ranks - 1}, each once, got "
                          + ", ".join(f"{list(join.ranks)} on host {join.host}" for join in joins)
                          + " (-1: not set; set all or none)")
    return [join.ranks for join in joins]


class NicRates:
    """The rates of the nodes' NICs: some are reported on joining, others are measured first. Owner thread only.

    *nodes*: those of the start.
    """

    def __init__(self, nodes: Sequence[m.NodeInfo]) -> None:
        #: Bytes per second by node index, 0 where not known.
        self.rates = [node.nic_rate_bytes for node in nodes]
        #: The nodes that measure still.
        self.waiting = {node.index for node in nodes if node.probes}

    def resume(self, rates: Sequence[float], waiting: Collection[int]) -> None:
        """Continue with the *rates* that another scheduler knew, *waiting* for at most those nodes."""
        self.rates[:] = [*rates, *self.rates[len(rates):]]
        self.waiting &= set(waiting)

    def add(self, rate_bytes: float) -> None:
        """Add the rate of the next node, which comes late and does not measure."""
        self.rates.append(rate_bytes)

    def measured(self, index: int, rate_bytes: float) -> bool:
        """Take a node's measurement; return False, and ignore it, if it was not to measure."""
        if index not in self.waiting:
            return False
        self.waiting.remove(index)
        self.rates[index] = rate_bytes
        return True

    def give_up(self, index: int) -> bool:
        """Stop waiting for a node, which is lost; return whether it was waited for."""
        was_awaited = index in self.waiting
        self.waiting.discard(index)
        return was_awaited

    def known(self, nodes: Sequence[m.NodeInfo]) -> list[m.NodeInfo]:
        """Return *nodes* with the known rates."""
        return [msgspec.structs.replace(node, nic_rate_bytes=rate) for node, rate in zip(nodes, self.rates)]

    @property
    def message(self) -> m.Rates:
        """What nodes are told when all have measured."""
        return m.Rates(nic_rate_bytes=tuple(self.rates))
