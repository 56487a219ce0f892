# Copies that no port is needed for; included by port.pyx.

cdef extern from "copy.h":
    void bps_copy(void *, const void *, uint64_t, uint64_t) nogil


def copy(uintptr_t destination, uintptr_t source, uint64_t nbytes, uint64_t stream_nbytes=1 << 20):
    """Copy *nbytes* between two addresses without the GIL; the ranges do not overlap.

    From *stream_nbytes* on, stores bypass the caches.
    """
    with nogil:
        bps_copy(<void *>destination, <void *>source, nbytes, stream_nbytes)
