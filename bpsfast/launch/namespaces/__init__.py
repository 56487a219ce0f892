"""A cluster inside one machine: network namespaces on a bridge, shaped links, kernel counters, the achievable rate.

And two machines on a link that fails as it is told to.
"""
from .cluster import Calibration, Cluster, CpuMeter, Machine
from .faulty_link import FaultyLink

__all__ = ["Calibration", "Cluster", "CpuMeter", "FaultyLink", "Machine"]
