"""What is inside a machine: GPUs, PCIe switches, NVLinks, sockets, network cards, and how fast each link is.

    graph       the graph, with its JSON form
    pcie        where a device hangs on PCIe, and which bridges above it are switches
    sockets     NUMA nodes with their cores, and what joins them
    cards       network cards, with their rate on the wire
    nvml        what NVIDIA's library says of GPUs and their NVLinks
    discovery   the graph of this machine, or of a recorded one, from all of these
    joints      how two parts are joined, in nvidia-smi's words
    picture     a drawing
"""
