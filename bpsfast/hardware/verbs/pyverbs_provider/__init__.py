"""RDMA objects over pyverbs: the names, signatures and errors of `bpsfast.pyx.verbs`, which says what they promise.

Another implementation of the same contract, to compare with and to look for faults by: rdma-core's own Python binding
makes every call. It holds the GIL while it does, and each completion passes through Python, so the native provider is
the one for work; both pass the same suite (tests/guest/suite_verbs.py).

`library` finds pyverbs, `ownership` is what all objects share, `pointers` finds what pyverbs keeps to itself, and
`work` accounts for what is posted.
"""
from ....pyx.verbs import VerbsMissing
from .completion_queue import CompletionQueue
from .device import Device, MemoryRegion, ProtectionDomain
from .queue_pair import QueuePair
from .verbs_object import devices, fork_safety, load, version

__all__ = ["CompletionQueue", "Device", "MemoryRegion", "ProtectionDomain", "QueuePair", "VerbsMissing", "devices",
           "fork_safety", "load", "version"]
