"""Leg: one partition's way from where its input is to where its result goes, as `Port.convey` takes many of."""
from __future__ import annotations

import numpy as np

#: `convey.h: bps_leg`.
LEG = np.dtype([
    ("source", "<u8"), ("destination", "<u8"), ("nbytes", "<u8"), ("staging", "<u8"), ("result", "<u8"),
    ("offset", "<u8"), ("part", "<u4"), ("round", "<u4"), ("segment", "<u2"), ("flags", "<u2"), ("pad", "<u4")])

assert LEG.itemsize == 64, "convey.h says so"
