# The class CompletionQueue of verbs.pyx.

cdef enum:
    _BATCH = 32  # completions taken at once without the GIL


@cython.final
@cython.no_gc_clear
cdef class CompletionQueue(_VerbsObject):
    """Create a completion queue of *device* with room for *depth* completions (``ibv_create_cq``; more may be given).

    *events*: with an event channel, so that `wait` can sleep; *vector*: the completion vector whose interrupt wakes
    who waits, below the device's `completion_vectors`. It cannot overrun: each post of a queue pair takes one of
    its places until its completion is polled, and a post that finds none is refused.

    Raises `OSError` with the errno of the verb and the device's limits.
    """

    cdef bps_ibv_comp_channel *channel
    cdef bps_cq work
    cdef object ready  # completions that `wait` and closing queue pairs had to take
    cdef int users  # threads inside a call without the GIL
    cdef readonly Device device
    cdef readonly int children

    def __cinit__(self):
        pthread_mutex_init(&self.work.lock, NULL)

    def __init__(self, Device device not None, int depth, *, bint events=False, int vector=0):
        cdef bps_ibv_context *context = <bps_ibv_context *>device._open()
        cdef bps_ibv_comp_channel *channel = NULL
        cdef bps_ibv_cq *cq = NULL
        cdef int rc = 0
        if self.raw != NULL:
            raise ValueError("a CompletionQueue is initialised once")
        if depth < 1:
            raise ValueError(f"a completion queue needs depth >= 1, got {depth}")
        device.children += 1
        with nogil:
            if events:
                channel = bps_verbs.create_comp_channel(context)
                rc = errno if channel == NULL else bps_unblock(channel.fd)
            if rc == 0:
                cq = bps_verbs.create_cq(context, depth, NULL, channel, vector)
                if cq == NULL:
                    rc = errno
            if rc and channel != NULL:
                bps_verbs.destroy_comp_channel(channel)
        if rc:
            device.children -= 1
            limits = device._attributes()
            raise OSError(rc, f"ibv_create_cq({device.name}, depth={depth}, events={events}, vector={vector}): "
                              f"{_words(rc)}; the device takes max_cqe={limits['max_cqe']} in a queue and "
                              f"max_cq={limits['max_cq']} queues, and has {context.num_comp_vectors} completion "
                              "vectors, numbered from 0")
        self.raw, self.channel, self.device, self.forks = cq, channel, device, bps_forks
        self.work.depth, self.ready = cq.cqe, collections.deque()

    cdef str _name(self):
        return f"completion queue of {self.device.name if self.device else 'no device'}"

    @property
    def depth(self):
        """How many completions there is room for."""
        return self.work.depth

    @property
    def pending(self):
        """How many of the places are taken, by posted work or by completions that were not polled."""
        return self.work.pending

    def resize(self, int depth):
        """Make room for *depth* completions (``ibv_resize_cq``; more may be given), also while others post and poll.

        Raises `OSError` with the errno of the verb, and the queue is as long as before: EINVAL if it holds more
        completions or the device takes less, ENOSYS or EOPNOTSUPP if the device cannot resize queues.
        """
        cdef bps_ibv_cq *cq = <bps_ibv_cq *>self._open()
        cdef int rc
        if depth < 1:
            raise ValueError(f"a completion queue needs depth >= 1, got {depth}")
        self.users += 1
        with nogil:
            rc = bps_verbs.resize_cq(cq, depth)
            if rc == 0:
                pthread_mutex_lock(&self.work.lock)
                self.work.depth = cq.cqe
                pthread_mutex_unlock(&self.work.lock)
        self.users -= 1
        if rc:
            rc = rc if rc > 0 else errno
            raise OSError(rc, f"ibv_resize_cq({self.device.name}, depth={depth}): {_words(rc)}; it has {self.depth}, "
                              f"the device takes max_cqe={self.device._attributes()['max_cqe']} in a queue")

    def poll(self, int n=32):
        """Return up to *n* completions as (wr_id, status, opcode, nbytes, immediate or None, queue pair's number).

        Never waits. *status* 0 is success, `bpsfast.hardware.verbs.completions` explains the others; *opcode* 0 send, 1
        write, 2 read, 128 receive, 129 receive of a write with immediate, valid for bad completions too.

        Raises `OSError` when the queue itself is broken.
        """
        self._open()
        if n < 1:
            raise ValueError(f"poll needs n >= 1, got {n}")
        found = []
        while self.ready and len(found) < n:
            found.append(self.ready.popleft())
        self._take(found, n)
        return found

    cdef int _take(self, list found, int n) except -1:
        """Append completions until *found* has *n* or the queue is empty."""
        cdef bps_ibv_wc batch[_BATCH]
        cdef int wanted, taken, i
        while len(found) < n:
            wanted = min(_BATCH, n - <int>len(found))
            self.users += 1
            with nogil:
                taken = bps_cq_poll(&self.work, <bps_ibv_cq *>self.raw, wanted, batch)
            self.users -= 1
            if taken < 0:
                raise OSError(errnos.EIO, f"ibv_poll_cq({self.device.name}): the queue is broken ({taken}): it "
                                          "overran, or the device is gone")
            for i in range(taken):
                found.append((
                    batch[i].wr_id, batch[i].status, batch[i].opcode, batch[i].byte_len,
                    bps_wc_immediate(&batch[i]) if batch[i].wc_flags & BPS_WC_WITH_IMM else None, batch[i].qp_num,
                ))
            if taken < wanted:
                break
        return 0

    def wait(self, timeout_s=None):
        """Sleep until `poll` may find something, at most *timeout_s* seconds (None: for ever); whether it may.

        True may be wrong (an event of a completion that was polled already); False is right. One thread at a time.

        Raises
        ------
        ValueError
            If the queue was made without events.
        OSError
            When the queue is broken.
        """
        cdef bps_ibv_cq *cq = <bps_ibv_cq *>self._open()
        cdef int rc
        if self.channel == NULL:
            raise ValueError("wait needs a CompletionQueue(..., events=True)")
        if self.ready:
            return True
        with nogil:
            rc = bps_req_notify_cq(cq, 0)
        if rc:
            raise OSError(rc, f"ibv_req_notify_cq({self.device.name}): {_words(rc)}")
        # what came before the queue was armed rings no more
        found = []
        self._take(found, _BATCH)
        self.ready.extend(found)
        if found:
            return True
        self.users += 1
        try:
            if not _await(self.channel.fd, timeout_s):
                return False
        finally:
            self.users -= 1
        with nogil:
            rc = bps_take_cq_event(self.channel)
        if rc < 0:
            raise OSError(-rc, f"ibv_get_cq_event({self.device.name}): {_words(-rc)}")
        return True

    cdef int _forget(self, uint32_t number) except -1:
        """Take all there is and drop what is of a queue pair that is gone, so that its places are free again."""
        found = list(self.ready)
        self._take(found, <int>(len(found) + self.work.depth))
        self.ready = collections.deque(c for c in found if c[5] != number)
        return 0

    def close(self):
        """Destroy the queue. Idempotent.

        Raises `BufferError` while queue pairs complete into it, or a thread is in `wait` or `poll`.
        """
        if self._is_ours():
            if self.children:
                raise BufferError(f"completion queue of {self.device.name} has {self.children} open queue pairs")
            if self.users:
                raise BufferError(f"completion queue of {self.device.name}: another thread is in wait or poll")
        cdef int rc = self._release()
        if rc:
            raise OSError(rc, f"ibv_destroy_cq({self.device.name}): {_words(rc)}")

    cdef int _release(self) noexcept:
        cdef bps_ibv_cq *cq = <bps_ibv_cq *>self.raw
        cdef int rc = 0
        if cq == NULL:
            return 0
        if self.forks == bps_forks:
            self.raw = NULL
            with nogil:
                rc = bps_verbs.destroy_cq(cq)
                if rc == 0 and self.channel != NULL:
                    bps_verbs.destroy_comp_channel(self.channel)
                elif bps_device_is_gone(rc) and self.channel != NULL:
                    close_fd(self.channel.fd)  # the library still counts the queue as the channel's, and would refuse
            if rc and not bps_device_is_gone(rc):
                self.raw = cq
                return rc
        self.raw, self.channel = NULL, NULL
        self.device.children -= 1
        return 0

    def __dealloc__(self):
        self._release()
        free(self.work.pairs)
        pthread_mutex_destroy(&self.work.lock)
