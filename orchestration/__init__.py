"""The control plane: who takes part, which node sums what, and in which order. It never touches tensor bytes.

    messages                                         what ranks, nodes and the scheduler send each other
    scheduler_client                                 a node's connection to the scheduler
    job/, placement/, priority/, failover/, elastic/ the decisions, most of them pure: messages and the time go in,
                                                     messages come out. `failover.scheduler` is the scheduler process

Imports the standard library, pyzmq and msgspec only. Files of this folder import none of its sub-folders.
"""
