"""Who sits where in a machine with several NUMA nodes: on which CPUs ranks and the node run, and where their memory is.

    cores      the machine's cores by NUMA node
    devices    the NUMA nodes of the cards that bytes go through, and of GPUs
    binders    what else may have bound a rank, and which GPU is its own
    plan       the decision, without any I/O
    pins       carried out for the threads of this process
    homes      carried out for segments
    refusals   what the kernel refused, told once
"""
