"""CPU and memory affinity: the CPUs on which ranks and the node run, and the NUMA nodes of their memory.

    locality   the NUMA nodes of network cards and GPUs
    plan       the machine's cores by NUMA node, and the decision
    binding    carries it out for threads and segments
"""
