"""Collectives and point-to-point messages of ranks, for `bpsfast.torch.backend` (torch.distributed) and `bpsfast.hvd`.

They use the session and the units of `trainer`.

    group             a group of ranks and its collectives
    chunk_stream      how collectives of any size go through a few partitions of fixed size
    serial_executor   threads that run a group's calls in order
    p2p               messages between two ranks, gather, scatter, all-to-all
    turn_service      operations that all ranks must begin in one order
    group_service     what turn_service and `hvd.service` have in common
    islands           sums among the GPUs of one machine before the data leaves them
"""
