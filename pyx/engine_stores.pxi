# Stores of parts; included by engine.pyx.


cdef bps_weight_store *_store(uint32_t n_parts, void *momentum, uint64_t momentum_nbytes) except NULL:
    """Return a new store for so many parts."""
    cdef bps_weight_store *store = bps_store_make(n_parts, momentum, momentum_nbytes)
    if store == NULL:
        raise MemoryError(f"a store for {n_parts} workers")
    return store


cdef list _behind(bps_core *core, uint32_t part):
    """See `Engine.behind`."""
    cdef uint32_t found[BPS_MAX_SOURCES]
    cdef uint32_t i, n = 0
    pthread_mutex_lock(&core.lock)
    if part < core.n_parts and core.parts[part].inputs != NULL:
        n = bps_store_behind(core, part, found, BPS_MAX_SOURCES)
    pthread_mutex_unlock(&core.lock)
    return [found[i] for i in range(n)]
