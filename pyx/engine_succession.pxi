# What an engine says of parts whose owner is another one from now on; included by engine.pyx.

cdef int _succeeded(int status, str what, str owner="here") except -1:
    """Raise ValueError if *status*, of a call about *what*, is not BPS_SUCCEEDED; *owner*: where none owns it."""
    if status == BPS_NOT_FROZEN:
        raise ValueError(f"{what}: only a frozen engine changes owners")
    if status == BPS_NO_PART:
        raise ValueError(f"{what}: there is no such part, or it is owned {owner}")
    if status == BPS_OTHER_ROUND:
        raise ValueError(f"{what}: it is at another round here")
    return 0


cdef tuple _progress(bps_core *core, uint32_t part):
    """See `Engine.progress`."""
    cdef uint32_t passed_on = 0, complete = 0
    if bps_progress(core, part, &passed_on, &complete) != BPS_SUCCEEDED:
        raise ValueError(f"there is no part {part}")
    return passed_on, complete
