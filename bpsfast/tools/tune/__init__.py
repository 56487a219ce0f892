"""``bpsfast tune rdma``: which settings move more bytes between these machines, found by measuring.

    comparison   better by more than chance?             facts     what one side's devices and machine offer
    search       one knob after the other, in a budget   knobs     what may be tried, and why the rest may not
    trial        settings -> what `perf` measures        field     the machines, and one measurement among them
    partner      the side that listens                   report    what was found, for people and as JSON
"""
