"""The node: one process per machine that sums, owns partitions, memory and connections.

    control    the loop and its phases        reception, household   who comes in, the ranks of this machine
    plans      two-phase commits, carried out wiring, regions        from a plan to memory and engine parts
    vertex     the engine and what it needs   dispatch               what is written next to each node
    seats      on which cores, in which memory it and its ranks are
    quota      what it may take               strength, throughput   what it says of NIC and sums when it joins
"""
