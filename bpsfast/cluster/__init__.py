"""A cluster inside one machine: network namespaces on a bridge, shaped links, kernel counters, the achievable rate."""
from .cluster import Calibration, Cluster, CpuMeter, Machine

__all__ = ["Calibration", "Cluster", "CpuMeter", "Machine"]
