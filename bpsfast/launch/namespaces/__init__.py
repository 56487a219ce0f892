"""Clusters inside one machine, for tests and benchmarks: network namespaces on links that are shaped or can fail.

`Cluster` has any number of machines on shaped links, `FaultyLink` two machines on a link that can fail on demand.
"""
from .cluster import Calibration, Cluster, CpuMeter, Machine
from .faulty_link import FaultyLink

__all__ = ["Calibration", "Cluster", "CpuMeter", "FaultyLink", "Machine"]
