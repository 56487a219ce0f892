"""Measurements between two machines: ``bpsfast perf bw``, ``perf lat`` and ``ping``.

    perf_plan        what to measure, agreed by both sides
    control          the control connection and its messages
    perf_run         both sides of ``perf``, step by step
    rdma, tcp, shm   one end of a measurement
    python_loop      the loop of `rdma` for other implementations of verbs
    results          bandwidths and latencies, printed as perftest does
    ping             both sides of ``ping``
"""
