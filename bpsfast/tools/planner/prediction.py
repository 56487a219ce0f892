"""For ``bpsfast plan``: predicts a step with a ring and each placement, by formula and with real partitions.

It also tells what limits the step, and how many helpers (nodes without ranks) shorten it.

A step is a forward pass and a backward pass, in which gradients appear layer by layer from the output (each layer with
weights takes equally long) and pass through one link that takes the layout's time for all of them. The next forward
pass waits for all sums. The order of sending does not change when the last one arrives.
"""
from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import msgspec

from ...orchestration import codec as codecs
from ...orchestration.codec import CodecSpec
from ...orchestration.errors import ConfigError
from ...orchestration.placement import forecast
from ...orchestration.placement.assignment import machine_times_s, owned_by, step_time_s
from ...orchestration.placement.codec_choice import CodecChoice, choose, loads_of
from ...orchestration.placement.layout import lay_out
from ...orchestration.placement.partition import ITEM_NBYTES
from ...orchestration.placement.rebalancing import reassign
from ...orchestration.placement.shares import Machine, capacities, least_time_s
from . import machine_list
from .catalog import Compute, Model

_OPTIONS = tuple(name for name in CodecSpec.__struct_fields__ if name not in ("kind", "auto"))


class Compression(NamedTuple):
    """The `choice` of tensors for `codec` (None: a machine has no peer), and names `left` out, in forward order."""

    codec: CodecSpec
    choice: CodecChoice | None
    left: tuple[str, ...]


def parse(text: str) -> CodecSpec:
    """Parse ``KIND[:NAME=VALUE,...]``, such as ``topk:k=0.01,error_feedback``; raise `ConfigError` if invalid."""
    kind, _, options = text.partition(":")
    values: dict[str, str] = {"kind": kind.strip()}
    for word in filter(None, options.split(",")):
        name, equals, value = word.strip().partition("=")
        if name not in _OPTIONS:
            raise ConfigError(f"compression {text!r}: there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        values[name] = value if equals else "true"
    if values["kind"] not in codecs.KINDS:
        raise ConfigError(f"compression {text!r}: there is no kind {kind!r}; there are {', '.join(codecs.KINDS)}")
    try:
        found = msgspec.convert(values, CodecSpec, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"compression {text!r}: {exc}") from None
    codecs.check(found)
    return found


def describe(codec: CodecSpec) -> str:
    """Return *codec* in the form that `parse` reads."""
    values = {field.name: getattr(codec, field.name) for field in msgspec.structs.fields(CodecSpec)
            if field.name in _OPTIONS and getattr(codec, field.name) != field.default}
    options = ",".join(name if value is True else f"{name}={'false' if value is False else value}"
                       for name, value in values.items())
    return f"{codec.kind}:{options}" if options else codec.kind


def predict(model: Model, machines: Sequence[Machine], codec: CodecSpec, copy_rate: float, *, partition_nbytes: int,
            fusion_nbytes: int) -> Compression:
    """Return which tensors of *model* gain by *codec* on *machines*, each of which copies *copy_rate* bytes/s.

    Raises `UnsupportedError` if the model's dtype cannot be compressed.
    """
    codecs.width_of(model.dtype)
    if _n_workers(machines) == 1:
        return Compression(codec, None, tuple(model.shapes))
    optional = msgspec.structs.replace(codec, auto=True)
    specs = [msgspec.structs.replace(spec, codec=optional) for spec in model.specs()]
    loads, _ = loads_of(specs, partition_nbytes, fusion_nbytes)
    choice = choose(loads, machines, [copy_rate] * len(machines))
    return Compression(codec, choice, tuple(name for name in model.shapes if name not in choice.names))

#: Layouts in the order of the report; the last three are placements of the same name.
LAYOUTS = ("ring", "ps", "colocated", "optimal")


class Prediction(NamedTuple):
    """One layout. `placed_s` is the time with whole partitions, None for a ring; `step_s` may be unknown (None)."""

    layout: str
    formula_s: float
    placed_s: float | None
    n_parts: int | None
    step_s: float | None


class Bottleneck(NamedTuple):
    """The machine that finishes last with real partitions in the optimal layout, and its bottleneck: "NIC" or "sum"."""

    machine: str
    what: str
    time_s: float
    owned_nbytes: int


class Loss(NamedTuple):
    """The optimal layout after the loss of the most important helper: partitions moved, and communication time."""

    machine: str
    placed_s: float
    moved_nbytes: int


class HelperCurve(NamedTuple):
    """Numbers of helpers beyond which more shorten neither communication nor the step, by the optimal formula."""

    times_s: dict[int, float]
    last: int
    last_for_step: int | None


class Plan(NamedTuple):
    """All results of a plan."""

    model: Model
    compute: Compute | None
    machines: tuple[Machine, ...]
    predictions: tuple[Prediction, ...]
    bottleneck: Bottleneck | None
    loss: Loss | None
    helpers: HelperCurve
    warnings: tuple[str, ...]
    compression: Compression | None = None

    @property
    def n_workers(self) -> int:
        """Number of machines with ranks."""
        return _n_workers(self.machines)


def _n_workers(machines: Sequence[Machine]) -> int:
    return sum(machine.has_ranks for machine in machines)


def make(model: Model, machines: Sequence[Machine], *, compute: Compute | None = None, partition_nbytes: int = 4096000,
         fusion_nbytes: int = 4096000, codec: CodecSpec | None = None, copy_rate: float = 0.0) -> Plan:
    """Predict a step of *model* on *machines*, those with ranks first, all with known rates.

    With *codec*, also predict which tensors gain by it, for the optimal placement and machines whose summing threads
    together copy *copy_rate* bytes/s. Raises `ConfigError` if there are more machines than partitions, or a helper is
    too slow to sum one partition within the step; `UnsupportedError` if the model's tensors cannot be compressed.
    """
    n = _n_workers(machines)
    k = len(machines) - n
    ring_s = forecast.ring_s(machines, model.nbytes)
    found = [Prediction("ring", ring_s, None, None, step_s(model, compute, ring_s))]
    bottleneck = loss = None
    for layout in LAYOUTS[1:]:
        if layout == "ps" and not k:
            continue
        units = lay_out(model.specs(), machines, policy=layout, partition_nbytes=partition_nbytes,
                        fusion_nbytes=fusion_nbytes)
        parts = [(part.nbytes, part.owner) for unit in units for part in unit.parts]
        formula_s = forecast.policy_s(machines, layout, model.nbytes)
        assert formula_s is not None
        if layout == "optimal" and n > 1:
            _check_grain(parts, machines, model.nbytes, partition_nbytes)
            bottleneck = _bottleneck(parts, machines)
            loss = _loss(parts, machines)
        owned = owned_by(parts, len(machines))
        placed_s = max(machine_times_s(owned, machines))
        found.append(Prediction(layout, formula_s, placed_s, len(parts), step_s(model, compute, placed_s)))
    warnings = forecast.warnings(machines, "optimal")
    if k:
        warnings += forecast.warnings(machines, "ps")
    compression = None if codec is None else predict(
        model, machines, codec, copy_rate, partition_nbytes=partition_nbytes, fusion_nbytes=fusion_nbytes)
    return Plan(model, compute, tuple(machines), tuple(found), bottleneck, loss, _curve(model, machines, compute),
                tuple(warnings), compression)


def step_s(model: Model, compute: Compute | None, comm_s: float) -> float | None:
    """Return the time of a step whose communication alone takes *comm_s*, None without compute times."""
    if compute is None:
        return None
    layers: list[int] = []
    for shape in model.shapes.values():
        if len(shape) > 1 or not layers:
            layers.append(0)
        layers[-1] += prod(shape) * ITEM_NBYTES[model.dtype]
    now_s = done_s = compute.forward_s
    for nbytes in reversed(layers):
        now_s += compute.backward_s / len(layers)
        done_s = max(done_s, now_s) + comm_s * nbytes / model.nbytes
    return done_s


def _check_grain(parts: Sequence[tuple[int, int]], machines: Sequence[Machine], nbytes: int, partition_nbytes: int
                 ) -> None:
    if len(parts) < len(machines):
        raise ConfigError(f"{len(machines)} machines are more than the {len(parts)} partitions of {nbytes} bytes: some "
                          f"would own none; take fewer helpers, or smaller --partition-bytes (now {partition_nbytes})")
    least = min(size for size, _ in parts)
    time_s = least_time_s(machines, nbytes)
    for m, most in enumerate(capacities(machines, nbytes, time_s)):
        if not machines[m].has_ranks and most < least:
            raise ConfigError(
                f"{_name(m, machines)} ({machine_list.rate_of(machines[m])}) is slower than its share: in a step of "
                f"{time_s * 1e3:.4g} ms it can sum {most:.0f} bytes, the smallest partition has {least}; omit it")


def _bottleneck(parts: Sequence[tuple[int, int]], machines: Sequence[Machine]) -> Bottleneck:
    owned = owned_by(parts, len(machines))
    times = machine_times_s(owned, machines)
    worst = max(range(len(machines)), key=lambda m: (times[m], -m))
    nic_s = machine_times_s(owned, [machine._replace(sum_rate=0.0) for machine in machines])[worst]
    return Bottleneck(_name(worst, machines), "NIC" if nic_s >= times[worst] else "sum", times[worst], owned[worst])


def _loss(parts: Sequence[tuple[int, int]], machines: Sequence[Machine]) -> Loss | None:
    """Lose one helper of each kind in turn; return the worst loss, None without helpers."""
    kinds = {machine: m for m, machine in reversed(list(enumerate(machines))) if not machine.has_ranks}
    found = []
    for lost in sorted(kinds.values()):
        owners = reassign(parts, machines, lost)
        moved = sum(nbytes for (nbytes, before), after in zip(parts, owners) if before != after)
        placed = [(nbytes, owner - (owner > lost)) for (nbytes, _), owner in zip(parts, owners)]
        survivors = [*machines[:lost], *machines[lost + 1 :]]
        found.append(Loss(_name(lost, machines), step_time_s(placed, survivors), moved))
    return max(found, key=lambda loss: loss.placed_s, default=None)


def _name(machine: int, machines: Sequence[Machine]) -> str:
    n = _n_workers(machines)
    return f"worker {machine}" if machine < n else f"helper {machine - n}"


def _curve(model: Model, machines: Sequence[Machine], compute: Compute | None) -> HelperCurve:
    k = len(machines) - _n_workers(machines)
    last = forecast.last_helper_that_pays(machines, machine_list.MOST_MACHINES)

    def time_s(k: int) -> float:
        return least_time_s(forecast.with_helpers(machines, k), model.nbytes)

    shown = sorted({0, k, last, last + 1, *(2**i for i in range(last.bit_length()))})
    last_for_step = None
    if compute is not None:
        # gradients that appear last are exposed at any rate; further helpers would only speed up hidden bytes
        steps = [step_s(model, compute, time_s(j)) or 0.0 for j in range(min(last, 256) + 1)]
        last_for_step = next(j for j, each in enumerate(steps) if each <= steps[-1] * 1.001)
    return HelperCurve({j: time_s(j) for j in shown}, last, last_for_step)
