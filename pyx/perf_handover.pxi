# How near two CPUs are; included by perf.pyx.

cdef extern from "handover.h" nogil:
    int bps_handover(int, int, uint64_t, double *)


def handover_ns(int first, int second, double timeout_s=0.2):
    """Return how many ns a cache line takes from CPU *first* to CPU *second*: the least of several short series.

    Two threads of its own are bound to them meanwhile. Raises OSError: EINVAL if this process may not use one of the
    CPUs, ETIMEDOUT if they did not come so far, as where others keep them busy.
    """
    cdef double ns = 0
    cdef int rc
    cdef uint64_t timeout_ns = <uint64_t>(timeout_s * 1e9)
    if first < 0 or second < 0 or first == second:
        raise ValueError(f"a cache line goes between two CPUs, not from {first} to {second}")
    with nogil:
        rc = bps_handover(first, second, timeout_ns, &ns)
    if rc == ETIMEDOUT:
        raise OSError(rc, f"CPUs {first} and {second} are busy: no cache lines came through in {timeout_s:g} s")
    if rc:
        raise OSError(rc, f"cache lines between CPUs {first} and {second}: {os.strerror(rc)}")
    return ns
