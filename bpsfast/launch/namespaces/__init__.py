"""Clusters inside one machine: network namespaces on shaped links (`Cluster`), or two on a link that can fail on demand
(`FaultyLink`).
"""
from .cluster import Calibration, Cluster, CpuMeter, Machine
from .faulty_link import FaultyLink

__all__ = ["Calibration", "Cluster", "CpuMeter", "FaultyLink", "Machine"]
