"""The node: one process per machine, which sums gradients and owns partitions, memory and connections.

    main          the control loop and its phases         control_loop   what its parts need of it
    local_listener, local_ranks, local_rank               connections of this machine; its ranks
    peers         connecting, replacing links, losses     recovery       after the loss of a helper or the scheduler
    plans         two-phase commits                       plan_installer, unit_installer, owner_changes
                                                          from a plan to memory and parts of the engine
    runtime       the engine and what it needs            dispatch       what is written next to each node
    regions       memory                                  generation, partition_role, codec_state
                                                          what a unit uses here, and why
    gpu_direct    device memory that cards read           metrics        Prometheus and health
    affinity, cpu_quota, capacity                         CPUs, shares of the machine, rates told to the scheduler
    transport     how bytes reach another node
"""
