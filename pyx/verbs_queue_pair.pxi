# The class QueuePair of verbs.pyx.

_STATES = ("RESET", "INIT", "RTR", "RTS", "SQD", "SQE", "ERR")
_MTU_CODES = {256: 1, 512: 2, 1024: 3, 2048: 4, 4096: 5}


def _gid_text(gid):
    """Return 16 bytes as an IPv6 address writes them, without shortening."""
    return ":".join(gid.hex()[i:i + 4] for i in range(0, 32, 4))


@cython.final
@cython.no_gc_clear
cdef class QueuePair(_VerbsObject):
    """Create one end of a reliable connection (``ibv_create_qp``, RC), in state RESET.

    *max_send*, *max_recv*: posts that may be outstanding in each direction; *max_inline*: bytes that an inline post may
    carry. The device may give more; the properties tell. *max_send_sge*: pieces of memory that native code may gather
    in one send. Bring it up with `to_init`, `to_rtr`, `to_rts`: the peer needs
    `number`, `psn`, and the port's GID or LID. A receive may be posted from INIT on, a send from RTS on.

    Memory that was posted belongs to the device until its completion was polled; this object does not hold it.

    Raises `OSError` with the errno of the verb and the device's limits.
    """

    cdef bps_pair pair  # its `qp` is `raw`
    cdef uint8_t port_number
    cdef int users
    cdef bytes local_gid, peer_gid
    cdef readonly ProtectionDomain domain
    cdef readonly CompletionQueue send_cq, recv_cq
    cdef readonly uint32_t number, psn, max_send, max_recv, max_inline
    cdef readonly str peer

    def __cinit__(self):
        pthread_mutex_init(&self.pair.lock, NULL)

    def __init__(self, ProtectionDomain domain not None, CompletionQueue send_cq not None,
                 CompletionQueue recv_cq not None, *, uint32_t max_send, uint32_t max_recv, uint32_t max_inline=0,
                 uint32_t max_send_sge=1):
        cdef bps_ibv_pd *pd = <bps_ibv_pd *>domain._open()
        cdef bps_ibv_qp_init_attr init
        cdef bps_ibv_qp *qp
        if self.raw != NULL:
            raise ValueError("a QueuePair is initialised once")
        if max_send < 1 or max_recv < 1:
            raise ValueError(f"a queue pair needs max_send >= 1 and max_recv >= 1, got {max_send} and {max_recv}")
        memset(&init, 0, sizeof(init))
        init.send_cq, init.recv_cq = <bps_ibv_cq *>send_cq._open(), <bps_ibv_cq *>recv_cq._open()
        init.qp_type = BPS_QPT_RC
        init.cap.max_send_wr, init.cap.max_recv_wr, init.cap.max_inline_data = max_send, max_recv, max_inline
        init.cap.max_send_sge, init.cap.max_recv_sge = max_send_sge, 1
        domain.children += 1
        send_cq.children += 1
        recv_cq.children += 1
        with nogil:
            qp = bps_verbs.create_qp(pd, &init)
        if qp == NULL:
            rc = errno
            self._abandon(domain, send_cq, recv_cq)
            limits = domain.device._attributes()
            raise OSError(rc, f"ibv_create_qp({domain.device.name}, max_send={max_send}, max_recv={max_recv}, "
                              f"max_inline={max_inline}, max_send_sge={max_send_sge}): {_words(rc)}; the device takes "
                              f"max_qp_wr={limits['max_qp_wr']} posts in a queue and max_qp={limits['max_qp']} queue "
                              "pairs; the queues' memory counts as locked, too")
        self.raw = self.pair.qp = qp
        self.forks = bps_forks
        self.domain, self.send_cq, self.recv_cq = domain, send_cq, recv_cq
        self.number = self.pair.number = qp.qp_num
        self.psn = int.from_bytes(os.urandom(3), "little")
        self.max_send, self.max_recv = init.cap.max_send_wr, init.cap.max_recv_wr
        self.max_inline, self.peer = init.cap.max_inline_data, ""
        self.pair.send_cq, self.pair.recv_cq = &send_cq.work, &recv_cq.work
        self.pair.send.capacity, self.pair.recv.capacity = self.max_send, self.max_recv
        self.pair.send.items = <bps_work *>calloc(self.max_send, sizeof(bps_work))
        self.pair.recv.items = <bps_work *>calloc(self.max_recv, sizeof(bps_work))
        if self.pair.send.items == NULL or self.pair.recv.items == NULL or self._enlist():
            self._release()
            raise MemoryError(f"queue pair of {self.max_send} and {self.max_recv} posts")

    cdef int _enlist(self) noexcept:
        """Let the completion queues account for the pair: 0, or ENOMEM."""
        cdef bps_pair *pair = &self.pair
        cdef int rc
        with nogil:
            rc = bps_cq_add_pair(pair.send_cq, pair)
            if rc == 0 and pair.recv_cq != pair.send_cq:
                rc = bps_cq_add_pair(pair.recv_cq, pair)
        return rc

    cdef void _abandon(self, ProtectionDomain domain, CompletionQueue send_cq, CompletionQueue recv_cq) noexcept:
        domain.children -= 1
        send_cq.children -= 1
        recv_cq.children -= 1

    cdef str _name(self):
        return f"queue pair {self.number} of {self.domain.device.name if self.domain else 'no device'}"

    @property
    def outstanding(self):
        """Posted and not yet completed: (sends, receives)."""
        return self.pair.send.posted - self.pair.send.retired, self.pair.recv.posted - self.pair.recv.retired

    @property
    def failure(self):
        """The first bad completion that was polled, as a dictionary with the operation as it was posted, or None.

        A flush (status 5) is no cause: it gives way to the bad completion that is, if that is polled later.
        """
        cdef bps_pair *pair = &self.pair
        cdef bps_work work
        cdef int status
        cdef uint32_t vendor_error
        with nogil:
            pthread_mutex_lock(&pair.lock)
            status, vendor_error, work = pair.failed, pair.vendor_error, pair.failed_work
            pthread_mutex_unlock(&pair.lock)
        if status == 0:
            return None
        return {
            "status": status, "vendor_error": vendor_error, "opcode": work.opcode, "wr_id": work.wr_id,
            "address": work.address, "nbytes": work.nbytes, "lkey": work.lkey, "remote_address": work.remote_address,
            "rkey": work.rkey, "peer": self.peer, "device": self.domain.device.name,
        }

    @property
    def state(self):
        """The device's own word for it (``ibv_query_qp``): RESET, INIT, RTR, RTS, SQD, SQE or ERR."""
        cdef bps_ibv_qp *qp = <bps_ibv_qp *>self._open()
        cdef bps_ibv_qp_attr attr
        cdef bps_ibv_qp_init_attr init
        cdef int rc
        self.users += 1
        with nogil:
            rc = bps_verbs.query_qp(qp, &attr, BPS_QP_STATE, &init)
        self.users -= 1
        if rc:
            raise OSError(rc, f"ibv_query_qp({self.domain.device.name}, queue pair {self.number}): {_words(rc)}")
        return _STATES[attr.qp_state] if 0 <= attr.qp_state < 7 else str(attr.qp_state)

    @property
    def attributes(self):
        """What the device has of it, by ``ibv_query_qp``: timeout, retry_count, pkey_index, sl, traffic_class, mtu."""
        cdef bps_ibv_qp *qp = <bps_ibv_qp *>self._open()
        cdef bps_ibv_qp_attr attr
        cdef bps_ibv_qp_init_attr init
        cdef int rc
        self.users += 1
        with nogil:
            rc = bps_verbs.query_qp(qp, &attr, BPS_QP_STATE | BPS_QP_TIMEOUT | BPS_QP_RETRY_CNT | BPS_QP_PKEY_INDEX
                                    | BPS_QP_AV | BPS_QP_PATH_MTU, &init)
        self.users -= 1
        if rc:
            raise OSError(rc, f"ibv_query_qp({self.domain.device.name}, queue pair {self.number}): {_words(rc)}")
        return {"timeout": attr.timeout, "retry_count": attr.retry_cnt, "pkey_index": attr.pkey_index,
                "sl": attr.ah_attr.sl, "traffic_class": attr.ah_attr.grh.traffic_class,
                "mtu": 128 << attr.path_mtu}

    cdef int _modify(self, bps_ibv_qp_attr *attr, int mask, str transition, dict shown) except -1:
        """Ask for a transition; *shown* goes into the error."""
        cdef bps_ibv_qp *qp = <bps_ibv_qp *>self._open()
        cdef int rc
        self.users += 1
        with nogil:
            rc = bps_verbs.modify_qp(qp, attr, mask)
        self.users -= 1
        if rc == 0:
            return 0
        rc = rc if rc > 0 else errno
        values = ", ".join(f"{name}={value}" for name, value in shown.items())
        raise OSError(rc, f"ibv_modify_qp({self.domain.device.name} port {self.port_number}, queue pair {self.number}) "
                          f"refused {transition} with {values or 'no attributes'}: {_words(rc)}; local GID "
                          f"{_gid_text(self.local_gid) if self.local_gid else '-'}, remote GID "
                          f"{_gid_text(self.peer_gid) if self.peer_gid else '-'}{self._why_refused(rc, transition)}")

    cdef str _why_refused(self, int rc, str transition):
        """Say what a refused transition usually means."""
        if self.local_gid is not None and not any(self.local_gid):
            return "; that place of the port's GID table is empty: choose one that `bpsfast gids` lists"
        if rc == EINVAL:
            return f"; is it in the state that {transition} starts from (it is in {self.state})?"
        if rc in (errnos.ENETUNREACH, errnos.EHOSTUNREACH, errnos.ETIMEDOUT):
            return "; the address of the remote GID cannot be reached from this port's network interface"
        if rc == errnos.ENODATA:
            return "; the GID table changed (an address or a link went): choose again"
        return ""

    def to_init(self, uint8_t port=1, *, bint remote_write=True, bint remote_read=False, uint16_t pkey_index=0):
        """RESET -> INIT: bind to *port*; what the peer may do to our memory at most (regions may allow less)."""
        cdef bps_ibv_qp_attr attr
        memset(&attr, 0, sizeof(attr))
        attr.qp_state, attr.port_num, attr.pkey_index = BPS_QPS_INIT, port, pkey_index
        attr.qp_access_flags = BPS_ACCESS_LOCAL_WRITE
        if remote_write:
            attr.qp_access_flags |= BPS_ACCESS_REMOTE_WRITE
        if remote_read:
            attr.qp_access_flags |= BPS_ACCESS_REMOTE_READ
        self.port_number = port
        self._modify(&attr, BPS_QP_STATE | BPS_QP_PKEY_INDEX | BPS_QP_PORT | BPS_QP_ACCESS_FLAGS, "RESET -> INIT",
                     {"port": port, "remote_write": remote_write, "remote_read": remote_read,
                      "pkey_index": pkey_index})

    def to_rtr(self, uint32_t peer_number, uint32_t peer_psn, *, gid=None, uint8_t gid_index=0, uint16_t lid=0,
               int mtu=1024, port=None, uint8_t min_rnr_timer=12, uint8_t max_dest_rd_atomic=1,
               uint8_t traffic_class=0, uint8_t sl=0, uint8_t hop_limit=64, uint32_t flow_label=0,
               uint8_t static_rate=0):
        """INIT -> RTR: name the peer; receives and the peer's writes work from here on.

        *gid*: the peer's 16 bytes, *gid_index*: our own place in the port's table, of the same kind (RoCE; on
        InfiniBand only across subnets); *lid*: the peer's, on InfiniBand. *mtu*: bytes of payload in a packet, the same
        on both sides. *min_rnr_timer*: code of the pause that a peer makes when no receive is posted (12: 0.64 ms).
        *max_dest_rd_atomic*: reads of the peer that we answer at a time. *traffic_class*: DSCP and ECN of RoCEv2;
        *sl*: service level (on RoCEv1 and VLANs the priority).
        """
        cdef bps_ibv_qp_attr attr
        self._open()
        port = self.port_number if port is None else port
        if mtu not in _MTU_CODES:
            raise ValueError(f"mtu={mtu}: a path MTU is one of {', '.join(map(str, _MTU_CODES))} bytes")
        if gid is not None and len(gid) != 16:
            raise ValueError(f"gid has {len(gid)} bytes, a GID has 16")
        if port == 0:
            raise OSError(EINVAL, f"{self.domain.device.name} queue pair {self.number}: INIT -> RTR before to_init: it "
                                  f"is in state {self.state}, bound to no port")
        memset(&attr, 0, sizeof(attr))
        attr.qp_state, attr.path_mtu = BPS_QPS_RTR, _MTU_CODES[mtu]
        attr.dest_qp_num, attr.rq_psn = peer_number, peer_psn & 0xffffff
        attr.min_rnr_timer, attr.max_dest_rd_atomic = min_rnr_timer, max_dest_rd_atomic
        attr.ah_attr.dlid, attr.ah_attr.sl, attr.ah_attr.port_num = lid, sl, port
        attr.ah_attr.static_rate = static_rate
        shown = {"peer": peer_number, "peer_psn": peer_psn, "mtu": mtu, "lid": lid, "port": port, "sl": sl,
                 "min_rnr_timer": min_rnr_timer, "max_dest_rd_atomic": max_dest_rd_atomic, "static_rate": static_rate}
        if gid is not None:
            gid = bytes(gid)
            attr.ah_attr.is_global = 1
            memcpy(attr.ah_attr.grh.dgid.raw, <const char *>gid, 16)
            attr.ah_attr.grh.sgid_index, attr.ah_attr.grh.hop_limit = gid_index, hop_limit
            attr.ah_attr.grh.traffic_class, attr.ah_attr.grh.flow_label = traffic_class, flow_label
            shown.update(gid_index=gid_index, traffic_class=traffic_class, hop_limit=hop_limit, flow_label=flow_label)
        active_mtu = self._look(port, gid, gid_index)
        if mtu > active_mtu:
            raise OSError(EINVAL, f"{self.domain.device.name} port {port}: INIT -> RTR with mtu={mtu}, but its "
                                  f"active_mtu is {active_mtu}: use that on both sides, or raise the MTU of the "
                                  "network interface")
        self._modify(&attr, BPS_QP_STATE | BPS_QP_AV | BPS_QP_PATH_MTU | BPS_QP_DEST_QPN | BPS_QP_RQ_PSN
                     | BPS_QP_MAX_DEST_RD_ATOMIC | BPS_QP_MIN_RNR_TIMER, "INIT -> RTR", shown)
        self.peer = f"queue pair {peer_number} at {_gid_text(gid) if gid is not None else f'LID {lid}'}"

    cdef int _look(self, port, gid, index) except -1:
        """Remember both GIDs for what an error may have to say; return the port's active MTU."""
        self.local_gid = self.peer_gid = None
        if gid is not None:
            self.local_gid, self.peer_gid = self.domain.device.gid(port, index), gid
        return self.domain.device.port(port)["active_mtu"]

    def to_rts(self, *, uint8_t timeout=14, uint8_t retry_count=7, uint8_t rnr_retry=7, uint8_t max_rd_atomic=1):
        """RTR -> RTS: sends work from here on.

        *timeout*: 4.096 us * 2**timeout until an unanswered packet is sent again (14: 67 ms; 0: never), *retry_count*
        times (at most 7) before the peer is given up; *rnr_retry*: how often a peer without a posted receive is tried
        again (7: for ever); *max_rd_atomic*: reads of ours in flight, at most the peer's max_dest_rd_atomic.
        """
        cdef bps_ibv_qp_attr attr
        memset(&attr, 0, sizeof(attr))
        attr.qp_state, attr.sq_psn, attr.timeout, attr.retry_cnt = BPS_QPS_RTS, self.psn, timeout, retry_count
        attr.rnr_retry, attr.max_rd_atomic = rnr_retry, max_rd_atomic
        self._modify(&attr, BPS_QP_STATE | BPS_QP_SQ_PSN | BPS_QP_TIMEOUT | BPS_QP_RETRY_CNT | BPS_QP_RNR_RETRY
                     | BPS_QP_MAX_QP_RD_ATOMIC, "RTR -> RTS",
                     {"psn": self.psn, "timeout": timeout, "retry_count": retry_count, "rnr_retry": rnr_retry,
                      "max_rd_atomic": max_rd_atomic})

    def to_error(self):
        """Any state -> ERR: everything outstanding completes as flushed; nothing the peer sends is taken any more."""
        cdef bps_ibv_qp_attr attr
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = BPS_QPS_ERR
        self._modify(&attr, BPS_QP_STATE, "any -> ERR", {})

    cdef int _post(self, int opcode, uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey,
                   uint64_t remote_address, uint32_t rkey, immediate, bint signaled, bint inline) except -1:
        cdef bps_work work
        cdef uint32_t number = 0 if immediate is None else immediate
        cdef int rc
        self._open()
        if inline and nbytes > self.max_inline:
            raise ValueError(f"inline post of {nbytes} bytes to a queue pair with max_inline={self.max_inline}")
        work.opcode, work.wr_id, work.address, work.nbytes, work.lkey = opcode, wr_id, address, nbytes, lkey
        work.remote_address, work.rkey = remote_address, rkey
        work.flags = (BPS_SEND_SIGNALED if signaled else 0) | (BPS_SEND_INLINE if inline else 0)
        self.users += 1
        with nogil:
            rc = bps_pair_post(&self.pair, &work, number)
        self.users -= 1
        if rc == 0:
            return 0
        what = f"post of {nbytes} bytes (wr_id {wr_id}) to {self.domain.device.name} queue pair {self.number}"
        if rc == EXFULL:
            full = f"max_recv={self.max_recv}" if opcode == BPS_WORK_RECV else f"max_send={self.max_send}"
            raise OSError(errnos.ENOBUFS, f"{what}: {full} posts are outstanding already; poll their completions first "
                                          "(of sends, some have to be signaled)")
        if rc == EOVERFLOW:
            depth = (self.recv_cq if opcode == BPS_WORK_RECV else self.send_cq).depth
            raise OSError(EOVERFLOW, f"{what}: its completion could overrun the completion queue, whose {depth} places "
                                     "are all taken; poll first, or make it deeper")
        raise OSError(rc, f"{what}: {_words(rc)}; it is in state {self.state} (receives need INIT, sends RTS)")

    def post_write(self, uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey, uint64_t remote_address,
                   uint32_t rkey, immediate=None, bint signaled=True, bint inline=False):
        """Write *nbytes* at *address* into the peer's memory; with *immediate*, 32 bits that take one of its receives.

        nbytes 0 writes nothing (the immediate arrives). The source stays untouched until the completion; *inline*
        copies it now and needs no lkey. Not *signaled*: no completion of its own, retired by the next one that is.

        Raises `OSError`: ENOBUFS when max_send posts are outstanding, EOVERFLOW when the completion queue could
        overrun.
        """
        self._post(BPS_WR_RDMA_WRITE if immediate is None else BPS_WR_RDMA_WRITE_WITH_IMM, wr_id, address, nbytes, lkey,
                   remote_address, rkey, immediate, signaled, inline)

    def post_send(self, uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey, immediate=None,
                  bint signaled=True, bint inline=False):
        """Send *nbytes* at *address* into the memory of the peer's next receive; else as `post_write`."""
        self._post(BPS_WR_SEND if immediate is None else BPS_WR_SEND_WITH_IMM, wr_id, address, nbytes, lkey, 0, 0,
                   immediate, signaled, inline)

    def post_read(self, uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey, uint64_t remote_address,
                  uint32_t rkey, bint signaled=True):
        """Read *nbytes* of the peer's memory into *address*; else as `post_write`."""
        self._post(BPS_WR_RDMA_READ, wr_id, address, nbytes, lkey, remote_address, rkey, None, signaled, False)

    def post_recv(self, uint64_t wr_id, uint64_t address, uint32_t nbytes, uint32_t lkey):
        """Offer *nbytes* at *address* to the peer's next send, or nothing (nbytes 0) to its next write with immediate.

        Raises `OSError`: ENOBUFS when max_recv posts are outstanding, EOVERFLOW when the completion queue could
        overrun.
        """
        self._post(BPS_WORK_RECV, wr_id, address, nbytes, lkey, 0, 0, None, True, False)

    def close(self):
        """Destroy the queue pair. Idempotent. What was outstanding is forgotten, its completions are dropped.

        Raises `BufferError` while another thread is in a call of it.
        """
        if self._is_ours() and self.users:
            raise BufferError(f"queue pair {self.number}: another thread is in a call of it")
        cdef int rc = self._release()
        if rc:
            self._enlist()  # it lives on, and so do its posts
            raise OSError(rc, f"ibv_destroy_qp({self.domain.device.name}, queue pair {self.number}): {_words(rc)}")

    cdef int _release(self) noexcept:
        cdef bps_pair *pair = &self.pair
        cdef bps_ibv_qp *qp = pair.qp
        cdef bint outstanding
        cdef int rc = 0
        if qp == NULL:
            return 0
        self.raw = pair.qp = NULL
        if self.forks == bps_forks:
            with nogil:  # out of the lists first: its number may be another's at once, and this object may go anyway
                bps_cq_remove_pair(pair.send_cq, pair)
                bps_cq_remove_pair(pair.recv_cq, pair)
                rc = bps_verbs.destroy_qp(qp)
            if rc and not bps_device_is_gone(rc):
                self.raw = pair.qp = qp
                return rc
            outstanding = pair.send.posted != pair.send.retired or pair.recv.posted != pair.recv.retired
            bps_retire(pair.send_cq, &pair.send, pair.send.posted)
            bps_retire(pair.recv_cq, &pair.recv, pair.recv.posted)
            if outstanding:  # some providers leave its completions in the queue
                try:
                    self.send_cq._forget(self.number)
                    self.recv_cq._forget(self.number)
                except OSError:
                    pass  # the completion queue is broken, as its own next poll will say
        self._abandon(self.domain, self.send_cq, self.recv_cq)
        return 0

    def __dealloc__(self):
        self._release()
        free(self.pair.send.items)
        free(self.pair.recv.items)
        pthread_mutex_destroy(&self.pair.lock)
