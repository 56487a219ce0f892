# The collectives of a group of torch.distributed of direct.pyx, whose arguments are read in C.

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
        By method how a call's options are read; they have a `rootRank` if torch's have.
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
    cdef CallOptions of_sum, of_reduce, of_broadcast, of_gather, of_scatter, of_all_to_all, of_barrier
    cdef CallCount count
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
                  turn, lock, CallCount count not None, what):
        self.channel, self.deferred, self.kind, self.turn = channel, deferred, kind, turn
        self.count, self.what, self.known = count, what, {}
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
            if not self.of_sum.ask_for_sum(opts) or not self._can_sum(tensor, &found):
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
            if not self.of_reduce.ask_for_sum(opts) or not 0 <= root < self.channel.channel.port.n:
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
            if (nbytes == 0 or not self.of_scatter.ask_for_sum(opts)
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

    cdef bint _enter(self, opts, CallOptions kind) except -1:
        """Take the lock for a call; return whether one can be made here, of options of that *kind*."""
        if (self.refuses or not kind.are_awaited(opts) or self.turn.is_idle is not True
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
