"""The prediction of ``bpsfast plan`` as text, CSV and JSON."""
from __future__ import annotations

from math import prod
from typing import Any

from ...base import output
from . import machine_list
from .prediction import Plan, describe, step_s

#: Number of uncompressed tensors to list, the largest first.
_MOST_NAMES = 4
_HEAD = ("layout", "formula", "placed", "above", "step", "gain")


def text(plan: Plan) -> str:
    """Return the report: the job, one line per layout, the bottleneck, useful helpers, warnings."""
    model, n = plan.model, plan.n_workers
    lines = [
        f"{model.title}: {model.n_parameters:,} parameters in {len(model.shapes)} tensors, "
        f"{model.nbytes / 1e6:.1f} MB of {model.dtype}",
        f"{machine_list.describe(plan.machines[:n], 'worker')}; {machine_list.describe(plan.machines[n:], 'helper')}",
    ]
    if plan.compute is not None:
        compute = plan.compute
        what = f" ({compute.batch} {compute.unit}, {compute.hardware})" if compute.hardware else ""
        lines.append(f"forward {_ms(compute.forward_s)}, backward {_ms(compute.backward_s)}{what}")
    lines += ["", *output.columns(rows(plan), right=range(1, len(_HEAD))).splitlines(), ""]
    if plan.bottleneck is not None:
        worst = plan.bottleneck
        lines.append(f"bottleneck: the {worst.what} of {worst.machine}, {_ms(worst.time_s)} (it owns "
                     f"{worst.owned_nbytes / 1e6:.1f} MB)")
    lines.append(_helpers(plan))
    if plan.loss is not None:
        loss = plan.loss
        lines.append(f"without {loss.machine}: communication {_ms(loss.placed_s)}; {loss.moved_nbytes / 1e6:.1f} MB of "
                     f"sums would have another owner, {loss.moved_nbytes / max(1, model.nbytes):.0%} of all")
    lines += _compression(plan)
    return "\n".join(output.fitting([*lines, *(f"warning: {warning}" for warning in plan.warnings)]))


def rows(plan: Plan) -> list[tuple[str, ...]]:
    """Return the table: communication by formula and with partitions, the difference, the step, the gain."""
    ring_s = plan.predictions[0].formula_s
    table: list[tuple[str, ...]] = [_HEAD]
    for each in plan.predictions:
        above = "-" if not each.placed_s else f"{max(0.0, each.placed_s / each.formula_s - 1):.1%}"
        time_s = each.formula_s if each.placed_s is None else each.placed_s
        table.append((each.layout, _ms(each.formula_s), _ms(each.placed_s), above, _ms(each.step_s),
                      f"{ring_s / time_s:.2f}x" if time_s else "-"))
    return table


def _helpers(plan: Plan) -> str:
    curve = plan.helpers
    times = ", ".join(f"{k}: {_ms(time_s)}" for k, time_s in curve.times_s.items())
    k = len(plan.machines) - plan.n_workers
    if curve.last == 0:
        return f"helpers: none pays off, {k} there; communication by their number: {times}"
    pay = "pays" if curve.last == 1 else "pay"
    words = f"helpers: {curve.last} {pay}, the {_last(curve.last)} is the last, {k} there"
    if curve.last_for_step is not None:
        words += f" (for the step: {curve.last_for_step})"
    return f"{words}; communication by their number: {times}"


def _compression(plan: Plan) -> list[str]:
    if plan.compression is None:
        return []
    codec, choice, left = plan.compression
    if choice is None:
        return [f"{describe(codec)}: does not pay off, because a single worker sends nothing"]
    if not choice.names:
        return [f"{describe(codec)}: does not pay off; communication {_ms(choice.plain_s)} without, "
                f"{_ms(choice.all_s)} with all compressed"]
    lines = [f"{describe(codec)}: pays off for {len(choice.names)} of {choice.n_tensors} tensors; "
             f"{choice.wire_nbytes / 1e6:.2f} MB travel instead of {choice.plain_nbytes / 1e6:.1f} MB; communication "
             f"{_ms(choice.time_s)} instead of {_ms(choice.plain_s)} (wire {_ms(choice.wire_s)}, kernels "
             f"{_ms(choice.kernels_s)}; {_ms(choice.all_s)} with all compressed)"]
    if plan.compute is not None:
        steps = [_ms(step_s(plan.model, plan.compute, time_s)) for time_s in (choice.time_s, choice.plain_s)]
        lines[0] += f"; step {steps[0]} instead of {steps[1]}"
    some = sorted(left, key=lambda name: -prod(plan.model.shapes[name]))[:_MOST_NAMES]
    if some:
        more = f" and {len(left) - len(some)} more" if len(left) > len(some) else ""
        lines.append(f"uncompressed: {', '.join(some)}{more}")
    return lines


def _last(number: int) -> str:
    return f"{number}{'th' if 10 <= number % 100 <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


def data(plan: Plan) -> dict[str, Any]:
    """Return the JSON data: seconds, bytes, bits per second."""
    model, compute = plan.model, plan.compute
    return {
        "model": {"name": model.name, "title": model.title, "n_parameters": model.n_parameters,
                  "n_tensors": len(model.shapes), "dtype": model.dtype, "nbytes": model.nbytes},
        "compute": None if compute is None else {
            "forward_s": compute.forward_s, "backward_s": compute.backward_s, "batch": compute.batch or None,
            "hardware": compute.hardware or None},
        "machines": [{"role": "worker" if machine.has_ranks else "helper", "bits_per_s": machine.rate * 8,
                      "sum_bits_per_s": machine.sum_rate * 8 or None} for machine in plan.machines],
        "layouts": [each._asdict() for each in plan.predictions],
        "bottleneck": None if plan.bottleneck is None else plan.bottleneck._asdict(),
        "worst_loss": None if plan.loss is None else plan.loss._asdict(),
        "helpers": {"there": len(plan.machines) - plan.n_workers, "last_that_pays": plan.helpers.last,
                    "last_that_shortens_the_step": plan.helpers.last_for_step,
                    "communication": [{"n": k, "time_s": time_s} for k, time_s in plan.helpers.times_s.items()]},
        "compression": _compression_data(plan),
        "warnings": list(plan.warnings),
    }


def _compression_data(plan: Plan) -> dict[str, Any] | None:
    if plan.compression is None:
        return None
    codec, choice, left = plan.compression
    found: dict[str, Any] = {"codec": describe(codec), "uncompressed": list(left), "communication_s": None}
    if choice is not None:
        found |= {
            "communication_s": choice.time_s, "wire_s": choice.wire_s, "kernels_s": choice.kernels_s,
            "communication_without_s": choice.plain_s, "communication_with_all_s": choice.all_s,
            "nbytes": choice.wire_nbytes, "nbytes_without": choice.plain_nbytes,
            "step_s": step_s(plan.model, plan.compute, choice.time_s)}
    return found


def _ms(time_s: float | None) -> str:
    return "-" if time_s is None else f"{time_s * 1e3:,.1f} ms"
