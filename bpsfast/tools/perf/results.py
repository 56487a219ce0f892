"""Results of ``bpsfast perf``: bandwidths and latencies as perftest defines and prints them."""
from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ...hardware.nic_counters import CounterDelta
from .perf_plan import Plan

_IMPROVEMENTS = 50


def peak_seconds(posted_ns: bytes | Sequence[int], completed_ns: bytes | Sequence[int]) -> float | None:
    """Return the shortest time per message of any stretch of the run, which defines perftest's peak.

    A stretch i..j takes from the post of its first message to the completion of its last one: the minimum of
    (completed[j] - posted[i]) / (j - i + 1) over all i <= j. None if no times were recorded.

    perftest compares all pairs. Here each pass finds the stretch that undercuts a guess most, which is the next guess
    (Dinkelbach's method); a few passes suffice.
    """
    posted, completed = _nanoseconds(posted_ns), _nanoseconds(completed_ns)
    n = min(len(posted), len(completed))
    if n == 0:
        return None
    posted, completed = posted[:n] - posted[0], completed[:n] - posted[0]
    index = np.arange(n)
    guess = float(completed[-1]) / n
    for _ in range(_IMPROVEMENTS):
        starts = posted - guess * index
        ends = completed - guess * (index + 1)
        most = np.maximum.accumulate(starts)
        j = int(np.argmin(ends - most))
        i = int(np.argmax(starts[:j + 1]))
        better = float(completed[j] - posted[i]) / (j - i + 1)
        if not 0 < better < guess:
            break
        guess = better
    return guess / 1e9 if guess > 0 else None


def bandwidth(nbytes: int, sent: int, seconds: float, peak_s: float | None) -> dict[str, Any]:
    """Return the numbers of one direction; the peak is at least the average."""
    average = nbytes * sent / seconds if seconds > 0 else 0.0
    return {"messages": sent, "seconds": seconds, "average_bytes_per_s": average,
            "peak_bytes_per_s": max(average, nbytes / peak_s) if peak_s else None,
            "messages_per_s": sent / seconds if seconds > 0 else 0.0}


def both(own: dict[str, Any], peer: dict[str, Any]) -> dict[str, Any]:
    """Return the sum of two directions, as -b of perftest prints it."""
    return {name: max(own[name], peer[name]) if name == "seconds"
            else None if None in (own[name], peer[name]) else own[name] + peer[name] for name in own}


def latency(samples_ns: bytes | Sequence[int], n_warmup: int, halves: bool) -> dict[str, Any]:
    """Return perftest's latency numbers of the samples after *n_warmup*; *halves*: samples are round trips, halve them.

    A percentile is the smallest sample that so many per cent do not exceed.
    """
    values = np.sort(_nanoseconds(samples_ns)[n_warmup:] / (2e9 if halves else 1e9))
    if not len(values):
        raise ValueError(f"no samples after {n_warmup} of warm-up")

    def percentile(percent: float) -> float:
        return float(values[max(0, math.ceil(len(values) * percent / 100) - 1)])

    return {"min_s": float(values[0]), "max_s": float(values[-1]), "typical_s": float(np.median(values)),
            "average_s": float(values.mean()), "stdev_s": float(values.std()), "p99_s": percentile(99),
            "p999_s": percentile(99.9)}


def _nanoseconds(values: bytes | Sequence[int]) -> np.ndarray:
    return np.frombuffer(values, np.int64) if isinstance(values, bytes) else np.asarray(values, np.int64)

_RULE = "-" * 91
_HEADS = {"bw": (" #bytes", "#iterations", "BW peak[Gb/sec]", "BW average[Gb/sec]", "MsgRate[Mpps]"),
          "lat": (" #bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]", "t_avg[usec]",
                  "t_stdev[usec]", "99% percentile[usec]", "99.9% percentile[usec]")}
_LAT_FIELDS = ("min_s", "max_s", "typical_s", "average_s", "stdev_s", "p99_s", "p999_s")


def block(plan: Plan, places: dict[str, Any]) -> str:
    """Return the heading: what is measured, between which sides."""
    title = "Bandwidth" if plan.verb == "bw" else "Latency"
    facts: list[tuple[str, Any]] = [("Transport", plan.transport), ("Operation", plan.operation)]
    if plan.transport == "rdma":
        facts += [("Mtu", f"{places['client']['mtu']}[B]"), ("Number of qps", plan.pairs),
                  ("Verbs", ", ".join(plan.providers)), ("Waits", "events" if plan.events else "polling"),
                  ("Inline data", f"{places['client']['inline_nbytes']}[B]")]
        if plan.verb == "bw":
            facts.append(("CQ Moderation", plan.moderation_at(plan.sizes[0])))
    elif plan.transport == "tcp":
        facts.append(("Streams", plan.pairs))
    if plan.verb == "bw":
        facts += [("TX depth", plan.depth), ("Directions", 2 if plan.both_ways else 1)]
    else:
        facts.append(("Warm-up", f"{plan.n_warmup} iterations, not counted"))
    lines = [_RULE, f"bpsfast perf {plan.verb}: {title} Test".center(len(_RULE)).rstrip()]
    lines += [f" {name:<16}: {value}" for name, value in facts]
    lines += [f" {side:<16}: {where(places[side])}" for side in ("client", "server")]
    return "\n".join([*lines, _RULE])


def where(place: dict[str, Any]) -> str:
    """Return one side as text."""
    if "device" not in place:
        return ", ".join(f"{name} {value}" for name, value in place.items())
    gid = f"GID {place['gid_index']} ({place['gid_version']}) {place['gid']}" if place["gid"] else "no GID"
    return f"{place['host']}, {place['device']}/{place['port']}, {gid}: {place['reason']}"


def head(plan: Plan) -> str:
    """Return the head of the table."""
    return "  ".join(_HEADS[plan.verb]) + ("  verbs" if len(plan.providers) > 1 else "")


def line(plan: Plan, row: dict[str, Any]) -> str:
    """Return one row, followed by counted errors."""
    text = "  ".join(f" {cell:<{len(name) - 1}}" if i == 0 else f"{cell:<{len(name)}}"
                     for i, (cell, name) in enumerate(zip(cells_of(plan, row), _HEADS[plan.verb])))
    if len(plan.providers) > 1:
        text += f"  {row['verbs']}"
    return "\n".join([text.rstrip(), *trouble(row)])


def cells_of(plan: Plan, row: dict[str, Any]) -> list[str]:
    """Return the cells of a row in perftest's units."""
    if plan.verb == "lat":
        return [str(row["nbytes"]), str(row["iterations"]), *(f"{row[name] * 1e6:.2f}" for name in _LAT_FIELDS)]
    peak = row["peak_bytes_per_s"]
    return [str(row["nbytes"]), str(row["messages"]), "-" if peak is None else f"{peak * 8e-9:.3f}",
            f"{row['average_bytes_per_s'] * 8e-9:.3f}", f"{row['messages_per_s'] * 1e-6:.6f}"]


def trouble(row: dict[str, Any]) -> list[str]:
    """Return the error counters that grew during a row, by side, with their meaning."""
    return [f"   {side} {delta['device']}/{delta['port']}: {verdict}"
            for side, found in row["counters"].items() for delta in found for verdict in delta["verdicts"]]


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """Return the counters of the whole run, one line for each port of each side."""
    totals: dict[tuple[str, str, int], Counter[str]] = defaultdict(Counter)
    for row in rows:
        for side, found in row["counters"].items():
            for delta in found:
                totals[side, delta["device"], delta["port"]].update(delta["changes"])
    return [CounterDelta(f"{side} {device}", port, 0.0, changes, False, False).line()
            for (side, device, port), changes in totals.items()]


def data(plan: Plan, places: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the JSON data: bytes, seconds, bytes per second."""
    return {"plan": msgspec.structs.asdict(plan), "places": places, "rows": rows}


def table(plan: Plan, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return the CSV rows, head first."""
    return [[*map(str.strip, _HEADS[plan.verb]), "verbs"],
            *([*cells_of(plan, row), row["verbs"] or ""] for row in rows)]
