"""A discrete-event simulator of training jobs, for clusters that are not at hand (``bpsfast simulate``).

It decides with the job's own code (`orchestration.placement`, `orchestration.priority`) and simulates the rest:

    workload           layers with their times and tensors; the built-in models
    network            simulated time, machines, network cards and the fabric
    partition_layout   which machine sums which partition
    push_pull          push and pull through summation services
    all_reduce         rings with fusion buffers, or in order of priority
    simulation         one job: workers and all of the above
"""
