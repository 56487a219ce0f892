"""Records of a bench with known times, for tests of curves over sizes."""
from __future__ import annotations


def record(nbytes, median_s, operation="numpy", contestant="bpsfast", section="by size", **measured):
    return {"section": section, "chosen": {"contestant": contestant, "operation": operation, "nbytes": nbytes},
            "measured": {"median_s": median_s, "p99_s": 2 * median_s, "cpu_s": [median_s], "n_wrong": 0,
                         "cpu_busy": [0.1], **measured}}


def turns(nbytes, *medians_s):
    samples_s = [each for each in medians_s for _ in range(4)]
    row = record(nbytes, sorted(medians_s)[len(medians_s) // 2], samples_s=samples_s)
    row["chosen"]["n_per_round"], row["measured"]["cpu_s"] = 4, [1e-9 * nbytes] * len(medians_s)
    row["measured"]["p99_s"] = max(medians_s)
    return row
