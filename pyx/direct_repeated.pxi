# Repeated pushes of one tensor of direct.pyx, whose arguments are compared in C with those of the first call.

@cython.final
cdef class Rounds:
    """The rounds of one tensor or unit, as this rank counts them. Any thread; each call is one step under the GIL.

    Parameters
    ----------
    port
        The rank's port, or None: no steps are counted. A step of the rank begins when a unit is pushed again that was
        pushed in the present one.
    last
        The round before the first; rounds count modulo 2^32.
    sample
        Called with the time when a sample of the speed is due (`Port.sample_from`); None: never.
    """

    cdef object port, sample
    cdef bps_port *native
    cdef uint64_t step
    #: How many were begun, modulo 2^32.
    cdef readonly uint32_t n_begun
    #: The last round that was begun, and whether it is not finished. Nodes count rounds, too, so those that are summed
    #: directly do not count.
    cdef readonly uint32_t round
    cdef readonly bint in_flight
    #: Whether a round was ever begun.
    cdef readonly bint has_begun
    #: No round begins any more.
    cdef public bint is_retired
    #: Bytes of input in all rounds.
    cdef readonly uint64_t pushed_nbytes

    def __cinit__(self, port, uint32_t last, sample=None):
        if port is not None:
            self.native = <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.port, self.sample, self.round = port, sample, last

    cdef int _begin(self, uint64_t nbytes, uint64_t now_ns) except -1:
        """Begin the next round; return whether it could begin."""
        if self.in_flight or self.is_retired:
            return 0
        if self.native != NULL and self.native.lane != NULL:
            if self.step == self.native.steps.n_begun:
                bps_steps_next(&self.native.steps, &self.native.lane.tally, now_ns)
            self.step = self.native.steps.n_begun
        self.in_flight = self.has_begun = True
        self.round += 1
        self.n_begun += 1
        self.pushed_nbytes += nbytes
        return 1

    cdef int _sample(self, uint64_t now_ns) except -1:
        """Take a sample of the speed, if one is due. Other threads run meanwhile, so no round is to be under way."""
        if self.native != NULL and now_ns >= self.native.steps.sample_ns and self.sample is not None:
            self.sample(now_ns)
        return 0

    cdef int _summed_directly(self, uint64_t now_ns) except -1:
        """Finish the round, of which no node knows."""
        self.round -= 1
        self.in_flight = False
        self._sample(now_ns)
        return 0

    def begin(self, uint64_t nbytes):
        """Begin the next round, with *nbytes* of input, and return it; None if the last one is not finished, or after
        the end.
        """
        return self.round if self._begin(nbytes, bps_now_ns()) else None

    def finish(self, uint32_t round):
        """Note that *round* was waited for: the next one may begin. Nothing if it is not the last one."""
        if round == self.round:
            self.in_flight = False
            self._sample(bps_now_ns())

    def follow(self, Rounds other not None):
        """Count as begun in the step in which *other* was: this unit takes its place."""
        self.step = other.step


cdef inline uint64_t _note(bps_port *port, uint32_t part, uint32_t round, uint64_t nbytes, uint64_t began_ns,
                           bint is_direct):
    """Note a call that is over: as blocking the trainer, and for node and trace if it *is_direct*; return the time."""
    cdef uint64_t end_ns = bps_now_ns()
    if port.lane != NULL:
        bps_count(&port.lane.tally.exposed_ns, end_ns - began_ns)
        if is_direct:
            if part != NO_PART:
                bps_record_add(&port.records, BPS_DIRECT, 0, part, round, nbytes, began_ns, end_ns)
            bps_steps_result(&port.steps, end_ns)
            bps_count_alone(&port.lane.direct_calls, 1)
            bps_count_alone(&port.lane.direct_nbytes, nbytes)
    return end_ns


@cython.final
cdef class DirectTensor:
    """One tensor that the ranks of a machine sum directly, with all that a repeated call checks and counts, in C.

    A round is summed directly if all ranks do that; a rank that pushes its input to the node instead declines, and the
    others then do the same. So ranks may use any form of push_pull in any round.

    Parameters
    ----------
    channel, rounds
        The tensor's own, which nothing else uses; see there.
    port
        The rank's port.
    waits
        What looks at other things while a call waits, and raises the error of one that fails: `look(began_ns)`,
        `end(outcome, began_ns)`, `failed(exception)`, `refusal()`, `start_deferred()`, `sum_by_node(round, source,
        destination, timeout_s)`; `timeout_s()`: that of the present call, of which few need to know it.
    deferred
        The rank's deferred pushes: not empty means that others may wait for one.
    part
        The tensor's first partition, in traces.
    dtype, nbytes, divisor
        What is summed, and by what the sum is divided.

    Raises
    ------
    ValueError
        If tensors of *dtype* cannot be summed.
    """

    cdef Channel channel
    cdef Rounds rounds
    cdef bps_port *native
    cdef object port, waits, deferred, look
    cdef bps_direct_sum sum
    cdef bps_direct_call *call
    cdef uint64_t nbytes, began_ns
    cdef uint32_t part
    cdef bint has_looked
    #: Calls that were summed directly, and those in which a rank declined.
    cdef readonly uint64_t n_sums, n_declined

    def __cinit__(self, Channel channel not None, Rounds rounds not None, port, waits, dict deferred not None,
                  uint32_t part, str dtype, uint64_t nbytes, int64_t divisor):
        self.channel, self.rounds, self.port, self.waits, self.deferred = channel, rounds, port, waits, deferred
        self.native = <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.part, self.nbytes = part, nbytes
        self.sum.kernel = bps_sum_kernel_of(DTYPES.index(dtype), 0, bps_sum_level())
        self.sum.divisor, self.sum.call = divisor, 1
        channel._require(nbytes)
        self.look = self._looks

    def _looks(self):
        if self.channel.refuses:
            raise self.waits.refusal()
        if self.call.deadline_ns == UINT64_MAX:
            self.call.deadline_ns = _after(self.began_ns, self.waits.timeout_s())
            self.call.slice_ns = DEFERRED_SLICE_NS if self.deferred else 0
            return
        self.has_looked = True
        self.waits.look(self.began_ns)

    def begin(self, uint64_t nbytes):
        """As `Rounds.begin`, for a round whose input this rank pushes to the node: it declines."""
        if (self.channel.refuses or self.channel.is_broken or not self.channel.open
                or not self.rounds._begin(nbytes, bps_now_ns())):
            return None
        bps_direct_decline(&self.channel.channel, self.nbytes)
        return self.rounds.round

    def all_reduce(self, uintptr_t source, uintptr_t destination):
        """Sum the tensor at *source* of all ranks into *destination*, which is the same memory or does not overlap it.

        Raises
        ------
        BusyError, ClosedError, StallError, PeerLostError
            As `Unit.push` and `Unit.wait`. The round, and with it the name, is then lost to all ranks, and
            *destination* is partly written.
        """
        self._sum(<char *>destination, <char *>source)

    cdef int _sum(self, char *destination, char *source) except -1:
        cdef bps_direct_call call
        cdef bps_direct_work work
        cdef Channel channel = self.channel
        cdef bint keeps_gil = self.nbytes <= KEEPS_GIL_NBYTES
        cdef uint64_t now_ns = 0, began_ns = bps_now_ns()
        cdef int status
        if self.deferred:
            self.waits.start_deferred()
        if channel.refuses or channel.is_broken or not self.rounds._begin(self.nbytes, began_ns):
            raise self.waits.refusal()
        self.began_ns, self.has_looked = began_ns, False
        try:
            if channel.refuses:  # since other threads have run
                raise self.waits.refusal()
            channel._begin(&call, UINT64_MAX, self.look, keeps_gil)
            call.slice_ns, self.call = FIRST_LOOK_NS, &call
            work.kind, work.from_, work.to, work.nbytes, work.sum = (BPS_DIRECT_SUM, source, destination, self.nbytes,
                                                                     self.sum)
            status = channel._do(&work, &call, keeps_gil)
            now_ns = _note(self.native, self.part, self.rounds.n_begun, self.nbytes, began_ns,
                           status == BPS_DIRECT_DONE)
            if status == BPS_DIRECT_DECLINED:
                self.n_declined += 1
                if self.has_looked:
                    self.waits.end(status, began_ns)
                self.waits.sum_by_node(self.rounds.round, <uintptr_t>source, <uintptr_t>destination,
                                       max(0.0, self.waits.timeout_s() - (now_ns - began_ns) / 1e9))
                return 0
            if status != BPS_DIRECT_DONE:
                self.waits.end(status, began_ns)
        except BaseException as exc:
            self.waits.failed(exc)
            raise
        self.n_sums += 1
        self.rounds._summed_directly(now_ns)
        if self.has_looked:  # last: an interrupt in it is one after a sum that all ranks have
            self.waits.end(status, began_ns)
        return 0


cdef const bps_dl_exchange *_exchange(kind) except NULL:
    """Return the DLPack exchange table of a type of tensors; raises TypeError if it has none that we can read."""
    table = getattr(kind, "__dlpack_c_exchange_api__", None)
    if table is None or not hasattr(kind, "is_neg") or not PyCapsule_IsValid(table, BPS_DL_NAME):
        raise TypeError(f"{kind} is no type of tensors of torch with a DLPack exchange table")
    cdef const bps_dl_exchange *found = <const bps_dl_exchange *>PyCapsule_GetPointer(table, BPS_DL_NAME)
    if found.major != 1 or found.view == NULL:
        raise TypeError(f"{kind} has an exchange table of DLPack {found.major}; supported is 1")
    return found


@cython.final
cdef class DirectPush:
    """push_pull of a tensor with objects like the first one, *like*: NumPy arrays, or tensors of torch on the CPU.

    Arguments that differ from the first ones are left to Python, which checks them. Any thread.

    Parameters
    ----------
    tensor
        What is summed.
    is_array
        *like* is an array of NumPy, and of no class derived from that.
    dtype, shape
        Those of the tensor; *dtype* is one of `DTYPES`.
    average, priority
        The arguments of the first call.
    shared
        (first address, address after the last one) of the shared memory in which the first input lay; sums of inputs
        there go to arrays of this object. (0, 0): it lay elsewhere.
    locate
        ``locate(address, nbytes)`` returns None if no input lies in shared memory there: its sum goes to a new array.

    Raises
    ------
    TypeError
        If objects of that type have to be read by Python.
    """

    cdef DirectTensor tensor
    cdef object kind
    cdef const bps_dl_exchange *exchange
    cdef uint8_t code, bits
    cdef object dtype
    cdef int64_t shape[8]
    cdef int ndim
    cdef object average, priority
    cdef uintptr_t shared_begin, shared_end
    cdef list results, views
    cdef int parity
    cdef object locate, dimensions

    def __cinit__(self, DirectTensor tensor not None, like, bint is_array, str dtype, tuple shape, average, priority,
                  tuple shared, locate):
        cdef int i
        self.locate, self.dimensions = locate, shape
        self.tensor, self.kind, self.average, self.priority = tensor, type(like), average, priority
        self.shared_begin, self.shared_end = shared
        self.ndim = len(shape)
        if self.ndim > 8:
            raise TypeError(f"{self.ndim} dimensions")
        for i in range(self.ndim):
            self.shape[i] = shape[i]
        if is_array:
            self.dtype = like.dtype
            other = self.kind((0, *shape), self.dtype)
            if ((<bps_array *><void *>like).data != <char *><uintptr_t>like.ctypes.data
                    or not self._is_like(<bps_array *><void *>like, False)
                    or self._is_like(<bps_array *><void *>other, False)):
                raise TypeError(f"{self.kind} is laid out in another way than NumPy's arrays")
            if self.shared_begin:
                self.results = [self.kind(shape, self.dtype) for _ in range(2)]
                self.views = [each.view() for each in self.results]
                for each in self.views:
                    each.flags.writeable = False
            return
        self.exchange = _exchange(self.kind)
        self.bits = NBITS[dtype]
        self.code = CODES[dtype]

    def push_pull(self, x, out, average, priority):
        """Sum *x* into *out* (None: into an array of this object, or a new one) and return that.

        Returns None, and does nothing, if an argument is not like the first one. Raises as `DirectTensor.all_reduce`.
        """
        return self._push_any(x, out, average, priority)

    cdef object _push_any(self, x, out, average, priority):
        bps_direct_prepare(&self.tensor.channel.channel, self.tensor.nbytes)
        if (average is not self.average or type(x) is not self.kind or self.tensor.rounds.is_retired
                or self.tensor.channel.refuses
                or (priority is not self.priority and (type(priority) is not int or priority != self.priority))):
            return None
        if self.exchange != NULL:
            return self._push_tensor(x, out)
        return self._push_array(x, out)

    cdef object _push_known(self, x, out, average, priority):
        """As `_push_any`; a tensor that requires a gradient is left to Python, which refuses it."""
        if self.exchange != NULL:
            bps_direct_prepare(&self.tensor.channel.channel, self.tensor.nbytes)
            if (type(x) is not self.kind or x.requires_grad is not False
                    or (out is not x and (type(out) is not self.kind or out.requires_grad is not False))):
                return None
        return self._push_any(x, out, average, priority)

    cdef object _push_tensor(self, x, out):
        cdef bps_dl_tensor source, destination
        if out is None or not self._view(x, &source):
            return None
        destination = source
        if out is not x and (type(out) is not self.kind or not self._view(out, &destination)):
            return None
        return self._push(<char *>source.data + source.byte_offset, <char *>destination.data + destination.byte_offset,
                          out)

    cdef bint _view(self, x, bps_dl_tensor *found) except -1:
        """Read a tensor of torch; return whether that is one like the first."""
        if self.exchange.view(<void *>x, found) != 0:
            PyErr_Clear()
            return False
        return bps_dl_is(found, self.code, self.bits, self.shape, self.ndim) and x.is_neg() is False

    cdef object _push_array(self, x, out):
        cdef bps_array *source = <bps_array *><void *>x
        cdef int own
        if not self._is_like(source, x is out):
            return None
        if out is x:
            return self._push(source.data, source.data, out)
        if out is not None:
            if type(out) is not self.kind or not self._is_like(<bps_array *><void *>out, True):
                return None
            return self._push(source.data, (<bps_array *><void *>out).data, out)
        if not (self.shared_begin <= <uintptr_t>source.data
                and <uintptr_t>source.data + self.tensor.nbytes <= self.shared_end):
            if self.locate(<uintptr_t>source.data, self.tensor.nbytes) is not None:
                return None
            out = self.kind(self.dimensions, self.dtype)
            return self._push(source.data, (<bps_array *><void *>out).data, out)
        own = self.parity ^ 1
        out = self.results[own]
        if self._push(source.data, (<bps_array *><void *>out).data, out) is None:
            return None
        self.parity = own  # after a call that has failed the last result stays
        return self.views[own]

    cdef bint _is_like(self, const bps_array *array, bint writes) noexcept:
        """Whether that is a contiguous array like the first, which can be written if it is to be."""
        return bps_array_is(array, <bps_array_dtype *><void *>self.dtype, self.shape, self.ndim,
                            BPS_ARRAY_C_CONTIGUOUS | (BPS_ARRAY_WRITEABLE if writes else 0))

    cdef object _push(self, char *source, char *destination, out):
        cdef uint64_t apart = source - destination if source > destination else destination - source
        if 0 < apart < self.tensor.nbytes:
            return None
        self.tensor._sum(destination, source)
        return out


def known_first(dict pushes not None):
    """Decorate `bpsfast.push_pull`: a `DirectPush` in *pushes* makes calls with its name that are like its first."""
    def decorate(function):
        def push_pull(x, average=True, name=None, priority=None, out=None, compression=None, learning_rate=None):
            if type(name) is str and compression is None and learning_rate is None:
                known = pushes.get(name)
                if known is not None:
                    summed = (<DirectPush>known)._push_known(x, out, average, priority)
                    if summed is not None:
                        return summed
            return function(x, average, name, priority, out, compression, learning_rate)

        return functools.wraps(function)(push_pull)

    return decorate


def known_first_in_place(dict pushes not None):
    """The same for `bpsfast.torch.push_pull_inplace`."""
    def decorate(function):
        def push_pull(tensor, average=True, name=None, version=0, priority=0, *, compression=None, learning_rate=None):
            if type(name) is str and compression is None and learning_rate is None:
                known = pushes.get(name)
                if known is not None and (<DirectPush>known)._push_any(tensor, tensor, average, priority) is not None:
                    return tensor
            return function(tensor, average, name, version, priority, compression=compression,
                            learning_rate=learning_rate)

        return functools.wraps(function)(push_pull)

    return decorate
