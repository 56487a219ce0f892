"""The built-in models as chains of layers: how their computing divides over the chain.

Computing is divided by multiplications: of a convolution its weights times the pixels it is applied to, of a dense
layer or a block of a transformer its weights; looking words up costs nothing.
"""
from __future__ import annotations

from math import prod

from ...orchestration.errors import ConfigError
from ..planner import catalog
from ..planner.model_shapes import Shapes
from .workload import Layer, Workload, workload

#: Models of BytePS's figures, or like them.
MODELS = ("resnet50", "vgg16", "transformer", "bert-large", "gpt2", "ugatit")
#: What BytePS's figures train besides: 387M parameters are said of BERT-large, more than with one matrix for words that
#: come in and words that go out.
_BESIDES: dict[str, Shapes] = {"bert-large": {"words.decoder.weight": (30522, 1024)}}
_LOOKUPS = ("embedding.weight", "embeddings.word.weight", "embeddings.position.weight", "embeddings.segment.weight",
            "wte.weight", "wpe.weight")
#: Pixels on a side that a convolution of this name is applied to; the first match counts, else `_SIDE`.
_SIDES: dict[str, tuple[tuple[str, int], ...]] = {
    "vgg16": (("conv10.", 28), ("conv11.", 14), ("conv12.", 14), ("conv13.", 14), ("conv1.", 224), ("conv2.", 224),
              ("conv3.", 112), ("conv4.", 112), ("conv5.", 56), ("conv6.", 56), ("conv7.", 56), ("conv8.", 28),
              ("conv9.", 28)),
    "resnet50": (("conv1.", 112), ("layer1.", 56), ("layer2.", 28), ("layer3.", 14), ("layer4.", 7)),
}
_SIDE = 64
#: A generator of U-GAT-IT is used three times a step, of six passes in all: no gradient of it is complete before the
#: backward of the first use, the last third of the computing.
_LATE = {"ugatit": 1 / 3}


def shapes_of(model: str) -> Shapes:
    """Return name -> shape of *model*, one of `MODELS`."""
    return catalog.MODELS[model]() | _BESIDES.get(model, {})


def build(model: str, compute_s: float, backward_share: float = 2 / 3) -> Workload:
    """Return *model* with *compute_s* of computing a step, *backward_share* of it backward.

    Raises
    ------
    ConfigError
        If the model is unknown or a time makes no sense.
    """
    if model not in MODELS:
        raise ConfigError(f"model {model!r} is unknown to the simulator; known: {', '.join(sorted(MODELS))}")
    if not compute_s >= 0 or not 0 <= backward_share <= 1:
        raise ConfigError(f"a step that computes {compute_s} s, {backward_share} of it backward, makes no sense")
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
