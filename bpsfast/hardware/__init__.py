"""The machine's hardware: network cards, RDMA verbs, topology, CPU affinity. Everything here reads; nothing configures.

    sysfs, kernel     files below a root (``/`` or a recorded tree), and system calls for what files do not show
    host              both, with the facts that follow from them, also of a recorded machine
    interfaces, rdma_devices, numa, nic_counters    what sysfs says
    rdma_route        the RDMA port and GID to use for a peer, and the speed of the card behind an address
    topology/         the links inside the machine, and how to sum gradients over them
    affinity/         which CPUs and NUMA nodes the node and the ranks use
    verbs/            RDMA verbs by two providers, and what completion errors mean

docs/design/topology.md has the reasons.
"""
