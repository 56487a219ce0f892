"""Chooses which tensors with an optional codec are compressed: where saved bytes are worth the CPU time. Pure.

Of B bytes of tensors with a codec, s of them owned by one machine of n with ranks, that machine encodes its own partial
and decodes the result of all; as an owner it also decodes n partials and encodes the result. With E and D, the seconds
that encoding and decoding a byte of tensor take all of its threads together,

    kernels = (E + D) B + (E + n D) s                 (a helper: without the first term)

and a message for each partition besides, because a tensor with a codec is fused with nothing. Partitions flow, so a
step takes the longer of this and the network's time, which `forecast` gives for the bytes that travel. Tensors are
sorted by saved bytes per kernel second; of all numbers of tensors in this order the least is chosen whose time is as
good as the best. Sums without a codec count as free.
"""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from ..codec import CodecSpec, Kind
from ..messages import TensorSpec
from . import forecast
from .partition import plan_units
from .shares import Machine, least_time_s, optimal_shares


class Ratio(NamedTuple):
    """Bytes of tensor that a kernel takes while one byte is copied; `fed_encode`: with error feedback."""

    encode: float
    fed_encode: float
    decode: float


#: One thread of an AMD EPYC in a virtual machine, float32, 4 MB of normal numbers that stay in its caches, beside the
#: copy that `bpsfast.node.capacity` makes; where k matters, 1 % of the elements, and 4 levels. (The contestants of
#: `bpsfast bench codecs` take turns, so its copy meets colder memory, takes longer, and ratios to it are larger.)
RATIOS: Mapping[Kind, Ratio] = {
    "onebit": Ratio(1.6, 0.54, 2.1),
    "topk": Ratio(0.24, 0.1, 2.4),
    "randomk": Ratio(2.8, 0.18, 2.3),
    "dithering": Ratio(0.005, 0.003, 0.009),
    "float16": Ratio(1.7, 0.6, 1.7),
    "bfloat16": Ratio(1.4, 0.57, 1.8),
    "int8": Ratio(0.85, 0.37, 1.9),
}
#: CPU time of a machine for a partition that is sent and received (`bpsfast bench push_pull --nodes 2 --sizes 4K`).
_PART_S = 50e-6
#: A gain below this factor is not worth the lost bits.
_AS_GOOD = 1.01


class Load(NamedTuple):
    """One optional tensor: its bytes, the most that travel of it if it is compressed, and its number of partitions."""

    name: str
    nbytes: int
    frame_nbytes: int
    codec: CodecSpec
    n_parts: int = 1


class CodecChoice(NamedTuple):
    """Which of `n_tensors` tensors are compressed, by name, and the seconds that a step's communication takes then.

    `wire_s` and `kernels_s`: the two that overlap. `plain_s`: without any codec; `all_s`: with every codec. Bytes are
    those of all gradients as they travel: `plain_nbytes` without a codec, `wire_nbytes` as chosen.
    """

    names: frozenset[str]
    n_tensors: int
    wire_s: float
    kernels_s: float
    plain_s: float
    all_s: float
    plain_nbytes: int
    wire_nbytes: int

    @property
    def time_s(self) -> float:
        """The time of a step's communication."""
        return max(self.wire_s, self.kernels_s)

    def words(self) -> str:
        """Describe the choice and its reason in one line."""
        what = f"compression pays for {len(self.names)} of {self.n_tensors} tensors"
        if not self.names:
            return (f"{what}: a step's communication takes {_ms(self.plain_s)} without, {_ms(self.all_s)} with all "
                    "compressed")
        return (f"{what}: {self.wire_nbytes / 1e6:.4g} MB of gradients travel instead of "
                f"{self.plain_nbytes / 1e6:.4g} MB, in {_ms(self.time_s)} instead of {_ms(self.plain_s)} (wire "
                f"{_ms(self.wire_s)}, kernels {_ms(self.kernels_s)}; {_ms(self.all_s)} with all compressed)")


def settled(specs: Sequence[TensorSpec], machines: Sequence[Machine], copy_rates: Sequence[float], policy: str,
            partition_nbytes: int, fusion_nbytes: int) -> tuple[list[TensorSpec], str, str]:
    """Return *specs* with each optional codec used or removed; the reason for the choice; and why there was none.

    *machines* and *copy_rates* as for `choose`; if one of their rates is unknown, optional codecs are not used. Nor are
    they if there is only one machine with ranks, which has nobody to send anything to.
    """
    if not any(spec.codec is not None and spec.codec.auto for spec in specs):
        return list(specs), "", ""
    if sum(machine.has_ranks for machine in machines) == 1:
        return _with(specs, frozenset()), "", ""
    if not all(rate > 0 for rate in (*(machine.rate for machine in machines), *copy_rates)):
        return _with(specs, frozenset()), "", (
            "compression: whether it pays cannot be told, for not every NIC's rate is known, so tensors that are to be "
            "compressed only where it pays are not: set BPSFAST_NIC_RATE, or BPSFAST_NIC_PROBE=1")
    loads, fixed_nbytes = loads_of(specs, partition_nbytes, fusion_nbytes)
    choice = choose(loads, machines, copy_rates, policy, fixed_nbytes)
    return _with(specs, choice.names), choice.words(), ""


def _with(specs: Sequence[TensorSpec], names: frozenset[str]) -> list[TensorSpec]:
    """Return *specs* with optional codecs decided: compressed if it is one of *names*."""
    return [spec if spec.codec is None or not spec.codec.auto else msgspec.structs.replace(
        spec, codec=msgspec.structs.replace(spec.codec, auto=False) if spec.name in names else None) for spec in specs]


def loads_of(specs: Sequence[TensorSpec], partition_nbytes: int, fusion_nbytes: int) -> tuple[list[Load], int]:
    """Return the tensors of *specs* with optional codecs, and the bytes that travel of all others.

    Frames count with their longest form, partition by partition.
    """
    optional = {spec.name: spec.codec for spec in specs if spec.codec is not None and spec.codec.auto}
    loads, fixed_nbytes = [], 0
    for unit in plan_units(specs, 0, 0, partition_nbytes, fusion_nbytes):
        codec = optional.get(unit.members[0].name)
        nbytes = sum(part.wire_nbytes for part in unit.parts)
        if codec is None:
            fixed_nbytes += nbytes
        else:
            loads.append(Load(unit.members[0].name, unit.nbytes, nbytes, codec, len(unit.parts)))
    return loads, fixed_nbytes


def choose(loads: Sequence[Load], machines: Sequence[Machine], copy_rates: Sequence[float], policy: str = "optimal",
           fixed_nbytes: int = 0) -> CodecChoice:
    """Return which of *loads* to compress on *machines*, so that a step's communication ends as soon as possible.

    Parameters
    ----------
    machines : two with ranks at least; all rates known.
    copy_rates : bytes/s that the summing threads of each machine copy together, in the same order.
    policy : the placement; a hash is assumed to spread bytes as the optimum does.
    fixed_nbytes : what travels besides.
    """
    free, bound = (_TimeModel(machines, copy_rates, policy, keeps_state) for keeps_state in (False, True))
    eligible = sorted((load for load in loads if load.frame_nbytes < load.nbytes),
                      key=lambda load: -(load.nbytes - load.frame_nbytes) / free.cost(load))
    plain_nbytes = wire_nbytes = fixed_nbytes + sum(load.nbytes for load in loads)
    times = [(free.wire_s(plain_nbytes), 0.0, plain_nbytes)]
    encoded = decoded = parts_s = 0.0
    model = free
    for load in eligible:
        model = bound if model is bound or load.codec.has_state else free
        wire_nbytes -= load.nbytes - load.frame_nbytes
        encoded += _encoded(load)
        decoded += load.nbytes / RATIOS[load.codec.kind].decode
        parts_s += load.n_parts * _PART_S
        times.append((model.wire_s(wire_nbytes), parts_s + model.kernels_s(encoded, decoded), wire_nbytes))
    good_s = _AS_GOOD * min(max(each[:2]) for each in times)
    n_chosen = next(n for n, each in enumerate(times) if max(each[:2]) <= good_s)
    wire_s, kernels_s, wire_nbytes = times[n_chosen]
    return CodecChoice(frozenset(load.name for load in eligible[:n_chosen]), len(loads), wire_s, kernels_s,
                       times[0][0], max(times[-1][:2]), plain_nbytes, wire_nbytes)


class _TimeModel:
    """Machines for which times are linear in bytes; *keeps_state*: helpers own nothing, as with codecs with state."""

    def __init__(self, machines: Sequence[Machine], copy_rates: Sequence[float], policy: str, keeps_state: bool
                 ) -> None:
        if keeps_state:
            copy_rates = [rate for machine, rate in zip(machines, copy_rates) if machine.has_ranks]
            machines = [machine for machine in machines if machine.has_ranks]
            policy = "colocated" if policy == "ps" else policy
        self._n = sum(machine.has_ranks for machine in machines)
        time_s = forecast.policy_s(machines, policy, 1.0)
        self._byte_s = least_time_s(machines, 1.0) if time_s is None else time_s
        # What a machine spends on a byte of tensor that is encoded, or decoded, somewhere: few kinds of machines.
        self._kinds = {((machine.has_ranks + share) / rate, (machine.has_ranks + self._n * share) / rate)
                       for machine, share, rate in zip(machines, _shares(machines, policy), copy_rates)}

    def wire_s(self, nbytes: float) -> float:
        """Return how long *nbytes* of all gradients travel."""
        return self._byte_s * nbytes

    def kernels_s(self, encoded: float, decoded: float) -> float:
        """Return the busiest machine's time, from the bytes copied while everything is encoded, and decoded, once."""
        return max(encode_s * encoded + decode_s * decoded for encode_s, decode_s in self._kinds)

    def cost(self, load: Load) -> float:
        """Return the kernels' time for one tensor alone."""
        return load.n_parts * _PART_S + self.kernels_s(_encoded(load), load.nbytes / RATIOS[load.codec.kind].decode)


def _encoded(load: Load) -> float:
    """Return the bytes that are copied while *load* is encoded."""
    ratio = RATIOS[load.codec.kind]
    return load.nbytes / (ratio.fed_encode if load.codec.error_feedback or load.codec.momentum else ratio.encode)


def _shares(machines: Sequence[Machine], policy: str) -> Sequence[float]:
    """Return which share of all bytes each machine owns."""
    if policy == "ps":
        total = sum(machine.rate for machine in machines if not machine.has_ranks)
        return [0.0 if machine.has_ranks else machine.rate / total for machine in machines]
    if policy == "colocated":
        owned = iter(optimal_shares([machine for machine in machines if machine.has_ranks], 1.0).owned)
        return [next(owned) if machine.has_ranks else 0.0 for machine in machines]
    return optimal_shares(machines, 1.0).owned


def _ms(time_s: float) -> str:
    return f"{time_s * 1e3:.4g} ms"
