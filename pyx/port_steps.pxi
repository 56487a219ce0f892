# What a rank has counted of its steps; included by port.pyx.


cdef tuple _steps(bps_tally *tally, bps_step *last):
    """See `Port.steps`."""
    return (bps_counted(&tally.steps),
            (bps_counted(&tally.step_ns), bps_counted(&tally.step_exposed_ns),
             bps_counted(&tally.communication_ns), bps_counted(&tally.hidden_ns)),
            (last.step_ns, last.exposed_ns, last.communication_ns, last.hidden_ns))
