# The options of calls of torch.distributed, for direct_collectives.pxi.

cdef extern from *:
    """
    #include <malloc.h>

    /* The C++ object of an object of a class of pybind11 without bases: its first field (`pybind11::detail::instance`).
     * NULL: it has none yet. */
    static inline const unsigned char *bps_pybind_value(PyObject *object)
    {
        return *(const unsigned char **)((char *)object + sizeof(PyObject));
    }

    static inline size_t bps_pybind_nbytes(const unsigned char *value) { return malloc_usable_size((void *)value); }
    """
    const uint8_t *bps_pybind_value(object)
    size_t bps_pybind_nbytes(const uint8_t *)


@cython.final
cdef class CallOptions:
    """Reads whether a caller waits, and whether it asks for a sum, from options of type *kind*.

    torch's bindings make a Python object for each attribute that is read, which takes 0.1 us for `asyncOp` and 0.4 for
    `reduceOp`: an eighth of a small sum. So this finds the only byte of the C++ object that always equals the
    attribute; if there is none, attributes are read.

    Parameters
    ----------
    kind
        The type.
    ops
        What `reduceOp` can be, the sum first. The hash of each is its number, from 0 to 255. None: these options have
        no `reduceOp`.
    """

    cdef object kind
    cdef Py_hash_t number_of_sum
    cdef Py_ssize_t async_at, op_at

    def __cinit__(self, kind, ops):
        self.kind = kind
        self.async_at, self.op_at = _byte_of(kind, "asyncOp", {0: False, 1: True}), -1
        if ops is not None:
            self.number_of_sum = hash(ops[0])
            self.op_at = _byte_of(kind, "reduceOp", {hash(op): op for op in ops})

    @property
    def is_found(self):
        """Whether these are read from the C++ object: `asyncOp`, `reduceOp`."""
        return self.async_at >= 0, self.op_at >= 0

    cpdef bint are_awaited(self, opts) except -1:
        """Whether *opts* are options of this type, of a call that its caller waits for."""
        cdef const uint8_t *value
        if type(opts) is not self.kind:
            return False
        value = bps_pybind_value(opts) if self.async_at >= 0 else NULL
        return value[self.async_at] == 0 if value != NULL else opts.asyncOp is False

    cpdef bint ask_for_sum(self, opts) except -1:
        """Whether *opts*, which are of this type, ask for a sum."""
        cdef const uint8_t *value = bps_pybind_value(opts) if self.op_at >= 0 else NULL
        return (value[self.op_at] if value != NULL else hash(opts.reduceOp)) == self.number_of_sum


cdef Py_ssize_t _byte_of(kind, str attribute, dict values) except -2:
    """Return which byte of the C++ objects of *kind* is the number, in *values*, of what *attribute* is; or -1."""
    cdef const uint8_t *value
    found = None
    if (type(kind).__name__ != "pybind11_type" or kind.__mro__[2:] != (object,) or len(values) < 2
            or not hasattr(kind, attribute)):
        return -1
    for number in sorted([*values] * 3):
        try:
            opts = kind()
            setattr(opts, attribute, values[number])
        except (TypeError, AttributeError):
            return -1
        value = bps_pybind_value(opts)
        if value == NULL:
            return -1
        places = {i for i in range(min(bps_pybind_nbytes(value), 256)) if value[i] == number}
        found = places if found is None else found & places
    return found.pop() if len(found) == 1 else -1
