"""The nodes of `bench scale`: they send and answer the messages of real nodes, but hold no memory and sum nothing."""
from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import zmq

from bpsfast.orchestration import messages as m
from bpsfast.orchestration.errors import PeerLostError, StallError
from bpsfast.orchestration.failover.control_log import ControlLog
from bpsfast.orchestration.long_lists import as_sent, pieces, with_digest
from bpsfast.orchestration.security import curve_pair

_PACKAGE = "scale"
_SETTINGS = {"transport": "tcp"}
_HEARTBEAT_S = 1.0


class Traffic:
    """Messages and bytes, as ZeroMQ delivers them, between all nodes and the scheduler."""

    def __init__(self) -> None:
        self.n_sent = self.sent_nbytes = self.n_received = self.received_nbytes = 0

    def since(self, before: Traffic) -> dict[str, int]:
        """Return what has come since *before*, a copy of this object."""
        return {name: value - getattr(before, name) for name, value in vars(self).items()}

    def copy(self) -> Traffic:
        """Return the state of now."""
        made = Traffic()
        vars(made).update(vars(self))
        return made


class _Node:
    """One node: its connection and what it was told. `log` is that of all nodes, which know the same."""

    def __init__(self, nodes: Nodes, number: int, ranks: tuple[int, ...]) -> None:
        self.number, self.ranks = number, ranks
        self.index = -1
        self.n_dialled = 0
        self.has = Counter[str]()  # received messages by type
        self._nodes = nodes
        self._process = f"{os.getpid()}-{secrets.token_hex(12)}"
        self.socket: zmq.Socket[bytes]

    def dial(self) -> None:
        """Connect, over a new socket."""
        self.n_dialled += 1
        socket = self.socket = self._nodes.context.socket(zmq.DEALER)
        socket.curve_publickey, socket.curve_secretkey = self._nodes.node_keys
        socket.curve_serverkey = self._nodes.server_key
        socket.identity = m.connection_id(self._process, self.n_dialled)
        socket.sndhwm = socket.rcvhwm = socket.linger = 0
        socket.connect(f"tcp://127.0.0.1:{self._nodes.port}")
        self._nodes.watch(self)

    def hang_up(self) -> None:
        """Close the connection, as the kernel does when a process ends."""
        self._nodes.forget(self)
        self.socket.close()

    def say(self, message: m.Message) -> None:
        """Send *message*."""
        self._nodes.send(self, m.compressed(m.encode(as_sent(message))))

    def join(self) -> None:
        """Ask to be admitted."""
        self.say(m.Join(version=m.VERSION, package=_PACKAGE, host=f"host{self.number:05}", pid=10_000 + self.number,
                        index=-1, ranks=self.ranks, server_processes=0, shm_name="", nic_rate_bytes=12.5e9,
                        address=f"10.{self.number >> 16}.{self.number >> 8 & 255}.{self.number & 255}:7000",
                        settings=_SETTINGS))

    def hear(self, message: m.Message) -> None:
        """Answer *message*, as a node does that has nothing to allocate."""
        nodes = self._nodes
        self.has[type(message).__name__] += 1
        if isinstance(message, m.Welcome):
            self.index = message.index
        elif isinstance(message, m.Plan):
            self.say(m.Ready(generation=message.generation))
        elif isinstance(message, m.Recover):
            self.say(m.Ready(generation=message.generation))
        elif isinstance(message, m.Freeze):
            parts = nodes.parts_of(message.lost)
            self.say(m.FreezeReport(epoch=message.epoch, progress=tuple(
                (part, 0, 0, self.index) for part in parts) if self.ranks else ()))
        elif isinstance(message, m.ListWanted):
            for piece in pieces(message.digest, nodes.log.list_of(message.digest)):
                self.say(piece)
        elif isinstance(message, m.Abort | m.Refuse) and not getattr(message, "goes_on", False):
            raise PeerLostError(f"node {self.index} of `bench scale` was told: {message.error}: {message.reason}")


class Nodes:
    """*n_workers* nodes of *n_local* ranks, and *n_helpers* without; their scheduler listens at *port* of this machine.

    Owner thread only. `run_until` sends and answers messages; nothing happens outside it.
    """

    def __init__(self, n_workers: int, n_local: int, n_helpers: int, key: bytes, port: int) -> None:
        self.port, self.traffic = port, Traffic()
        self.node_keys, self.server_key = curve_pair(key, "node"), curve_pair(key, "scheduler")[0]
        self.context = zmq.Context()
        self.context.set(zmq.MAX_SOCKETS, 3 * (n_workers + n_helpers) + 16)
        self.log = ControlLog(_PACKAGE, _SETTINGS)
        self._poller = zmq.Poller()
        self._by_socket: dict[zmq.Socket[bytes], _Node] = {}
        self._decoded: dict[int, tuple[bytes, m.Message]] = {}  # the last message of each length
        self._next_heartbeat = 0.0
        self._n_heartbeats = 0
        self.all = [_Node(self, i, tuple(range(i * n_local, (i + 1) * n_local)) if i < n_workers else ())
                    for i in range(n_workers + n_helpers)]

    def watch(self, node: _Node) -> None:
        """Read what comes over *node*'s socket."""
        self._by_socket[node.socket] = node
        self._poller.register(node.socket, zmq.POLLIN)

    def forget(self, node: _Node) -> None:
        """Read nothing more of *node*."""
        del self._by_socket[node.socket]
        self._poller.unregister(node.socket)

    def send(self, node: _Node, data: bytes) -> None:
        """Send an encoded message of *node*."""
        node.socket.send(data, zmq.NOBLOCK)
        self.traffic.n_sent += 1
        self.traffic.sent_nbytes += len(data)

    def parts_of(self, lost: Sequence[int]) -> list[int]:
        """Return the partitions that nodes *lost* owned."""
        return [part.part for unit in self.log.units for part in unit.parts if part.owner in lost]

    def declare(self, tensors: tuple[m.TensorSpec, ...]) -> None:
        """Let every rank declare *tensors*."""
        whole = with_digest(m.Declare(rank=0, tensors=tensors))
        for node in self.all:
            for rank in node.ranks:
                message = msgspec.structs.replace(whole, rank=rank)
                if rank == 0:
                    self.log.said(message)
                node.say(message)

    def rejoin(self) -> None:
        """Connect every node to another scheduler, and tell it all that a node knows."""
        for node in list(self._by_socket.values()):
            node.hang_up()
            node.dial()
            messages = list(self.log.report())
            node.say(msgspec.structs.replace(messages[0], index=node.index))
            for message in messages[1:]:
                node.say(message)

    def run_until(self, done: Callable[[_Node], bool], what: str, timeout_s: float) -> None:
        """Send and answer messages until *done* holds for each connected node. Raises `StallError` after *timeout_s*.

        Raises `PeerLostError` if the scheduler ends the job.
        """
        deadline = time.monotonic() + timeout_s
        missing = set(self._by_socket.values())
        while missing:
            now = time.monotonic()
            if now >= deadline:
                raise StallError(f"`bench scale`: {len(missing)} of {len(self._by_socket)} nodes have no {what} after "
                                 f"{timeout_s:g} s")
            if now >= self._next_heartbeat:
                self._next_heartbeat = now + _HEARTBEAT_S
                self._n_heartbeats += 1
                for node in self._by_socket.values():
                    node.say(m.Heartbeat(sequence=self._n_heartbeats))
            for socket, _ in self._poller.poll(100):
                self._read(self._by_socket[socket])
            missing = {node for node in missing if not done(node)}

    def _read(self, node: _Node) -> None:
        while True:
            try:
                data = node.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.traffic.n_received += 1
            self.traffic.received_nbytes += len(data)
            message = self._decode(data)
            if node is self.all[0]:
                self.log.heard(message)
            node.hear(message)

    def _decode(self, data: bytes) -> m.Message:
        """Return the message in *data*; one that many nodes get is decoded once."""
        last = self._decoded.get(len(data))
        if last is None or last[0] != data:
            last = self._decoded[len(data)] = data, m.decode(data, "scheduler")
        return last[1]

    def close(self) -> None:
        """Close all connections."""
        for node in list(self._by_socket.values()):
            node.hang_up()
        self.context.term()
