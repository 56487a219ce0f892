"""The machine's topology (GPUs, PCIe switches, NVLinks, sockets, network cards) and how to sum gradients over it.

    graph             parts, links with their rates, and the JSON form
    discovery         the graph of this machine or of a recorded one, from `pcie` and `nvml`
    display           link words as in nvidia-smi, and a drawing

    copies            the copies that a machine can make, GPUDirect included, and the links that each crosses
    loads             what a step puts on each link, card and memory
    linear_program    linear programs with named variables
    strategy_solver   strategies: the best one, the paper's rule, one without a solver, and a lower bound
    decision          the strategy of a machine: forced by settings, else the best; a report for people

docs/design/topology.md has the reasons.
"""
