"""Point-to-point messages between ranks: send, receive, gather, scatter, all-to-all.

    endpoint             what ranks call: `P2PEndpoint`
    transfer             one message, as its sender or receiver sees it
    peer                 the protocol between this rank and another one
    protocol             frames and flow control
    receiver             matching of messages and receives, and how payloads arrive
    connector            addresses, handshakes, one connection for each pair of ranks
    frame_socket         frames on a non-blocking socket; encrypted_socket: the same with encryption
    cross_memory         reading the sender's memory (process_vm_readv)
    progress_engine      the thread or waiting caller that drives the connections
    message_collectives  gather, scatter and all-to-all

The semantics are MPI's (MPI 4.1, chapter 3). Small messages are sent eagerly, others by rendezvous.
"""
from __future__ import annotations

from .endpoint import P2PEndpoint
from .transfer import Transfer

__all__ = ["P2PEndpoint", "Transfer"]
