"""Known models as chains of layers: what each makes, and how its computing divides over the chain.

Computing is divided by multiplications: of a convolution its weights times the pixels it is applied to, of a dense
layer or a block of a transformer its weights; looking words up costs nothing. Shapes in forward order; counts are those
of the published implementations (VGG-16 138.4M, ResNet-50 25.6M, Transformer 61M, BERT-large 387M with the output
layer of pre-training untied as in BytePS's figures, GPT-2 124M, U-GAT-IT 671M, of which 80 % are two dense layers).
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from ..models.resnet import resnet50
from ..orchestration.errors import ConfigError
from .workload import Layer, Workload, workload

Shapes = dict[str, tuple[int, ...]]

_VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def _vgg16() -> Shapes:
    shapes: Shapes = {}
    n_in = 3
    for stage, widths in enumerate(_VGG16):
        for i, n_out in enumerate(widths):
            shapes[f"conv{stage}_{i}.weight"], shapes[f"conv{stage}_{i}.bias"] = (n_out, n_in, 3, 3), (n_out,)
            n_in = n_out
    for i, (rows, columns) in enumerate(((4096, 25088), (4096, 4096), (1000, 4096)), start=1):
        shapes[f"fc{i}.weight"], shapes[f"fc{i}.bias"] = (rows, columns), (rows,)
    return shapes


def _block(shapes: Shapes, at: str, width: int, inner: int, attentions: int = 1) -> None:
    for attention in range(attentions):
        for name in ("q", "k", "v", "out"):
            shapes[f"{at}.a{attention}.{name}.weight"] = (width, width)
            shapes[f"{at}.a{attention}.{name}.bias"] = (width,)
        shapes[f"{at}.norm{attention}.weight"] = shapes[f"{at}.norm{attention}.bias"] = (width,)
    shapes[f"{at}.up.weight"], shapes[f"{at}.up.bias"] = (inner, width), (inner,)
    shapes[f"{at}.down.weight"], shapes[f"{at}.down.bias"] = (width, inner), (width,)
    shapes[f"{at}.norm.weight"] = shapes[f"{at}.norm.bias"] = (width,)


def _transformer() -> Shapes:
    shapes: Shapes = {"embedding.lookup": (33708, 512)}
    for i in range(6):
        _block(shapes, f"encoder{i}", 512, 2048)
    for i in range(6):
        _block(shapes, f"decoder{i}", 512, 2048, attentions=2)
    return shapes


def _bert_large() -> Shapes:
    shapes: Shapes = {"embedding.lookup": (30522, 1024), "position.lookup": (512, 1024)}
    for i in range(24):
        _block(shapes, f"layer{i}", 1024, 4096)
    shapes["pooler.weight"], shapes["transform.weight"] = (1024, 1024), (1024, 1024)
    shapes["decoder.weight"] = (30522, 1024)
    return shapes


def _gpt2() -> Shapes:
    shapes: Shapes = {"embedding.lookup": (50257, 768), "position.lookup": (1024, 768)}
    for i in range(12):
        _block(shapes, f"layer{i}", 768, 3072)
    return shapes


def _ugatit() -> Shapes:
    shapes: Shapes = {}
    for name in ("A2B", "B2A"):
        for i, shape in enumerate(((64, 3, 7, 7), (128, 64, 3, 3), (256, 128, 3, 3))):
            shapes[f"{name}.down{i}.weight"] = shape
        for i in range(8):
            shapes[f"{name}.down_block{i}.weight"] = (256, 256, 3, 3)
        shapes[f"{name}.fc.weight"] = (256, 256 * 64 * 64)
        for i in range(8):
            shapes[f"{name}.up_block{i}.weight"] = (256, 256, 3, 3)
        for i, shape in enumerate(((128, 256, 3, 3), (64, 128, 3, 3), (3, 64, 7, 7))):
            shapes[f"{name}.up{i}.weight"] = shape
    for name, n_layers in (("GA", 6), ("GB", 6), ("LA", 4), ("LB", 4)):
        n_in = 3
        for i in range(n_layers):
            shapes[f"D{name}.conv{i}.weight"] = (64 << i, n_in, 4, 4)
            n_in = 64 << i
    return shapes


#: name -> function that returns name -> shape.
MODELS: Mapping[str, Callable[[], Shapes]] = {
    "resnet50": resnet50, "vgg16": _vgg16, "transformer": _transformer, "bert-large": _bert_large, "gpt2": _gpt2,
    "ugatit": _ugatit,
}
#: Gradients that travel as float16 in BytePS's figures: its ideal time of BERT-large says so.
_HALF = ("bert-large",)
#: Pixels on a side that a convolution of this name is applied to; the first match counts.
_SIDES = (("conv0_", 224), ("conv1_", 112), ("conv2_", 56), ("conv3_", 28), ("conv4_", 14), ("conv1", 112),
          ("layer1", 56), ("layer2", 28), ("layer3", 14), ("layer4", 7))
#: A generator of U-GAT-IT is used three times a step, of six passes in all: no gradient of it is complete before the
#: backward of the first use, the last third of the computing.
_LATE = {"ugatit": 1 / 3}


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
    shapes = MODELS[model]()
    stems: dict[str, list[str]] = {}
    for tensor in shapes:
        stems.setdefault(tensor.rsplit(".", 1)[0] if not tensor.endswith("lookup") else tensor, []).append(tensor)
    costs = {stem: sum(_multiplications(tensor, shapes[tensor]) for tensor in tensors)
             for stem, tensors in stems.items()}
    total = sum(costs.values())
    late = _LATE.get(model, 1.0)
    layers = [Layer(stem, compute_s * late * (1 - backward_share) * costs[stem] / total,
                    compute_s * late * backward_share * costs[stem] / total, tuple(tensors))
              for stem, tensors in stems.items()]
    if late < 1:
        rest_s = compute_s * (1 - late)
        layers.append(Layer("later uses", rest_s * (1 - backward_share), rest_s * backward_share, ()))
    return workload(model, layers, shapes, "float16" if model in _HALF else "float32")


def _multiplications(tensor: str, shape: tuple[int, ...]) -> float:
    if len(shape) < 2 or tensor.endswith("lookup"):
        return 0.0
    if len(shape) == 2:
        return float(prod(shape))
    side = next((side for stem, side in _SIDES if tensor.startswith(stem)), 64)
    return float(prod(shape) * side * side)
