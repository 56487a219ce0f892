"""Measurements between two machines: ``bpsfast perf bw``, ``perf lat`` and ``ping``.

    plan        what is measured, agreed by both sides          samples     what was measured, in numbers
    control     the connection over which they agree            report      those numbers as perftest prints them
    rdma, tcp, shm   one end of what is measured                visit       both sides of `perf`, step by step
    python_loop rdma's loop for verbs that are not ours      ping, reach both sides of `ping`
"""
