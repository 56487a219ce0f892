# Who was how late; included by engine.pyx.


cdef list _lags(bps_core *core, bint owned):
    """See `Engine.lags`."""
    cdef bps_lag *lag
    cdef uint32_t i, n = core.n_sources
    cdef uint64_t *rows = <uint64_t *>calloc(6 * <size_t>n + 1, sizeof(uint64_t))
    cdef uint64_t *row
    if rows == NULL:
        raise MemoryError(f"lags of {n} sources")
    pthread_mutex_lock(&core.lock)  # no objects are made under it
    for i in range(n):
        lag, row = (&core.owner_lags[i] if owned else &core.local_lags[i]), rows + 6 * i
        row[0], row[1], row[2] = lag.n, lag.sum_ns, lag.max_ns
        row[3], row[4], row[5] = bps_lag_p99(lag), lag.n_last, lag.last_sum_ns
    pthread_mutex_unlock(&core.lock)
    try:
        return [(i, rows[6 * i], rows[6 * i + 1], rows[6 * i + 2], rows[6 * i + 3], rows[6 * i + 4],
                 rows[6 * i + 5]) for i in range(n) if rows[6 * i]]
    finally:
        free(rows)
