# Copies that no port is needed for; included by port.pyx.

cdef extern from "copy.h":
    void bps_copy(void *, const void *, uint64_t, uint64_t) nogil


def copy(uintptr_t destination, uintptr_t source, uint64_t nbytes):
    """Copy *nbytes* between two addresses without the GIL; the ranges do not overlap."""
    with nogil:
        bps_copy(<void *>destination, <void *>source, nbytes, 1 << 20)
