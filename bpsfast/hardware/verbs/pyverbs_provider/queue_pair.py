"""RDMA queue pairs over pyverbs: one end of a reliable connection; methods are those of `bpsfast.pyx.verbs`."""
from __future__ import annotations

import contextlib
import errno
import os
from typing import Any

from . import verbs_object
from .completion_queue import RECV, CompletionQueue, PostedWork, Work, WorkQueue
from .device import ProtectionDomain
from .verbs_object import VerbsResource, errors_as, module, reason

_RC = 2
_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
_INIT, _RTR, _RTS, _ERR = 1, 2, 3, 6
_MTU_CODES = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}
# enum ibv_qp_attr_mask
_STATE, _ACCESS_FLAGS, _PKEY_INDEX, _PORT, _AV, _PATH_MTU, _TIMEOUT = (1 << n for n in (0, 3, 4, 5, 7, 8, 9))
_RETRY_CNT, _RNR_RETRY, _RQ_PSN, _MAX_RD_ATOMIC = (1 << n for n in (10, 11, 12, 13))
_MIN_RNR_TIMER, _SQ_PSN, _MAX_DEST_RD_ATOMIC, _DEST_QPN = (1 << n for n in (15, 16, 17, 20))
_LOCAL_WRITE, _REMOTE_WRITE, _REMOTE_READ = 1, 2, 4
# enum ibv_wr_opcode, ibv_send_flags
_WRITE, _WRITE_WITH_IMM, _SEND, _SEND_WITH_IMM, _READ = range(5)
_SIGNALED, _INLINE = 2, 8


class QueuePair(VerbsResource):
    """One end of a reliable connection: `to_init`, `to_rtr`, `to_rts`, then posts until `to_error` or `close`."""

    _verb = "ibv_destroy_qp"

    def __init__(self, domain: ProtectionDomain, send_cq: CompletionQueue, recv_cq: CompletionQueue, *, max_send: int,
                 max_recv: int, max_inline: int = 0, max_send_sge: int = 1) -> None:
        if max_send < 1 or max_recv < 1:
            raise ValueError(f"a queue pair needs max_send >= 1 and max_recv >= 1, got {max_send} and {max_recv}")
        device, qp = domain.device, module("qp")
        raw_domain = domain._open()
        cap = qp.QPCap(max_send_wr=max_send, max_recv_wr=max_recv, max_send_sge=max_send_sge, max_recv_sge=1,
                       max_inline_data=max_inline)
        init = qp.QPInitAttr(qp_type=_RC, scq=send_cq._open(), rcq=recv_cq._open(), cap=cap, sq_sig_all=0)
        with errors_as(lambda rc: f"ibv_create_qp({device.name}, max_send={max_send}, max_recv={max_recv}, "
                              f"max_inline={max_inline}, max_send_sge={max_send_sge}): {reason(rc)}; the device takes "
                              f"max_qp_wr={device.attributes['max_qp_wr']} posts in a queue and "
                              f"max_qp={device.attributes['max_qp']} queue pairs; the queues' memory counts as locked, "
                              "too"):
            raw = qp.QP(raw_domain, init)
        self.domain, self.send_cq, self.recv_cq = domain, send_cq, recv_cq
        self.number, self.psn = raw.qp_num, int.from_bytes(os.urandom(3), "little")
        self.max_send, self.max_recv, self.max_inline = init.max_send_wr, init.max_recv_wr, init.max_inline_data
        self.peer, self._port = "", 0
        self._local_gid = self._peer_gid = b""
        self._name = f"queue pair {self.number} of {device.name}"
        self.account = PostedWork(WorkQueue(self.max_send, send_cq._capacity),
                                  WorkQueue(self.max_recv, recv_cq._capacity))
        self._own(raw, domain, send_cq, recv_cq)
        send_cq._posted[self.number] = recv_cq._posted[self.number] = self.account

    @property
    def handle(self) -> int:
        return verbs_object.object_pointer(self._open(), self.domain.device.handle)

    @property
    def outstanding(self) -> tuple[int, int]:
        return len(self.account.send.items), len(self.account.recv.items)

    @property
    def failure(self) -> dict[str, Any] | None:
        if self.account.failed is None:
            return None
        status, vendor_error, work = self.account.failed
        return {"status": status, "vendor_error": vendor_error, **work._asdict(), "peer": self.peer,
                "device": self.domain.device.name}

    @property
    def state(self) -> str:
        raw = self._open()
        with errors_as(lambda rc: f"ibv_query_qp({self.domain.device.name}, queue pair {self.number}): {reason(rc)}"):
            state = raw.query(_STATE)[0].qp_state
        return _STATES[state] if state < len(_STATES) else str(state)

    @property
    def attributes(self) -> dict[str, int]:
        raw = self._open()
        with errors_as(lambda rc: f"ibv_query_qp({self.domain.device.name}, queue pair {self.number}): {reason(rc)}"):
            found = raw.query(_STATE | _TIMEOUT | _RETRY_CNT | _PKEY_INDEX | _AV | _PATH_MTU)[0]
        return {"timeout": found.timeout, "retry_count": found.retry_cnt, "pkey_index": found.pkey_index,
                "sl": found.ah_attr.sl, "traffic_class": found.ah_attr.traffic_class, "mtu": 128 << found.path_mtu}

    # -- transitions ----------------------------------------------------------------------------------------

    def _modify(self, attributes: dict[str, Any], mask: int, transition: str, shown: dict[str, Any]) -> None:
        raw = self._open()
        attr = module("qp").QPAttr()
        for name, value in attributes.items():
            setattr(attr, name, value)

        def text(rc: int) -> str:
            values = ", ".join(f"{name}={value}" for name, value in shown.items())
            return (f"ibv_modify_qp({self.domain.device.name} port {self._port}, queue pair {self.number}) refused "
                    f"{transition} with {values or 'no attributes'}: {reason(rc)}; local GID "
                    f"{_text(self._local_gid)}, remote GID {_text(self._peer_gid)}{self._why(rc, transition)}")

        with errors_as(text):
            raw.modify(attr, mask | _STATE)

    def _why(self, rc: int, transition: str) -> str:
        """Return the usual cause of a refused transition."""
        if self._local_gid and not any(self._local_gid):
            return "; that place of the port's GID table is empty: choose one that `bpsfast gids` lists"
        if rc == errno.EINVAL:
            return f"; is it in the state that {transition} starts from (it is in {self.state})?"
        if rc in (errno.ENETUNREACH, errno.EHOSTUNREACH, errno.ETIMEDOUT):
            return "; the address of the remote GID cannot be reached from this port's network interface"
        if rc == errno.ENODATA:
            return "; the GID table changed (an address or a link went): choose again"
        return ""

    def to_init(self, port: int = 1, *, remote_write: bool = True, remote_read: bool = False,
                pkey_index: int = 0) -> None:
        access = _LOCAL_WRITE | (_REMOTE_WRITE if remote_write else 0) | (_REMOTE_READ if remote_read else 0)
        self._port = port
        self._modify({"qp_state": _INIT, "port_num": port, "pkey_index": pkey_index, "qp_access_flags": access},
                     _PKEY_INDEX | _PORT | _ACCESS_FLAGS, "RESET -> INIT",
                     {"port": port, "remote_write": remote_write, "remote_read": remote_read, "pkey_index": pkey_index})

    def to_rtr(self, peer_number: int, peer_psn: int, *, gid: bytes | None = None, gid_index: int = 0, lid: int = 0,
               mtu: int = 1024, port: int | None = None, min_rnr_timer: int = 12, max_dest_rd_atomic: int = 1,
               traffic_class: int = 0, sl: int = 0, hop_limit: int = 64, flow_label: int = 0,
               static_rate: int = 0) -> None:
        self._open()
        port = self._port if port is None else port
        if mtu not in _MTU_CODES:
            raise ValueError(f"mtu={mtu}: a path MTU is one of {', '.join(map(str, _MTU_CODES))} bytes")
        if gid is not None and len(gid) != 16:
            raise ValueError(f"gid has {len(gid)} bytes, a GID has 16")
        addr, device = module("addr"), self.domain.device
        if port == 0:
            raise OSError(errno.EINVAL, f"{device.name} queue pair {self.number}: INIT -> RTR before to_init: it is in "
                                        f"state {self.state}, bound to no port")
        shown = {"peer": peer_number, "peer_psn": peer_psn, "mtu": mtu, "lid": lid, "port": port, "sl": sl,
                 "min_rnr_timer": min_rnr_timer, "max_dest_rd_atomic": max_dest_rd_atomic, "static_rate": static_rate}
        self._local_gid = self._peer_gid = b""
        route = None
        if gid is not None:
            self._local_gid, self._peer_gid = device.gid(port, gid_index), bytes(gid)
            route = addr.GlobalRoute(addr.GID(_text(self._peer_gid)), flow_label, gid_index, hop_limit, traffic_class)
            shown |= {"gid_index": gid_index, "traffic_class": traffic_class, "hop_limit": hop_limit,
                      "flow_label": flow_label}
        active_mtu = device.port(port)["active_mtu"]
        if mtu > active_mtu:
            raise OSError(errno.EINVAL, f"{device.name} port {port}: INIT -> RTR with mtu={mtu}, but its active_mtu is "
                                        f"{active_mtu}: use that on both sides, or raise the MTU of the network "
                                        "interface")
        address = addr.AHAttr(dlid=lid, sl=sl, static_rate=static_rate, port_num=port, is_global=int(gid is not None),
                              gr=route)
        self._modify({"qp_state": _RTR, "path_mtu": _MTU_CODES[mtu], "dest_qp_num": peer_number,
                      "rq_psn": peer_psn & 0xffffff, "ah_attr": address, "max_dest_rd_atomic": max_dest_rd_atomic,
                      "min_rnr_timer": min_rnr_timer},
                     _AV | _PATH_MTU | _DEST_QPN | _RQ_PSN | _MAX_DEST_RD_ATOMIC | _MIN_RNR_TIMER, "INIT -> RTR", shown)
        self.peer = f"queue pair {peer_number} at {_text(self._peer_gid) if gid is not None else f'LID {lid}'}"

    def to_rts(self, *, timeout: int = 14, retry_count: int = 7, rnr_retry: int = 7, max_rd_atomic: int = 1) -> None:
        self._modify({"qp_state": _RTS, "sq_psn": self.psn, "timeout": timeout, "retry_cnt": retry_count,
                      "rnr_retry": rnr_retry, "max_rd_atomic": max_rd_atomic},
                     _SQ_PSN | _TIMEOUT | _RETRY_CNT | _RNR_RETRY | _MAX_RD_ATOMIC, "RTR -> RTS",
                     {"psn": self.psn, "timeout": timeout, "retry_count": retry_count, "rnr_retry": rnr_retry,
                      "max_rd_atomic": max_rd_atomic})

    def to_error(self) -> None:
        self._modify({"qp_state": _ERR}, 0, "any -> ERR", {})

    # -- posting --------------------------------------------------------------------------------------------

    def _post(self, work: Work, immediate: int | None, signaled: bool, inline: bool) -> None:
        raw, wr = self._open(), module("wr")
        if inline and work.nbytes > self.max_inline:
            raise ValueError(f"inline post of {work.nbytes} bytes to a queue pair with max_inline={self.max_inline}")
        is_recv = work.opcode == RECV
        queue = self.account.recv if is_recv else self.account.send
        what = (f"post of {work.nbytes} bytes (wr_id {work.wr_id}) to {self.domain.device.name} queue pair "
                f"{self.number}")
        element = wr.SGE(work.address, work.nbytes, work.lkey)
        if is_recv:
            request = wr.RecvWR(work.wr_id, 1, [element])
        else:
            flags = (_SIGNALED if signaled else 0) | (_INLINE if inline else 0)
            network_order = int.from_bytes((immediate or 0).to_bytes(4, "big"), "little")
            request = wr.SendWR(work.wr_id, work.opcode, 1, network_order, [element], flags)
            request.set_wr_rdma(work.rkey, work.remote_address)
        request.num_sge = 1 if work.nbytes else 0
        try:
            with self.domain.device.lock:
                rc = queue.reserve(work)
                if rc == 0:
                    try:
                        with errors_as(lambda rc: f"{what}: {reason(rc)}; it is in state {self.state} (receives need "
                                              "INIT, sends RTS)"):
                            (raw.post_recv if is_recv else raw.post_send)(request)
                    except BaseException:
                        queue.cancel()
                        raise
        finally:
            element.close()
            request.close()
        if rc == errno.EXFULL:
            full = f"max_recv={self.max_recv}" if is_recv else f"max_send={self.max_send}"
            raise OSError(errno.ENOBUFS, f"{what}: {full} posts are outstanding already; poll their completions first "
                                         "(of sends, some have to be signaled)")
        if rc == errno.EOVERFLOW:
            raise OSError(rc, f"{what}: its completion could overrun the completion queue, whose {queue.places.depth} "
                              "places are all taken; poll first, or make it deeper")

    def post_write(self, wr_id: int, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int,
                   immediate: int | None = None, signaled: bool = True, inline: bool = False) -> None:
        self._post(Work(_WRITE if immediate is None else _WRITE_WITH_IMM, wr_id, address, nbytes, lkey, remote_address,
                        rkey), immediate, signaled, inline)

    def post_send(self, wr_id: int, address: int, nbytes: int, lkey: int, immediate: int | None = None,
                  signaled: bool = True, inline: bool = False) -> None:
        self._post(Work(_SEND if immediate is None else _SEND_WITH_IMM, wr_id, address, nbytes, lkey), immediate,
                   signaled, inline)

    def post_read(self, wr_id: int, address: int, nbytes: int, lkey: int, remote_address: int, rkey: int,
                  signaled: bool = True) -> None:
        self._post(Work(_READ, wr_id, address, nbytes, lkey, remote_address, rkey), None, signaled, False)

    def post_recv(self, wr_id: int, address: int, nbytes: int, lkey: int) -> None:
        self._post(Work(RECV, wr_id, address, nbytes, lkey), None, True, False)

    def _released(self) -> None:
        """Retire outstanding work and drop its completions, which some providers leave in the queue."""
        outstanding = self.account.forget()
        for queue in {self.send_cq, self.recv_cq}:
            queue._posted.pop(self.number, None)
            if outstanding and self._is_ours and not queue.closed:
                with contextlib.suppress(OSError):  # the queue is broken; its next poll raises
                    queue._forget(self.number)


def _text(gid: bytes) -> str:
    """Return 16 bytes in the form of an unshortened IPv6 address, "-" for none."""
    return ":".join(gid.hex()[i:i + 4] for i in range(0, 32, 4)) if gid else "-"
