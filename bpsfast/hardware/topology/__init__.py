"""What is inside a machine: GPUs, PCIe switches, NVLinks, sockets, network cards, and how fast each link is.

    graph       the graph, with its JSON form
    pcie        where a device hangs on PCIe, and which bridges above it are switches
    sockets     NUMA nodes with their cores, and what joins them
    cards       network cards, with their rate on the wire
    nvml        what NVIDIA's library says of GPUs and their NVLinks
    discovery   the graph of this machine, or of a recorded one, from all of these
    joints      how two parts are joined, in nvidia-smi's words
    picture     a drawing

    copies      the copies that a machine can make, and the links that each crosses
    direct      which GPUs could copy straight to which network card, and why others could not
    budget      what a step puts on each link, card and memory
    reduction   what islands put on links where they add up among themselves
    linear      linear programs by names
    optimum     what no use of the links can beat
    choice      the best strategy that can be carried out, and the paper's
    plain       a strategy without a solver
    decision    the strategy of a machine: what settings force, else the best, else the paper's
    advice      the best strategy beside the bound and the paper's, for people
    strategy    who adds in front of memory, who copies where, and how much
"""
