"""RDMA verbs over pyverbs, rdma-core's Python binding; interchangeable with our compiled wrapper `bpsfast.pyx.verbs`.

It has the same names, signatures and errors, and serves for comparison and for finding faults. pyverbs holds the GIL in
each call and every completion passes through Python, so jobs use the native provider. Both pass the same tests
(tests/guest/suite_verbs.py).

`verbs_object` loads pyverbs, is the base of all objects, and finds the pointers that pyverbs hides.
"""
from ....pyx.verbs import VerbsMissing
from .completion_queue import CompletionQueue
from .device import Device, MemoryRegion, ProtectionDomain
from .queue_pair import QueuePair
from .verbs_object import devices, fork_safety, load, version

__all__ = ["CompletionQueue", "Device", "MemoryRegion", "ProtectionDomain", "QueuePair", "VerbsMissing", "devices",
           "fork_safety", "load", "version"]
