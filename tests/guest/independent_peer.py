"""A peer that shares no code with bpsfast: Debian's pyverbs in the system's Python, told what to do by JSON lines.

    /usr/bin/python3 -I tests/guest/independent_peer.py rxe1 1 65536

It opens device and GID index, registers so many bytes and prints {"number", "psn", "gid", "address", "rkey"}. Then, for
each line read, one verb and its arguments, it prints one line with the answer: see `Peer`. It ends with its input.
"""
import json
import os
import socket
import sys
import time

from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.enums import (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_MTU_1024,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_WITH_IMM,
    IBV_WR_RDMA_WRITE_WITH_IMM,
)
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

TIMEOUT_S = 60


class Peer:
    """The verbs; each returns what is printed."""

    def __init__(self, device, gid_index, nbytes):
        self.gid_index, self.nbytes, self.psn = gid_index, nbytes, int.from_bytes(os.urandom(3), "little")
        self.context = Context(name=device)
        self.domain = PD(self.context)
        self.queue = CQ(self.context, 64, None, None, 0)
        self.memory = MR(self.domain, nbytes, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE)
        self.pair = QP(self.domain, QPInitAttr(qp_type=IBV_QPT_RC, scq=self.queue, rcq=self.queue,
                                               cap=QPCap(max_send_wr=16, max_recv_wr=32)))

    def tell(self):
        return {"number": self.pair.qp_num, "psn": self.psn, "address": self.memory.buf, "rkey": self.memory.rkey,
                "gid": self.context.query_gid(1, self.gid_index).gid}

    def connect(self, number, psn, gid):
        attr = QPAttr(port_num=1)
        attr.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE
        attr.dest_qp_num, attr.rq_psn, attr.sq_psn, attr.path_mtu = number, psn, self.psn, IBV_MTU_1024
        attr.max_dest_rd_atomic = attr.max_rd_atomic = 1
        attr.min_rnr_timer, attr.timeout, attr.retry_cnt, attr.rnr_retry = 12, 10, 3, 0
        attr.ah_attr = AHAttr(port_num=1, is_global=1,
                              gr=GlobalRoute(dgid=GID(gid), sgid_index=self.gid_index, hop_limit=64))
        self.pair.to_rts(attr)
        return "connected"

    def receive(self, n):
        """Post receive requests 1 to n, of no bytes."""
        for i in range(n):
            request = RecvWR(i + 1, 1, [SGE(self.memory.buf, 0, self.memory.lkey)])
            self.pair.post_recv(request)
        return n

    def fill(self, offset, nbytes, value):
        self.memory.write(bytes([value]) * nbytes, nbytes, offset)
        return nbytes

    def content(self, offset, nbytes):
        return self.memory.read(nbytes, offset).hex()

    def write(self, offset, nbytes, address, rkey, immediate):
        """One WRITE_WITH_IMM; returns the status of its completion."""
        request = SendWR(7, IBV_WR_RDMA_WRITE_WITH_IMM, 1, socket.htonl(immediate),
                         [SGE(self.memory.buf + offset, nbytes, self.memory.lkey)], IBV_SEND_SIGNALED)
        request.set_wr_rdma(rkey, address)
        self.pair.post_send(request)
        return self.completions(1)[0][1]

    def completions(self, n):
        """Poll for n; each as [wr_id, status, opcode, nbytes, immediate or null]."""
        found, deadline = [], time.monotonic() + TIMEOUT_S
        while len(found) < n and time.monotonic() < deadline:
            for wc in self.queue.poll(n - len(found))[1]:
                immediate = socket.ntohl(wc.imm_data) if wc.wc_flags & IBV_WC_WITH_IMM else None
                found.append([wc.wr_id, wc.status, wc.opcode, wc.byte_len, immediate])
        return found


if __name__ == "__main__":
    peer = Peer(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
    print(json.dumps(peer.tell()), flush=True)
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        print(json.dumps(getattr(peer, verb)(*arguments)), flush=True)
