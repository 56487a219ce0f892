"""The report of `bench device`: tables, and the results that are wrong or slower than promised."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from bpsfast.bench.device.plan import LEAST_OF_BOUND, MOST_OF_ALONE
from bpsfast.bench.harness import table

Records = Sequence[dict[str, Any]]


def text(records: Records) -> str:
    """Return the tables of *records* of one part."""
    shown = {"device": _device, "sums": _sums, "backward": _backward, "profile": _profile, "stages": _stages,
             "training": _training, "memory": _memory, "error": _error}
    parts = []
    for section in dict.fromkeys(record["section"] for record in records):
        parts.append(shown[section]([record for record in records if record["section"] == section]))
    return "\n".join(parts)


def troubles(records: Records, is_gpu: bool) -> list[str]:
    """Return a line for each broken promise; on the host device only results count, not speed."""
    found = [f"{record['chosen']['part']} ended with an error" for record in records if record["section"] == "error"]
    for section, measured in ((record["section"], record["measured"]) for record in records):
        if measured.get("n_wrong"):
            found.append(f"{section}: {measured['n_wrong']} elements are wrong")
        if section == "training" and (measured["n_differing"] or measured["n_differing_parameters"]
                                      or not measured["ranks_agree"]):
            found.append("training: sums on the device and on the CPU differ")
        if section == "profile" and measured["waits"]:
            found.append(f"profile: threads of the backward pass waited for the GPU: {measured['waits']}")
        if section == "profile" and not (measured["sees_waits"] and measured["n_hooks"]):
            found.append("profile: the profiler saw neither hooks nor a wait on purpose, so nothing is known")
        if section == "backward" and is_gpu and not measured["is_as_alone"]:
            found.append(f"backward: the stream took {measured['stream_ratio']:.3f} of its time alone, "
                         f"{MOST_OF_ALONE} is allowed")
    least = reached_from(records)
    if is_gpu and any(record["section"] == "sums" for record in records) and least is None:
        found.append(f"sums: a stream of the largest arrays does not reach {LEAST_OF_BOUND} of the copies' bound")
    return found


def reached_from(records: Records) -> int | None:
    """Return the size from which on streams reach the promised share of the bound, or None if the largest does not."""
    streams = sorted(((record["chosen"]["nbytes"], record["measured"]["reaches_bound"]) for record in records
                      if record["section"] == "sums" and record["chosen"]["operation"] == "push_pull of a stream"),
                     reverse=True)
    least = None
    for nbytes, reaches in streams:
        if not reaches:
            break
        least = nbytes
    return least


def _device(records: Records) -> str:
    return "# " + ", ".join(f"{name} {value}" for name, value in records[0]["measured"].items() if value) + "\n"


def _sums(records: Records) -> str:
    cells = [["operation", "arrays", "bytes each", "ms", "GB/s of a rank", "of its bound", "of the longer direction",
              "#wrong"]]
    for record in records:
        chosen, measured = record["chosen"], record["measured"]
        cells.append([chosen["operation"], str(chosen["n_arrays"]), str(chosen["nbytes"]),
                      f"{measured['median_s'] * 1e3:.3f}", f"{measured['rate'] / 1e9:.2f}",
                      *(f"{measured[name]:.2f}" if name in measured else "-"
                        for name in ("of_bound", "of_longer_direction")),
                      str(measured["n_wrong"])])
    least = reached_from(records)
    said = "no size" if least is None else f"{least} bytes on"
    return f"# push_pull and plain copies\n{table.plain(cells)}\nstreams reach {LEAST_OF_BOUND} from: {said}\n"


def _backward(records: Records) -> str:
    measured = records[0]["measured"]
    cells = [["a backward pass (ms, medians)", "stream", "host enqueues", "in hooks", "longest hook", "whole step"]]
    for title in ("alone", "with_exchange"):
        found = {name: statistics.median(values) * 1e3 for name, values in measured[title].items()}
        cells.append([title.replace("_", " "), *(f"{found[name]:.3f}" for name in
                                                 ("stream_s", "host_s", "hooks_s", "longest_s", "step_s"))])
    return (f"# push_pull during a backward pass\n{table.plain(cells)}\n"
            f"the stream takes {measured['stream_ratio']:.3f} of alone\n")


def _profile(records: Records) -> str:
    lines = ["# Profile of backward passes with DistributedOptimizer"]
    for rank, record in enumerate(records):
        found = record["measured"]
        waits = ", ".join(f"{n} {name}" for name, n in found["waits"].items()) or "none waits"
        seen = "a wait on purpose was seen" if found["sees_waits"] else "a wait on purpose was NOT seen"
        lines.append(f"rank {rank}: {found['n_backwards']} passes, {found['n_hooks']} hooks, {found['n_calls']} calls "
                     f"of CUDA's in their {found['threads']} threads: {waits}; longest {found['longest_us']:.0f} us; "
                     f"{seen}")
    return "\n".join(lines) + "\n"


def _stages(records: Records) -> str:
    measured = records[-1]["measured"]
    shares = ", ".join(f"{n}: {share:.0%}" for n, share in enumerate(measured["at_least"], start=1))
    busy = ", ".join(f"{stage} {busy_s * 1e3:.2f}" for stage, busy_s in measured["busy_s"].items())
    return (f"# Stages of a step of {measured['whole_s'] * 1e3:.2f} ms on two nodes\n{measured['picture']}\n"
            f"share of the time with at least n of them busy: {shares}\nms in each: {busy}\n")


def _training(records: Records) -> str:
    found = records[0]["measured"]
    n_differing = sum(record["measured"]["n_differing"] for record in records)
    return (f"# The digits' network, {found['n_steps']} steps: of {found['n_averages']} averages on each rank "
            f"{n_differing} differ between device and CPU; of its tensors {found['n_differing_parameters']} at the "
            f"end; accuracy {found['accuracy']:.1%}\n")


def _memory(records: Records) -> str:
    cells = [["bytes for each byte of gradient", "rank", "device", "device, peak", "inputs", "results", "pinned",
              "machine"]]
    for record in records:
        found = record["measured"]

        def share(name: str, found: dict[str, Any] = found) -> str:
            return "-" if found[name] is None else f"{found[name] / found['nbytes']:.2f}"

        cells.append([found["method"], str(record["chosen"]["rank"]), *(share(f"{name}_nbytes") for name in (
            "device", "device_peak", "input", "result", "pinned", "machine"))])
    return f"# Memory\n{table.plain(cells)}\n"


def _error(records: Records) -> str:
    return "".join(f"# {record['chosen']['part']} ended with an error\n{record['measured']['error']}\n"
                   for record in records)
