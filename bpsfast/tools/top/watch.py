"""For `bpsfast top`: finds the node processes of a job by their metrics ports, and reads all of them at once."""
from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from ...base.resources import Closing
from ...orchestration.errors import PeerLostError, StallError
from ...orchestration.host_lookup import format_address
from .sample import NodeSample, Sample, State, node_sample, rank_samples
from .scrape import Scrape, scrape

_N_THREADS = 16
#: A node with ranks counts as lost after this many samples in which others answered; at the end of a job all stop
#: within one sample.
_N_MISSED = 3


class MetricsAddress(NamedTuple):
    """The address of one node (`is_one`), or the first of consecutive ports where nodes may listen."""

    host: str
    port: int
    is_one: bool = False

    def __str__(self) -> str:
        return f"{format_address(self.host, self.port)}{'' if self.is_one else ' and the next ports'}"


class _Seen(NamedTuple):
    """The state of an address: the last two scrapes, the last error, and the number of failures in a row."""

    now: Scrape | None = None
    before: Scrape | None = None
    state: State = "up"
    n_missing: int = 0


class Watch(Closing):
    """Scrapes the nodes of the first job at *places*. Owner thread only; threads do the requests. `close` it."""

    def __init__(self, places: Sequence[MetricsAddress], timeout_s: float = 2.0) -> None:
        self._places = places
        self._timeout_s = timeout_s
        self._executor = ThreadPoolExecutor(_N_THREADS, thread_name_prefix="bpsfast-top")
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._last_s = time.monotonic()
        self._job = self._version = ""
        self._remarked: dict[int, State] = {}
        #: nodes with ranks that were lost while others answered
        self.missed: set[int] = set()

    def close(self) -> None:
        """Stop the threads, each after at most one scrape timeout."""
        self._executor.shutdown()

    def find(self, wait_s: float = 0.0) -> None:
        """Scrape for *wait_s* until a node answers; raise `PeerLostError` if none listens, `StallError` if silent."""
        deadline = time.monotonic() + wait_s
        while True:
            failures = self._scan()
            if self._job:
                return
            if time.monotonic() >= deadline:
                break
            time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))
        silent = [str(failure) for failure in failures if isinstance(failure, TimeoutError)]
        where = ", ".join(map(str, self._places))
        if silent:
            raise StallError(f"no metrics within {self._timeout_s:g} s at {where}: {silent[0]}; the job is starting, "
                             "or its nodes are stopped")
        raise PeerLostError(
            f"no node of a job serves metrics at {where} ({failures[0] if failures else 'nobody listens'}). "
            "Start the job with BPSFAST_METRICS_PORT=9400 (and BPSFAST_METRICS_HOST=0.0.0.0 to read it from other "
            "machines), and give this command the same port by --set metrics_port=N or HOST:PORT")

    def find_next(self, wait_s: float) -> bool:
        """Forget the ended job and find the next one at the same places; tell whether one came in time."""
        self._seen.clear()
        self._remarked.clear()
        self._job = ""
        try:
            self.find(wait_s)
        except (PeerLostError, StallError):
            return False
        return True

    def sample(self) -> Sample | None:
        """Scrape all nodes; return the sample since the last call, None if no node of the job listens any more."""
        begin, self._last_s = self._last_s, time.monotonic()
        self._scan()
        ours = {address: seen for address, seen in self._seen.items() if seen.now is not None}
        if all(seen.state == "gone" for seen in ours.values()):
            return None
        nodes = self._nodes(ours)
        missing = {seen.now.node for seen in ours.values() if seen.now and seen.n_missing >= _N_MISSED}
        self.missed |= {node.node for node in nodes if node.state in ("gone", "lost") and not node.is_helper
                        and node.node in missing}
        pairs = {seen.now.node: (seen.before, seen.now) for seen in ours.values()
                 if seen.now and seen.before and seen.state == "up"}
        return Sample(time=time.time(), seconds=self._last_s - begin, job=self._job, version=self._version, nodes=nodes,
                      ranks=rank_samples(pairs), remarks=self._remarks(nodes))

    def _scan(self) -> list[OSError]:
        """Scrape all known nodes and, if the job may have more, other addresses; return the errors of those."""
        known, asked = list(self._seen), set(self._seen)
        for address, answer in zip(known, self._executor.map(self._ask, known)):
            self._heard(address, answer)
        failures: list[OSError] = []
        while len(self._seen) < self._n_members or not self._job:
            new = [address for place in self._places for address in self._candidates(place) if address not in asked]
            if not new:
                break
            asked |= set(new)
            for address, answer in zip(new, self._executor.map(self._ask, new)):
                if isinstance(answer, Scrape):
                    self._heard(address, answer)
                else:
                    failures.append(answer)
        return failures

    def _candidates(self, place: MetricsAddress) -> list[tuple[str, int]]:
        n_ports = 1 if place.is_one else max(self._n_members, 1)
        return [(place.host, port) for port in range(place.port, min(65536, place.port + n_ports))]

    @property
    def _n_members(self) -> int:
        """Number of nodes that the job has had, as far as its metrics tell; as many ports may be in use."""
        return max((len(seen.now.all("bpsfast_member_up")) for seen in self._seen.values() if seen.now), default=0)

    def _ask(self, address: tuple[str, int]) -> Scrape | OSError:
        try:
            return scrape(*address, self._timeout_s)
        except OSError as exc:
            return exc

    def _heard(self, address: tuple[str, int], answer: Scrape | OSError) -> None:
        seen = self._seen.get(address, _Seen())
        if isinstance(answer, Scrape):
            if not self._job:
                self._job, self._version = answer.labels["name"], answer.labels["version"]
            if answer.labels["name"] != self._job:  # another job, or the next one at the same port
                if seen.now is not None:
                    self._seen[address] = seen._replace(state="gone", n_missing=seen.n_missing + 1)
                return
            self._seen[address] = _Seen(answer, seen.now)
        else:  # no route or no time: this says nothing of the node
            state: State = "gone" if isinstance(answer, ConnectionError) else "silent"
            self._seen[address] = seen._replace(state=state, n_missing=seen.n_missing + 1)

    def _nodes(self, ours: dict[tuple[str, int], _Seen]) -> tuple[NodeSample, ...]:
        found: dict[int, NodeSample] = {}
        for (host, port), seen in ours.items():
            assert seen.now is not None, "those without were omitted"
            node = node_sample(seen.before if seen.state == "up" else None, seen.now, format_address(host, port))
            if seen.state != "up":
                node = NodeSample(node=node.node, state=seen.state, is_helper=node.is_helper, host=node.host,
                                  address=node.address)
            found[node.node] = node
        for member in [each for seen in ours.values() if seen.state == "up" and seen.now
                       for each in seen.now.all("bpsfast_member_up")]:
            index = int(member.labels["member"])
            known = found.get(index)
            if known is None or (not member.value and known.state != "up"):  # unseen: its address is unknown
                found[index] = NodeSample(
                    node=index, state="unseen" if member.value else "lost", host=member.labels["host"],
                    is_helper=member.labels["kind"] == "helper", address=known.address if known else "")
        return tuple(node for _, node in sorted(found.items()))

    def _remarks(self, nodes: Sequence[NodeSample]) -> tuple[str, ...]:
        words = {"up": "is there", "silent": "does not answer", "gone": "does not listen any more",
                 "lost": "is lost: the job goes on without it",
                 "unseen": "is in the job, but serves no metrics at these addresses"}
        now = {node.node: node.state for node in nodes}
        before, self._remarked = self._remarked, now
        return tuple(f"{'helper' if node.is_helper else 'node'} {node.node} ({node.host}) {words[node.state]}"
                     for node in nodes if before and before.get(node.node) != node.state)

