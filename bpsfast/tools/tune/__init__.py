"""``bpsfast tune rdma`` measures which settings move more bytes between these machines.

    search       tries one tunable after the other within a budget, and compares series of measurements
    tunables     what the machines offer, which settings may be tried, and what `perf` measures for them
    testbed      the machines and the measurements between them; both sides
    tuning_run   one run: prepare, search, report
"""
