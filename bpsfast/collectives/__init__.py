"""Collectives of the ranks of a job, or of some of them: what `bpsfast.torch.backend` and `bpsfast.hvd` are made of.

    groups       sub-groups of a session, found by all their members under one name
    group        the collectives: each a list of loads, and a ticket that says what is called
    pipe         how loads of any size go through a few partitions of fixed size
"""
