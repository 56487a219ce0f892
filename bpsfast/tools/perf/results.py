"""A run of ``perf`` as perftest prints it: a block of what was agreed, then a row for each size."""
from __future__ import annotations

from typing import Any

from .perf_plan import Plan

_RULE = "-" * 91
_BW_HEAD = (" #bytes", "#iterations", "BW peak[Gb/sec]", "BW average[Gb/sec]", "MsgRate[Mpps]")
_LAT_HEAD = (" #bytes", "#iterations", "t_min[usec]", "t_max[usec]", "t_typical[usec]", "t_avg[usec]", "t_stdev[usec]",
             "99% percentile[usec]", "99.9% percentile[usec]")
_LAT_FIELDS = ("min_s", "max_s", "typical_s", "average_s", "stdev_s", "p99_s", "p999_s")


def block(plan: Plan, places: dict[str, Any]) -> str:
    """Return the head of the table: what runs, between whom."""
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
    """Return one side in words."""
    if "device" not in place:
        return ", ".join(f"{name} {value}" for name, value in place.items())
    gid = f"GID {place['gid_index']} ({place['gid_version']}) {place['gid']}" if place["gid"] else "no GID"
    return f"{place['host']}, {place['device']}/{place['port']}, {gid}: {place['reason']}"


def head(plan: Plan) -> str:
    """Return the line above the rows."""
    names = _BW_HEAD if plan.verb == "bw" else _LAT_HEAD
    return "  ".join(names) + ("  verbs" if len(plan.providers) > 1 else "")


def line(plan: Plan, row: dict[str, Any]) -> str:
    """Return one row; below it, what the cards counted if that is not clean."""
    cells = cells_of(plan, row)
    names = _BW_HEAD if plan.verb == "bw" else _LAT_HEAD
    text = "  ".join(f" {cell:<{len(name) - 1}}" if i == 0 else f"{cell:<{len(name)}}"
                     for i, (cell, name) in enumerate(zip(cells, names)))
    if len(plan.providers) > 1:
        text += f"  {row['verbs']}"
    return "\n".join([text.rstrip(), *trouble(row)])


def cells_of(plan: Plan, row: dict[str, Any]) -> list[str]:
    """Return the numbers of a row in perftest's units."""
    if plan.verb == "lat":
        return [str(row["nbytes"]), str(row["iterations"]), *(f"{row[name] * 1e6:.2f}" for name in _LAT_FIELDS)]
    peak = row["peak_bytes_per_s"]
    return [str(row["nbytes"]), str(row["messages"]), "-" if peak is None else f"{peak * 8e-9:.3f}",
            f"{row['average_bytes_per_s'] * 8e-9:.3f}", f"{row['messages_per_s'] * 1e-6:.6f}"]


def trouble(row: dict[str, Any]) -> list[str]:
    """Return what grew among the error counters during a row, by side, with what that means."""
    return [f"   {side} {delta['device']}/{delta['port']}: {verdict}"
            for side, found in row["counters"].items() for delta in found for verdict in delta["verdicts"]]


def counted(rows: list[dict[str, Any]]) -> list[str]:
    """Return the counters of the whole run, a line for each port of each side."""
    totals: dict[tuple[str, str, int], dict[str, int]] = {}
    for row in rows:
        for side, found in row["counters"].items():
            for delta in found:
                into = totals.setdefault((side, delta["device"], delta["port"]), {})
                for name, value in delta["changes"].items():
                    into[name] = into.get(name, 0) + value
    from ...hardware.nic_counters import CounterDelta

    return [CounterDelta(f"{side} {device}", port, 0.0, changes, False, False).line()
            for (side, device, port), changes in totals.items()]


def data(plan: Plan, places: dict[str, Any], rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what JSON shows: bytes, seconds, bytes per second."""
    options = {name: getattr(plan, name) for name in plan.__struct_fields__}
    return {"plan": options, "places": places, "rows": rows}


def table(plan: Plan, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Return what CSV shows, the head first."""
    names = [name.strip() for name in (_BW_HEAD if plan.verb == "bw" else _LAT_HEAD)]
    return [[*names, "verbs"], *([*cells_of(plan, row), row["verbs"] or ""] for row in rows)]
