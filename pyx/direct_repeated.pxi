# Repeated calls of direct.pyx, whose arguments are compared in C with those of the first call: pushes of one tensor,
# and the collectives of a group of torch.distributed.

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


@cython.final
cdef class CallCount:
    """How many calls of a group have begun; its members count alike. Under the group's lock."""

    cdef public uint64_t n
    #: Whether a call is under way. Who holds the lock and finds it set was called inside that call (a signal handler).
    cdef public bint is_inside


@cython.final
cdef class DirectCalls:
    """Collectives of tensors of one type among the members of a group, for a caller that waits: all in C.

    Each method takes the arguments that torch.distributed gives to that of a process group, and returns whether it has
    made the call: False, and nothing is done, if the call has to be made by Python, which checks the arguments.

    Parameters
    ----------
    channel
        The group's.
    port
        The rank's port.
    deferred
        The rank's deferred pushes, for which others may wait.
    places
        By member the place of its rank among the ranks of the channel.
    kind
        The type of the tensors: it has a DLPack exchange table, and tensors an `is_neg()`.
    options
        By method the type of a call's options, which have an `asyncOp`, and a `reduceOp` and a `rootRank` if torch's
        have.
    hash_of_sum
        The hash of the `reduceOp` that is to sum.
    turn
        Its `is_idle` says that no other call of the group waits or runs.
    lock, count
        The group's; the lock, an RLock, is held during a call.
    what
        `known(operation, dtype, sizes, root)`: (the number by which members recognize such a call, its text);
        `timeout_s(options)`; `start_deferred()`; `look(began_ns)`: called while a call waits for long; `end(status,
        began_ns, text)`: called after that, or if a call has failed, whose error it raises; `failed(error, text)`:
        returns what to raise, with its cause; `require(place, offered, wanted)`: raises if these bytes differ;
        `close()`: called after a call, also one that has failed, if `refuses` was set meanwhile: closes the group if
        that was to be closed.

    Raises
    ------
    TypeError
        If objects of that type have to be read by Python.
    """

    cdef Channel channel
    cdef bps_port *native
    cdef dict deferred, known
    cdef object port, kind, turn, what, looks, acquire, release, opts
    cdef object of_sum, of_reduce, of_broadcast, of_gather, of_scatter, of_all_to_all, of_barrier
    cdef CallCount count
    cdef Py_hash_t hash_of_sum
    cdef const bps_dl_exchange *exchange
    cdef int places[64]
    cdef uint64_t began_ns
    cdef bps_direct_call *call
    cdef bint has_looked
    # of the last sum
    cdef bps_direct_sum sum
    cdef uint64_t nbytes
    cdef int64_t shape[8]
    cdef int ndim
    cdef uint8_t code, bits
    cdef tuple known_sum
    #: No call begins any more.
    cdef public bint refuses
    #: Calls that were made here.
    cdef readonly uint64_t n_calls

    def __cinit__(self, Channel channel not None, port, dict deferred not None, places, kind, dict options not None,
                  Py_hash_t hash_of_sum, turn, lock, CallCount count not None, what):
        self.channel, self.deferred, self.kind, self.turn = channel, deferred, kind, turn
        self.hash_of_sum, self.count, self.what, self.known = hash_of_sum, count, what, {}
        self.of_sum, self.of_reduce, self.of_broadcast = options["allreduce"], options["reduce"], options["broadcast"]
        self.of_gather, self.of_scatter = options["allgather"], options["reduce_scatter"]
        self.of_all_to_all, self.of_barrier = options["alltoall"], options["barrier"]
        self.acquire, self.release = lock.acquire, lock.release
        self.port, self.native = port, <bps_port *>PyCapsule_GetPointer(port.native, "bps_port")
        self.exchange = _exchange(kind)
        self.looks = self._looks
        self.ndim, self.sum.divisor = -1, 1
        for member, place in enumerate(places):
            self.places[member] = place

    def allreduce(self, tensors, opts):
        """Sum the one of *tensors* of all members in place."""
        cdef bps_direct_work work
        cdef bps_dl_tensor found
        cdef object tensor  # held, whatever becomes of the list: its memory is read and written below
        if (type(tensors) is not list or len(<list>tensors) != 1 or not self._enter(opts, self.of_sum)):
            return False
        bps_direct_prepare(&self.channel.channel, self.nbytes)
        try:
            tensor = (<list>tensors)[0]
            if hash(opts.reduceOp) != self.hash_of_sum or not self._can_sum(tensor, &found):
                return False
            work.kind, work.nbytes, work.sum = BPS_DIRECT_SUM, self.nbytes, self.sum
            work.to = <char *>found.data + found.byte_offset
            work.from_ = work.to
            return self._make(&work, self.known_sum, self.nbytes, self.nbytes, opts)
        finally:
            self._leave()

    def reduce(self, tensors, opts):
        """Sum the one of *tensors* of all members into the root's."""
        cdef bps_direct_work work
        cdef bps_dl_tensor found
        cdef int root
        if (type(tensors) is not list or len(<list>tensors) != 1 or not self._enter(opts, self.of_reduce)):
            return False
        try:
            tensor, root = (<list>tensors)[0], opts.rootRank
            if hash(opts.reduceOp) != self.hash_of_sum or not 0 <= root < self.channel.channel.port.n:
                return False
            work.kind, work.nbytes = BPS_DIRECT_SUM, self._view(tensor, &found)
            if work.nbytes == 0:
                return False
            work.from_ = <char *>found.data + found.byte_offset
            work.to = <char *>work.from_ if self._is_own(root) else NULL
            _set_sum(&work.sum, &found)
            return self._make(&work, self._known_as("reduce", &found, (work.nbytes // (found.bits // 8),), root),
                              work.nbytes, work.nbytes, opts)
        finally:
            self._leave()

    def broadcast(self, tensors, opts):
        """Copy the root's one of *tensors* to the others'."""
        cdef bps_direct_work work
        cdef bps_dl_tensor found
        cdef int root
        if (type(tensors) is not list or len(<list>tensors) != 1 or not self._enter(opts, self.of_broadcast)):
            return False
        try:
            tensor, root = (<list>tensors)[0], opts.rootRank
            if opts.rootTensor != 0 or not 0 <= root < self.channel.channel.port.n:
                return False
            work.kind, work.root, work.nbytes = BPS_DIRECT_COPY, self.places[root], self._view(tensor, &found)
            if work.nbytes == 0:
                return False
            work.to = <char *>found.data + found.byte_offset
            return self._make(&work, self._known_as("broadcast", &found, (work.nbytes // (found.bits // 8),), root),
                              work.nbytes, work.nbytes if self._is_own(root) else 0, opts)
        finally:
            self._leave()

    def allgather(self, outputs, inputs, opts):
        """Copy each member's one of *inputs* to its place in the one list of *outputs*."""
        if (type(inputs) is not list or len(<list>inputs) != 1 or type(outputs) is not list or len(<list>outputs) != 1
                or type((<list>outputs)[0]) is not list):
            return False
        return self._gather(tuple((<list>outputs)[0]), None, (<list>inputs)[0], opts)

    def all_gather_single(self, output, tensor, opts):
        """The same, with all outputs in one tensor."""
        return self._gather((), output, tensor, opts)

    def reduce_scatter(self, outputs, inputs, opts):
        """Sum of all members' one list of *inputs* each member's tensor into its one of *outputs*."""
        if (type(outputs) is not list or len(<list>outputs) != 1 or type(inputs) is not list or len(<list>inputs) != 1
                or type((<list>inputs)[0]) is not list):
            return False
        return self._scatter((<list>outputs)[0], tuple((<list>inputs)[0]), None, opts)

    def reduce_scatter_single(self, output, tensor, opts):
        """The same, with all inputs in one tensor."""
        return self._scatter(output, (), tensor, opts)

    def alltoall(self, outputs, inputs, opts):
        """Copy the j-th of *inputs* of member i to the i-th of *outputs* of member j."""
        if type(outputs) is not list or type(inputs) is not list:
            return False
        return self._exchange(tuple(outputs), None, tuple(inputs), None, opts)

    def all_to_all_single(self, output, tensor, output_splits, input_splits, opts):
        """The same, with all outputs and inputs in one tensor, in equal parts."""
        if output_splits or input_splits:
            return False
        return self._exchange((), output, (), tensor, opts)

    def barrier(self, opts):
        """Wait for all members."""
        cdef bps_direct_work work
        if not self._enter(opts, self.of_barrier):
            return False
        try:
            work.kind = BPS_DIRECT_BARRIER
            return self._make(&work, self._known_as("barrier", NULL, (), -1), 0, 0, opts)
        finally:
            self._leave()

    # -- their parts -----------------------------------------------------------------------------------------------

    cdef bint _gather(self, tuple outputs, whole, tensor, opts) except -1:
        cdef bps_direct_work work
        cdef bps_dl_tensor own
        cdef bps_direct_gather *gather = &work.gather
        cdef uint64_t nbytes
        if not self._enter(opts, self.of_gather):
            return False
        try:
            nbytes = self._view(tensor, &own)
            if nbytes == 0 or not self._views(outputs, whole, &own, gather.places, gather.nbytes):
                return False
            work.kind, gather.own = BPS_DIRECT_GATHER, <char *>own.data + own.byte_offset
            if gather.nbytes[self.channel.channel.port.me] != nbytes:
                return False
            sizes = self._sizes(gather.nbytes)
            return self._make(&work, self._known_as("all_gather", &own, sizes, -1), sum(sizes), nbytes, opts)
        finally:
            self._leave()

    cdef bint _scatter(self, output, tuple inputs, whole, opts) except -1:
        cdef bps_direct_work work
        cdef bps_dl_tensor own
        cdef bps_direct_scatter *scatter = &work.scatter
        cdef uint64_t nbytes
        if not self._enter(opts, self.of_scatter):
            return False
        try:
            nbytes = self._view(output, &own)
            if (nbytes == 0 or hash(opts.reduceOp) != self.hash_of_sum
                    or not self._views(inputs, whole, &own, <char **>scatter.from_, scatter.nbytes)
                    or scatter.nbytes[self.channel.channel.port.me] != nbytes):
                return False
            work.kind, scatter.to = BPS_DIRECT_SCATTER, <char *>own.data + own.byte_offset
            _set_sum(&work.sum, &own)
            sizes = self._sizes(scatter.nbytes)
            nbytes = sum(sizes)
            return self._make(&work, self._known_as("reduce_scatter", &own, sizes, -1), nbytes, nbytes, opts)
        finally:
            self._leave()

    cdef bint _exchange(self, tuple outputs, output, tuple inputs, whole, opts) except -1:
        cdef bps_direct_work work
        cdef bps_dl_tensor first
        cdef bps_direct_pieces *pieces = &work.pieces
        if not self._enter(opts, self.of_all_to_all):
            return False
        try:
            if output is not None and not (self._is_even(output) and self._is_even(whole)):
                return False
            if (self._view(output if output is not None else outputs[0] if outputs else None, &first) == 0
                    or not self._views(outputs, output, &first, pieces.to, pieces.wanted)
                    or not self._views(inputs, whole, &first, <char **>pieces.from_, pieces.given)):
                return False
            work.kind = BPS_DIRECT_PIECES
            given = sum(self._sizes(pieces.given))
            return self._make(&work, self._known_as("all_to_all", NULL, (), -1),
                              given + sum(self._sizes(pieces.wanted)), given, opts)
        finally:
            self._leave()

    cdef bint _is_own(self, int root) noexcept:
        return self.places[root] == self.channel.channel.port.me

    cdef tuple _sizes(self, const uint64_t *nbytes):
        """Return *nbytes*, which are by place, by member."""
        return tuple([nbytes[self.places[i]] for i in range(self.channel.channel.port.n)])

    cdef bint _views(self, tuple tensors, whole, const bps_dl_tensor *like, char **at, uint64_t *nbytes) except -1:
        """Read a tensor for each member, or one, *whole*, in equal parts; return whether that can be done here."""
        cdef bps_dl_tensor found
        cdef int i, n = self.channel.channel.port.n
        cdef uint64_t part
        if whole is not None:
            part = self._view(whole, &found)
            if (part == 0 or found.code != like.code or found.bits != like.bits
                    or part // (found.bits // 8) % n != 0):
                return False
            part //= n
            for i in range(n):
                at[self.places[i]] = <char *>found.data + found.byte_offset + i * part
                nbytes[self.places[i]] = part
            return True
        if len(tensors) != n:
            return False
        for i in range(n):
            part = self._view(tensors[i], &found)
            if part == 0 or found.code != like.code or found.bits != like.bits:
                return False
            at[self.places[i]], nbytes[self.places[i]] = <char *>found.data + found.byte_offset, part
        return True

    cdef bint _is_even(self, x) except -1:
        """Whether the first dimension of *x* has equal parts for all members."""
        cdef bps_dl_tensor found
        return self._view(x, &found) != 0 and found.ndim > 0 and found.shape[0] % self.channel.channel.port.n == 0

    cdef bint _enter(self, opts, kind) except -1:
        """Take the lock for a call; return whether one can be made here, of whose options *kind* is the type."""
        if (self.refuses or type(opts) is not kind or self.turn.is_idle is not True or opts.asyncOp is not False
                or self.acquire(False) is not True):
            return False
        if (self.count.is_inside or self.channel.busy or self.channel.refuses or self.channel.is_broken
                or not self.channel.open):
            self.release()
            return False
        self.count.is_inside = True
        return True

    cdef int _leave(self) except -1:
        self.count.is_inside = False
        self.release()
        if self.refuses:
            self.what.close()
        return 0

    cdef uint64_t _view(self, x, bps_dl_tensor *found) except? 0:
        """Read a tensor whose elements follow each other, of a dtype in `DTYPES`, on the CPU.

        Return its bytes; 0: it is none. The tensor's shape is to be read before anything else runs.
        """
        if type(x) is not self.kind or x.is_neg() is not False:
            return 0
        if self.exchange.view(<void *>x, found) != 0:
            PyErr_Clear()
            return 0
        if (not bps_dl_is(found, found.code, found.bits, found.shape, found.ndim)
                or (found.code, found.bits) not in _NAMES):
            return 0
        return _n_elements_of(found) * (found.bits // 8)

    cdef tuple _known_as(self, str operation, const bps_dl_tensor *tensor, tuple sizes, int root):
        """Return the number and the text of a call."""
        key = operation, 0 if tensor == NULL else tensor.code << 8 | tensor.bits, sizes, root
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= MOST_KNOWN:
                self.known.clear()
            name = "" if tensor == NULL else _NAMES[tensor.code, tensor.bits]
            found = self.known[key] = self.what.known(operation, name, sizes, root)
        return <tuple>found

    cdef bint _can_sum(self, x, bps_dl_tensor *found) except -1:
        """Whether *x* can be summed here; under the lock, because it prepares for tensors like *x*."""
        cdef int i
        if self.ndim >= 0 and type(x) is self.kind:
            if self.exchange.view(<void *>x, found) != 0:
                PyErr_Clear()
                return False
            if bps_dl_is(found, self.code, self.bits, self.shape, self.ndim):
                return x.is_neg() is False
        self.ndim = -1  # no tensor is like the last one, should the following raise
        self.nbytes = self._view(x, found)
        if self.nbytes == 0 or found.ndim > 8:
            return False
        for i in range(found.ndim):
            self.shape[i] = found.shape[i]
        self.known_sum = self._known_as("all_reduce", found, (self.nbytes // (found.bits // 8),), -1)
        _set_sum(&self.sum, found)
        self.code, self.bits, self.ndim = found.code, found.bits, found.ndim
        return True

    cdef bint _make(self, bps_direct_work *work, tuple known, uint64_t moved_nbytes, uint64_t nbytes, opts) except -1:
        """Make a call that is *known*, to which this member gives *nbytes*; return False if Python has to do that."""
        cdef bps_direct_call call
        cdef Channel channel = self.channel
        cdef bint keeps_gil = moved_nbytes <= KEEPS_GIL_NBYTES
        cdef int status, r
        if self.deferred:
            try:
                self.what.start_deferred()
            except Exception:
                return False  # Python makes the call, and raises what its caller knows
        if self.refuses or channel.refuses:  # since other threads have run
            return False
        self.count.n += 1
        self.n_calls += 1
        try:
            self.began_ns, self.has_looked = bps_now_ns(), False
            work.sum.call = <uint64_t>known[0] ^ (self.count.n * CALL_FACTOR)
            channel._begin(&call, UINT64_MAX, self.looks, keeps_gil)
            call.slice_ns = FIRST_LOOK_NS
            self.opts, self.call = opts, &call
            status = channel._do(work, &call, keeps_gil)
            self.opts = None
            _note(self.native, NO_PART, 0, nbytes, self.began_ns, status == BPS_DIRECT_DONE)
            if status != BPS_DIRECT_DONE:
                self.what.end(status, self.began_ns, known[1])
            if work.kind == BPS_DIRECT_PIECES:
                for r in range(channel.channel.port.n):
                    if work.pieces.offered[r] != work.pieces.wanted[r]:
                        self.what.require(r, work.pieces.offered[r], work.pieces.wanted[r])
        except BaseException as exc:
            self.opts = None
            failure = self.what.failed(exc, known[1])
            if failure is exc:
                raise
            raise failure
        if self.has_looked:  # last: an interrupt in it is one after a call that all members have made
            self.what.end(status, self.began_ns, known[1])
        return True

    def _looks(self):
        """Look at other things while a call waits. The first time read its timeout, which few calls need."""
        if self.opts is not None and not self.channel.refuses:
            opts, self.opts = self.opts, None
            self.call.deadline_ns = _after(self.began_ns, self.what.timeout_s(opts))
            self.call.slice_ns = DEFERRED_SLICE_NS if self.deferred else 0
            return
        self.has_looked = True
        self.what.look(self.began_ns)


#: So many different calls of a group are kept in mind.
cdef int MOST_KNOWN = 1024


cdef uint64_t _n_elements_of(const bps_dl_tensor *tensor) noexcept:
    cdef uint64_t n = 1
    for i in range(tensor.ndim):
        n *= <uint64_t>tensor.shape[i]
    return n


cdef int _set_sum(bps_direct_sum *sum, const bps_dl_tensor *tensor) except -1:
    sum.divisor = 1
    sum.kernel = bps_sum_kernel_of(DTYPES.index(_NAMES[tensor.code, tensor.bits]), 0, bps_sum_level())
    return 0
