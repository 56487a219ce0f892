"""The simulated workload: layers in forward order with their times and tensors, and the built-in models as such."""
from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from ...orchestration.errors import ConfigError
from ...orchestration.messages import TensorSpec, UnitPlan
from ...orchestration.placement.partition import plan_units
from ..planner import catalog
from ..planner.model_shapes import Shapes


class Layer(NamedTuple):
    """One layer. Its gradients are ready after its backward pass; its forward pass needs their sums."""

    name: str
    forward_s: float
    backward_s: float
    tensors: tuple[str, ...]


class Workload(NamedTuple):
    """One training step of a worker: a chain of layers, and each tensor's shape."""

    name: str
    layers: tuple[Layer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str = "float32"

    @property
    def compute_s(self) -> float:
        """Time of a step without communication."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def nbytes(self) -> int:
        """Bytes of all gradients."""
        return sum(tensor_nbytes(self.shapes[name], self.dtype) for layer in self.layers for name in layer.tensors)


def tensor_nbytes(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of one tensor of float32 or float16."""
    return prod(shape) * (2 if dtype in ("float16", "bfloat16") else 4)


def workload(name: str, layers: Sequence[Layer], shapes: Mapping[str, tuple[int, ...]],
             dtype: str = "float32") -> Workload:
    """Return a workload; raise `ConfigError` if it has no layer, invalid times, or tensors without shape or twice."""
    if not layers:
        raise ConfigError(f"workload {name!r} has no layers: there is nothing to compute")
    seen: set[str] = set()
    for layer in layers:
        for what, time_s in (("forward", layer.forward_s), ("backward", layer.backward_s)):
            if not (time_s >= 0 and math.isfinite(time_s)):
                raise ConfigError(f"layer {layer.name!r} of {name!r} has a {what} time of {time_s} s; it must be zero "
                                  "or more")
        for tensor in layer.tensors:
            if tensor not in shapes:
                raise ConfigError(f"layer {layer.name!r} of {name!r} makes the gradient of {tensor!r}, which has no "
                                  "shape")
            if tensor in seen:
                raise ConfigError(f"tensor {tensor!r} of {name!r} belongs to two layers; its gradient is ready once")
            seen.add(tensor)
    return Workload(name, tuple(layers), dict(shapes), dtype)


def one_bulk(nbytes: int, n_tensors: int = 1) -> Workload:
    """Return a workload without computing: *n_tensors* gradients of *nbytes* in all, ready at once."""
    if nbytes < 4 * n_tensors or n_tensors < 1:
        raise ConfigError(f"{nbytes} bytes cannot be spread over {n_tensors} tensors of float32")
    n = nbytes // 4
    sizes = [n // n_tensors + (i < n % n_tensors) for i in range(n_tensors)]
    shapes = {f"t{i:05}": (size,) for i, size in enumerate(sizes)}
    return workload("bulk", [Layer("all", 0.0, 0.0, tuple(shapes))], shapes)


class PartitionedWorkload(NamedTuple):
    """The job's own plan of a workload: units with partitions, and the layers that make and need each unit."""

    units: list[UnitPlan]
    units_of_layer: list[list[int]]
    layers_of_unit: list[int]


def partitioned(job: Workload, partition_nbytes: int, fusion_nbytes: int = 0) -> PartitionedWorkload:
    """Partition tensors as the scheduler does; *fusion_nbytes* 0: each alone (BytePS), else small ones form a group."""
    group = "small" if fusion_nbytes else None
    names = [tensor for layer in job.layers for tensor in layer.tensors]
    specs = [TensorSpec(name=name, dtype=job.dtype, shape=tuple(job.shapes[name]), group=group) for name in names]
    units = plan_units(specs, 0, 0, partition_nbytes, fusion_nbytes)
    unit_of = {member.name: unit.unit for unit in units for member in unit.members}
    units_of_layer = [sorted({unit_of[tensor] for tensor in layer.tensors} - {u.unit for u in units if not u.parts})
                      for layer in job.layers]
    n_layers = Counter(unit for of_layer in units_of_layer for unit in of_layer)
    return PartitionedWorkload(units, units_of_layer, [n_layers[unit] for unit in range(len(units))])

#: Models of BytePS's figures, or similar ones.
MODELS = ("resnet50", "vgg16", "transformer", "bert-large", "gpt2", "ugatit")
#: Tensors that BytePS's figures train besides: they state 387M parameters of BERT-large, more than with one matrix
#: for input and output words.
_BESIDES: dict[str, Shapes] = {"bert-large": {"words.decoder.weight": (30522, 1024)}}
_LOOKUPS = ("embedding.weight", "embeddings.word.weight", "embeddings.position.weight", "embeddings.segment.weight",
            "wte.weight", "wpe.weight")
#: Pixels per side of the input of convolutions with such names; the first match counts, else `_SIDE`.
_SIDES: dict[str, tuple[tuple[str, int], ...]] = {
    "vgg16": (("conv10.", 28), ("conv11.", 14), ("conv12.", 14), ("conv13.", 14), ("conv1.", 224), ("conv2.", 224),
              ("conv3.", 112), ("conv4.", 112), ("conv5.", 56), ("conv6.", 56), ("conv7.", 56), ("conv8.", 28),
              ("conv9.", 28)),
    "resnet50": (("conv1.", 112), ("layer1.", 56), ("layer2.", 28), ("layer3.", 14), ("layer4.", 7)),
}
_SIDE = 64
#: A generator of U-GAT-IT is used three times per step, of six passes in all: its gradients are complete only in the
#: backward pass of the first use, the last third of the computing.
_LATE = {"ugatit": 1 / 3}


def shapes_of(model: str) -> Shapes:
    """Return name -> shape of *model*, one of `MODELS`."""
    return catalog.MODELS[model]() | _BESIDES.get(model, {})


def build(model: str, compute_s: float, backward_share: float = 2 / 3) -> Workload:
    """Return *model* with *compute_s* per step, *backward_share* of it backward; raise `ConfigError` if invalid."""
    if model not in MODELS:
        raise ConfigError(f"model {model!r} is unknown to the simulator; known: {', '.join(sorted(MODELS))}")
    if not compute_s >= 0 or not 0 <= backward_share <= 1:
        raise ConfigError(f"a step that computes {compute_s} s, {backward_share} of it backward, is invalid")
    shapes = shapes_of(model)
    stems: dict[str, list[str]] = {}
    for tensor in shapes:
        stems.setdefault(tensor.removesuffix(".weight").removesuffix(".bias"), []).append(tensor)
    costs = {stem: sum(_multiplications(model, tensor, shapes[tensor]) for tensor in tensors)
             for stem, tensors in stems.items()}
    total = sum(costs.values())
    late = _LATE.get(model, 1.0)
    layers = [Layer(stem, compute_s * late * (1 - backward_share) * costs[stem] / total,
                    compute_s * late * backward_share * costs[stem] / total, tuple(tensors))
              for stem, tensors in stems.items()]
    if late < 1:
        rest_s = compute_s * (1 - late)
        layers.append(Layer("later uses", rest_s * (1 - backward_share), rest_s * backward_share, ()))
    return workload(model, layers, shapes, catalog.load(model).dtype)


def _multiplications(model: str, tensor: str, shape: tuple[int, ...]) -> float:
    if len(shape) < 2 or tensor in _LOOKUPS:
        return 0.0
    if len(shape) == 2:
        return float(prod(shape))
    side = next((side for stem, side in _SIDES.get(model, ()) if tensor.startswith(stem)), _SIDE)
    return float(prod(shape) * side * side)
