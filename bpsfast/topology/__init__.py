"""What is inside a machine: GPUs, PCIe switches, NVLinks, sockets, network cards, and how fast each link is.

    graph       the graph, with its JSON form
    discovery   the graph of this machine, or of a recorded tree, from the kernel's files and NVML
"""
