"""Messages from rank to rank, for what is no sum: send and receive, gather, scatter, all-to-all, control talk.

    post        what ranks call               peer       the protocol of a pair of ranks
    transfer    one message, for its owner    link       frames on a socket
    delivery    payload to its receive        allowance  what may be sent before it is asked for
    matching    which receive gets what
    progress    who moves messages on         pull       reading the sender's memory
    meeting     how two posts find each other exchange   gather, scatter, all-to-all

MPI's semantics (MPI 4.1, chapter 3), by eager messages and rendezvous, as Open MPI and MPICH have them.
"""
from __future__ import annotations

from .endpoint import P2PEndpoint
from .transfer import Transfer

__all__ = ["P2PEndpoint", "Transfer"]
