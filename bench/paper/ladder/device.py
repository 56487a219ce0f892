"""For `bench ladder`: the RDMA port of one end, and its queue pairs."""
from __future__ import annotations

import errno

import bpsfast.bench.paper.ladder.exchange as exchange
from bpsfast.base.settings import Settings
from bpsfast.bench.paper.ladder.control import Offer
from bpsfast.hardware.host import Host
from bpsfast.hardware.rdma_route import Rail, choose, peer_address
from bpsfast.orchestration.errors import UnsupportedError
from bpsfast.pyx import verbs

#: Writes of one end that may be in flight.
MAX_SEND = 64
#: 4.096 us * 2**18 = 1.07 s until an unanswered packet is sent again. On a busy machine a software device answers late;
#: resent packets would have other causes than the variant, and some software devices fail after them.
_TIMEOUT = 18


def usable(devices: str, gid_index: int, peer: str | None = None) -> list[Rail]:
    """Return the usable ports, the best towards *peer* first. *devices*: "" or exact names such as mlx5_0 or mlx5_0:1.

    Raises `OSError` (ENODEV) with the reason if there is none, `ConfigError` if *devices* or *gid_index* do not exist.
    """
    host = Host()
    if not host.devices:
        raise OSError(errno.ENODEV, "the ladder needs an RDMA device, /sys/class/infiniband is empty; "
                                    "`bpsfast doctor` says why")
    address = peer_address(host, peer) if peer else None
    choice = choose(host, Settings(rdma_devices=f"={devices}" if devices else "", rdma_gid_index=gid_index), address)
    try:
        return [*choice.require(), *choice.spare]
    except UnsupportedError as exc:
        raise OSError(errno.ENODEV, str(exc)) from exc


class Port:
    """An open port. Close everything made with it first."""

    def __init__(self, rail: Rail) -> None:
        self.rail = rail
        self.device = verbs.Device(rail.device)
        self.domain = verbs.ProtectionDomain(self.device)
        found = self.device.port(rail.port)
        self._mtu, self._lid, self._link_layer = found["active_mtu"], found["lid"], found["link_layer"]

    def completions(self, n_parts: list[int]) -> verbs.CompletionQueue:
        """Make the completion queue of ends with *n_parts* partitions each."""
        return verbs.CompletionQueue(self.device, sum(MAX_SEND + exchange.receives(n) for n in n_parts), events=True)

    def pair(self, queue: verbs.CompletionQueue, n_parts: int) -> verbs.QueuePair:
        """Make a queue pair for an end of *n_parts* partitions, in state INIT."""
        pair = verbs.QueuePair(self.domain, queue, queue, max_send=MAX_SEND, max_recv=exchange.receives(n_parts),
                               max_send_sge=2)
        pair.to_init(self.rail.port, pkey_index=self.rail.pkey_index)
        return pair

    def offer(self, pair: verbs.QueuePair, arrival: int = 0, rkey: int = 0) -> Offer:
        """Return the data that the peer of *pair* needs."""
        gid = self.rail.gid.value.hex() if self.rail.gid else ""
        return Offer(pair.number, pair.psn, gid, self._lid, self._mtu, arrival, rkey)

    def connect(self, pair: verbs.QueuePair, peer: Offer) -> None:
        """Connect *pair* to *peer*."""
        pair.to_rtr(peer.number, peer.psn, mtu=min(self._mtu, peer.mtu),
                    **self.rail.path(self._link_layer, peer.lid, bytes.fromhex(peer.gid)))
        pair.to_rts(timeout=_TIMEOUT)

    def close(self) -> None:
        """Close the device. Idempotent."""
        self.domain.close()
        self.device.close()

    def __enter__(self) -> Port:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
