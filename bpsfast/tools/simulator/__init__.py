"""A discrete-event simulator of training jobs: what one machine cannot show, and what no cluster is at hand for.

It decides with the job's own code (`orchestration.placement` and `orchestration.order`) and simulates the rest:

    workload    layers with their times and tensors              networks    those of known models
    cluster     machines, cards, what a message costs
    layout      who sums which partition                         clock       events in order of time
    worker      forward, backward                                network     cards and the fabric
    exchange    push and pull through summation services         ring        all-reduce with fusion buffers
    simulation  one job: all of them together                    all_reduce  by urgency, one order on all ranks
    machines    the insides of the paper's machines              inside      what a way to sum in them leaves of a card
"""
