# What an engine has done; included by engine.pyx. Threads count under the lock, so it is read under it.


cdef dict _counters(bps_core *core):
    """See `Engine.counters`."""
    cdef uint64_t sums, summed, published, published_nbytes, forwarded, stale, left_out, allocations
    pthread_mutex_lock(&core.lock)
    sums, summed, published, published_nbytes = core.sums, core.bytes_summed, core.published, core.published_nbytes
    forwarded, stale, left_out, allocations = core.forwarded, core.stale, core.left_out, core.allocations
    pthread_mutex_unlock(&core.lock)
    return {"sums": sums, "bytes_summed": summed, "published": published, "published_bytes": published_nbytes,
            "forwarded": forwarded, "stale": stale, "left_out": left_out,
            "allocations": allocations + bps_counted(&core.events.grown),
            "trace_dropped": max(0, <int64_t>bps_counted(&core.trace.used) - <int64_t>core.trace.capacity)
            if core.trace.records else 0}


cdef uint64_t _pushed_nbytes(bps_core *core, uint32_t source):
    """See `Engine.pushed_nbytes`."""
    cdef uint64_t nbytes
    pthread_mutex_lock(&core.lock)
    nbytes = core.sources[source].pushed_nbytes
    pthread_mutex_unlock(&core.lock)
    return nbytes


cdef list _report(bps_core *core):
    """See `Engine.report`."""
    cdef uint32_t i, n, room = core.n_parts
    cdef bps_row *rows = <bps_row *>calloc(room + 1, sizeof(bps_row))
    if rows == NULL:
        raise MemoryError(f"a report of {room} parts")
    n = bps_table_report(core, rows, room)
    try:
        return [(rows[i].part, rows[i].round, rows[i].n_missing) for i in range(n)]
    finally:
        free(rows)
