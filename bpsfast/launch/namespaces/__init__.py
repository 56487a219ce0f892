"""Clusters inside one machine: network namespaces on a bridge with shaped links (`Cluster`), or two of them on a link
with faults on demand (`FaultyLink`).
"""
from .cluster import Calibration, Cluster, CpuMeter, Machine
from .faulty_link import FaultyLink

__all__ = ["Calibration", "Cluster", "CpuMeter", "FaultyLink", "Machine"]
