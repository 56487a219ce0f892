"""The data planes of two nodes in one process, over any transport, for the contract tests of transports."""
from __future__ import annotations

import os
import queue
import socket
import threading

import msgspec

from bpsfast.base.addresses import listening_socket
from bpsfast.base.message_socket import MessageSocket
from bpsfast.base.settings import Settings
from bpsfast.node.event_loop import EventLoop
from bpsfast.node.local_listener import LocalListener, bind
from bpsfast.node.local_ranks import LocalRank
from bpsfast.node.runtime import NodeRuntime
from bpsfast.node.transport import Epochs, Peering
from bpsfast.orchestration.codec import CodecSpec
from bpsfast.orchestration.host_lookup import format_address
from bpsfast.orchestration.messages import VERSION, Allocate, Attach, NodeInfo, Plan, TensorSpec, Welcome
from bpsfast.orchestration.placement.partition import plan_units
from bpsfast.orchestration.priority.send_queue import rank_parts
from bpsfast.pyx.port import Port
from tests.support.loopback import LOOPBACK

KEY = bytes(range(16))


class End:
    """One node with one rank: everything but the control plane."""

    def __init__(self, index: int, settings: Settings, key: bytes = KEY) -> None:
        self.index = index
        self.settings = settings
        self.key = key
        self.lost: queue.Queue[tuple[int, int]] = queue.Queue()
        self.errors: list[Exception] = []
        self.runtime = NodeRuntime(settings, lambda source, code: self.lost.put((source, code)))
        self.listener = listening_socket(LOOPBACK)
        self.loop = EventLoop(self.errors.append)
        local = bind(key, f"test-{os.getpid()}-{id(self)}")
        assert local is not None
        self.reception = LocalListener(self.loop, local, key, self._nobody, self._nobody,
                                   lambda link: self.peering.offer(link, "exchanged"))
        host, port = self.listener.getsockname()[:2]
        self.info = NodeInfo(index=index, host="here", pid=os.getpid(), address=format_address(host, port),
                             shm_name=local.getsockname().lstrip(b"\0").decode(), ranks=(index,), nic_rate_bytes=0.0)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        attach = Attach(version=VERSION, package="", pid=os.getpid(), local_rank=0, local_size=1, rank=index, size=2,
                        proof=b"", settings={})
        self.rank = LocalRank(MessageSocket(ours), attach, os.pidfd_open(os.getpid()), self.runtime.regions)
        self.rank_channel = MessageSocket(theirs)
        self.generation = None
        self.other = self
        self._views: list[memoryview] = []

    @staticmethod
    def _nobody(*_: object) -> None:
        raise AssertionError("no rank comes to this node")

    def begin(self, nodes: list[NodeInfo]) -> None:
        """Start connecting to the other end."""
        self.nodes = nodes
        self.peering = Peering(self.settings, self.key, Epochs(1), self.info, nodes, self.listener,
                               self.runtime.shm_endpoint, self.runtime.rails, lambda: self.loop.call_soon(lambda: None))
        self.reception.set_node(self.index, Epochs(1), self.runtime.shm_endpoint)
        self.peering.start()

    def finish(self) -> None:
        """Hand the connection to the engine and the rank its port."""
        me = self.nodes[self.index]
        self.runtime.connect(me, Welcome(index=self.index, epoch=1, nodes=tuple(self.nodes)), self.peering.take(),
                            self.peering.describe(), [self.rank])
        lane, board, doorbell, pidfd = (os.dup(fd) for fd in self.runtime.fds_for(self.rank))
        self._mapped = [segment_of(lane, True), segment_of(board, False), segment_of(doorbell, True)]
        self._pidfd = pidfd
        self.port = Port(*self._mapped, pidfd)

    def prepare(self, plan: Plan) -> None:
        """Run the first phase of a plan."""
        self.generation = self.runtime.installer.prepare(plan)

    def hear(self) -> None:
        """Process the peer's messages on the shared-memory channel."""
        for link in self.runtime.talking_links():
            for message, fds in link.channel.recv_nowait():
                self.runtime.peer_message(link, message, fds, self.generation)

    def commit(self, order: list[int]) -> None:
        """Run the second phase of a plan."""
        assert self.generation is not None and not self.generation.awaited
        self.runtime.commit(self.generation, tuple(order))

    def allocate(self, nbytes: int) -> tuple[int, int, memoryview]:
        """Return (segment, offset, memory) of new input memory."""
        self.rank.allocate(Allocate(request=1, nbytes=nbytes),
                           lambda chunk: self.runtime.input_grew(self.rank.source, chunk))
        *others, (message, _) = self.rank_channel.recv_nowait()
        for _, fds in others:  # this rank reads through the node's own mapping
            for fd in fds:
                os.close(fd)
        self.other.hear()
        whole = memoryview(self.runtime.regions.chunk(message.segment).segment)
        memory = whole[message.offset : message.offset + nbytes]
        self._views += [memory, whole]
        return message.segment, message.offset, memory

    def result(self, part: int, round_: int) -> bytes:
        """Return the published bytes of *part*, as a rank of this node sees them."""
        extent = self.generation.extents[part]
        found = self.runtime.installer.result_segments(self.generation)
        segments = {(node, number): segment for node, number, segment in found}
        offset = extent.offset_odd if round_ & 1 else extent.offset_even
        return bytes(memoryview(segments[extent.node, extent.segment])[offset : offset + extent.nbytes])

    def close(self) -> None:
        """Close everything, like a node."""
        for view in self._views:
            view.release()
        if hasattr(self, "port"):
            self.port.close()
            for segment in self._mapped:
                segment.close()
            os.close(self._pidfd)
        self.reception.close()
        if hasattr(self, "peering"):
            self.peering.close()
        self.listener.close()
        if self.runtime.running:
            self.runtime.stop()
        self.rank.close()
        self.rank_channel.close()
        self.runtime.close()
        self.loop.close()


def segment_of(fd: int, writable: bool):
    """Map a descriptor as a rank does."""
    from bpsfast.pyx.pages import Segment

    return Segment.attach(fd, writable=writable)


def connect(ends: list[End]) -> None:
    """Connect both ends; returns when both are, or one has failed."""
    nodes = [end.info for end in ends]
    ends[0].other, ends[1].other = ends[1], ends[0]
    for end in ends:
        end.begin(nodes)

    def serve(end: End) -> None:
        while not end.peering.done and end.peering.error is None:
            end.loop.run_once(0.05)

    threads = [threading.Thread(target=serve, args=(end,)) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def declare(ends: list[End], sizes: list[int], owners: list[int], generation: int = 1, first: int = 0,
            n_streams: int = 0, codec: CodecSpec | None = None) -> Plan:
    """Prepare one unit of uint8 per size (of float32, if compressed) on both ends, with *owners*; return the plan."""
    dtype, width = ("uint8", 1) if codec is None else ("float32", 4)
    specs = [TensorSpec(name=f"t{first + i}", dtype=dtype, shape=(nbytes // width,), average=False, n_streams=n_streams,
                        codec=codec)
             for i, nbytes in enumerate(sizes)]
    units = plan_units(specs, first, first, 4_096_000, 0)
    units = [
        msgspec.structs.replace(unit, parts=tuple(msgspec.structs.replace(part, owner=owner) for part in unit.parts))
        for unit, owner in zip(units, owners)
    ]
    plan = Plan(generation=generation, units=tuple(units))
    for end in ends:
        end.prepare(plan)
    for end in ends:
        while end.generation.awaited:
            end.hear()
    return plan


def order_of(*plans: Plan) -> list[int]:
    """Return the integer ranks of all parts of *plans*."""
    return rank_parts(unit for plan in plans for unit in plan.units)
