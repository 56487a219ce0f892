"""VGG-16 and VGG-19: few tensors, most bytes in one of them (Simonyan and Zisserman, arXiv:1409.1556).

138,357,544 and 143,667,240 parameters, as torchvision's ``vgg16`` and ``vgg19`` have them (no normalisation).
"""
from __future__ import annotations

#: Name -> shape of every parameter, in forward order.
Shapes = dict[str, tuple[int, ...]]

#: Channels of the convolutions.
_VGG16 = (64, 64, 128, 128, *[256] * 3, *[512] * 6)
_VGG19 = (64, 64, 128, 128, *[256] * 4, *[512] * 8)
_CLASSES = 1000


def vgg16() -> Shapes:
    """Return name -> shape: 13 convolutions and 3 dense layers with biases."""
    return _vgg(_VGG16)


def vgg19() -> Shapes:
    """Return name -> shape: 16 convolutions and 3 dense layers with biases."""
    return _vgg(_VGG19)


def _vgg(channels: tuple[int, ...]) -> Shapes:
    shapes: Shapes = {}
    n_in = 3
    for i, n_out in enumerate(channels, start=1):
        shapes[f"conv{i}.weight"], shapes[f"conv{i}.bias"] = (n_out, n_in, 3, 3), (n_out,)
        n_in = n_out
    for i, (n_in, n_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, _CLASSES)), start=1):
        shapes[f"fc{i}.weight"], shapes[f"fc{i}.bias"] = (n_out, n_in), (n_out,)
    return shapes

_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width, bottleneck blocks
_BASIC_BLOCKS = ((64, 2), (128, 2), (256, 2), (512, 2))
_EXPANSION = 4


def resnet18() -> Shapes:
    """Return name -> shape: every convolution's weight, every normalisation's weight and bias, the classifier."""
    shapes: Shapes = {}
    _convolution(shapes, "conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(_BASIC_BLOCKS, start=1):
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            _convolution(shapes, f"{at}.conv1", f"{at}.bn1", n_in, width, 3)
            _convolution(shapes, f"{at}.conv2", f"{at}.bn2", width, width, 3)
            if n_in != width:
                _convolution(shapes, f"{at}.downsample.0", f"{at}.downsample.1", n_in, width, 1)
            n_in = width
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes


def resnet50() -> Shapes:
    """Return name -> shape, as `resnet18`."""
    shapes: Shapes = {}
    _convolution(shapes, "conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(_BLOCKS, start=1):
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            _convolution(shapes, f"{at}.conv1", f"{at}.bn1", n_in, width, 1)
            _convolution(shapes, f"{at}.conv2", f"{at}.bn2", width, width, 3)
            _convolution(shapes, f"{at}.conv3", f"{at}.bn3", width, width * _EXPANSION, 1)
            if block == 0:
                _convolution(shapes, f"{at}.downsample.0", f"{at}.downsample.1", n_in, width * _EXPANSION, 1)
            n_in = width * _EXPANSION
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes


def _convolution(shapes: Shapes, name: str, norm: str, n_in: int, n_out: int, kernel: int) -> None:
    shapes[f"{name}.weight"] = (n_out, n_in, kernel, kernel)
    shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (n_out,)

#: block -> channels of 1x1 (0: none), of the 3x3 and its reduction, of both double 3x3 and theirs, of the projection
_INCEPTION = {
    "3a": (64, 64, 64, 64, 96, 32), "3b": (64, 64, 96, 64, 96, 64), "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128), "4b": (192, 96, 128, 96, 128, 128), "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128), "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128), "5b": (352, 192, 320, 192, 224, 128),
}


def inception_bn() -> Shapes:
    """Return name -> shape: 69 convolutions with biases, each with its normalisation, and the classifier."""
    shapes: Shapes = {}

    def convolution(name: str, n_in: int, n_out: int, kernel: int) -> int:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (n_out, n_in, kernel, kernel), (n_out,)
        shapes[f"{name}.gamma"] = shapes[f"{name}.beta"] = (n_out,)
        return n_out

    n_in = convolution("1", 3, 64, 7)
    n_in = convolution("2", convolution("2_reduce", n_in, 64, 1), 192, 3)
    for block, (one, three_reduced, three, double_reduced, double, projected) in _INCEPTION.items():
        n_out = 0
        if one:
            n_out += convolution(f"{block}_1x1", n_in, one, 1)
        n_out += convolution(f"{block}_3x3", convolution(f"{block}_3x3_reduce", n_in, three_reduced, 1), three, 3)
        reduced = convolution(f"{block}_double_3x3_reduce", n_in, double_reduced, 1)
        reduced = convolution(f"{block}_double_3x3_0", reduced, double, 3)
        n_out += convolution(f"{block}_double_3x3_1", reduced, double, 3)
        # a block that halves the picture passes its input through a pooling instead of a projection
        n_in = n_out + (convolution(f"{block}_proj", n_in, projected, 1) if projected else n_in)
    shapes["fc.weight"], shapes["fc.bias"] = (_CLASSES, n_in), (_CLASSES,)
    return shapes

_TRANSFORMER_WORDS, _TRANSFORMER_WIDTH, _TRANSFORMER_INNER, _TRANSFORMER_N_LAYERS = 33708, 512, 2048, 6


def transformer() -> Shapes:
    """Return name -> shape: the shared embedding, the encoder, the decoder."""
    shapes: Shapes = {"embedding.weight": (_TRANSFORMER_WORDS, _TRANSFORMER_WIDTH)}

    def norm(name: str) -> None:
        shapes[f"{name}.scale"] = shapes[f"{name}.bias"] = (_TRANSFORMER_WIDTH,)

    def attention(name: str) -> None:
        norm(f"{name}.norm")
        for part in ("query", "key", "value", "output"):
            shapes[f"{name}.{part}"] = (_TRANSFORMER_WIDTH, _TRANSFORMER_WIDTH)

    for half, attentions in (("encoder", ("self",)), ("decoder", ("self", "encdec"))):
        for layer in range(_TRANSFORMER_N_LAYERS):
            at = f"{half}{layer}"
            for each in attentions:
                attention(f"{at}.{each}")
            norm(f"{at}.ffn.norm")
            shapes[f"{at}.ffn.inner.weight"], shapes[f"{at}.ffn.inner.bias"] = (_TRANSFORMER_WIDTH, _TRANSFORMER_INNER), (_TRANSFORMER_INNER,)
            shapes[f"{at}.ffn.outer.weight"], shapes[f"{at}.ffn.outer.bias"] = (_TRANSFORMER_INNER, _TRANSFORMER_WIDTH), (_TRANSFORMER_WIDTH,)
        norm(f"{half}.norm")
    return shapes

_BERT_WORDS, _BERT_POSITIONS, _BERT_SEGMENTS = 30522, 512, 2


def bert_base() -> Shapes:
    """Return name -> shape: 12 layers of width 768."""
    return _bert(12, 768)


def bert_large() -> Shapes:
    """Return name -> shape: 24 layers of width 1024."""
    return _bert(24, 1024)


def _bert(n_layers: int, width: int) -> Shapes:
    shapes: Shapes = {}

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)

    def dense(name: str, n_out: int, n_in: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (n_out, n_in), (n_out,)

    shapes["embeddings.word.weight"] = (_BERT_WORDS, width)
    shapes["embeddings.position.weight"] = (_BERT_POSITIONS, width)
    shapes["embeddings.segment.weight"] = (_BERT_SEGMENTS, width)
    norm("embeddings.norm")
    for layer in range(n_layers):
        at = f"layer{layer}"
        for part in ("query", "key", "value", "output"):
            dense(f"{at}.attention.{part}", width, width)
        norm(f"{at}.attention.norm")
        dense(f"{at}.intermediate", 4 * width, width)
        dense(f"{at}.output", width, 4 * width)
        norm(f"{at}.norm")
    dense("pooler", width, width)
    dense("words.transform", width, width)
    norm("words.norm")
    shapes["words.bias"] = (_BERT_WORDS,)
    dense("next_sentence", 2, width)
    return shapes

_GPT2_WORDS, _GPT2_POSITIONS, _GPT2_WIDTH, _GPT2_N_LAYERS = 50257, 1024, 768, 12


def gpt2() -> Shapes:
    """Return name -> shape: 12 layers of width 768; the weights of dense layers lie input first."""
    shapes: Shapes = {"wte.weight": (_GPT2_WORDS, _GPT2_WIDTH), "wpe.weight": (_GPT2_POSITIONS, _GPT2_WIDTH)}

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (_GPT2_WIDTH,)

    def dense(name: str, n_in: int, n_out: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (n_in, n_out), (n_out,)

    for layer in range(_GPT2_N_LAYERS):
        norm(f"h{layer}.ln_1")
        dense(f"h{layer}.attn.c_attn", _GPT2_WIDTH, 3 * _GPT2_WIDTH)
        dense(f"h{layer}.attn.c_proj", _GPT2_WIDTH, _GPT2_WIDTH)
        norm(f"h{layer}.ln_2")
        dense(f"h{layer}.mlp.c_fc", _GPT2_WIDTH, 4 * _GPT2_WIDTH)
        dense(f"h{layer}.mlp.c_proj", 4 * _GPT2_WIDTH, _GPT2_WIDTH)
    norm("ln_f")
    return shapes

_UGATIT_CHANNELS, _UGATIT_N_BLOCKS, _UGATIT_PIXELS = 64, 4, 256
#: Layers of the global and of the local discriminators.
_UGATIT_GLOBAL, _UGATIT_LOCAL = 7, 5


def ugatit(light: bool = False) -> Shapes:
    """Return name -> shape, generators first: one step trains both halves one after the other."""
    shapes: Shapes = {}
    for name in ("A2B", "B2A"):
        _generator(shapes, f"generator{name}", light)
    for name, n_layers in (("GA", _UGATIT_GLOBAL), ("GB", _UGATIT_GLOBAL), ("LA", _UGATIT_LOCAL), ("LB", _UGATIT_LOCAL)):
        _discriminator(shapes, f"discriminator{name}", n_layers)
    return shapes


def _generator(shapes: Shapes, at: str, light: bool) -> None:
    width = 4 * _UGATIT_CHANNELS
    shapes[f"{at}.down0"] = (_UGATIT_CHANNELS, 3, 7, 7)
    shapes[f"{at}.down1"] = (2 * _UGATIT_CHANNELS, _UGATIT_CHANNELS, 3, 3)
    shapes[f"{at}.down2"] = (width, 2 * _UGATIT_CHANNELS, 3, 3)
    for block in range(_UGATIT_N_BLOCKS):
        for i in (1, 2):
            shapes[f"{at}.down_block{block}.conv{i}"] = (width, width, 3, 3)
    _attention(shapes, at, width)
    shapes[f"{at}.fc1"] = (width, width if light else (_UGATIT_PIXELS // 4) ** 2 * width)
    for name in ("fc2", "gamma", "beta"):
        shapes[f"{at}.{name}"] = (width, width)
    for block in range(_UGATIT_N_BLOCKS):
        for i in (1, 2):
            shapes[f"{at}.up_block{block}.conv{i}"] = (width, width, 3, 3)
            shapes[f"{at}.up_block{block}.norm{i}.rho"] = (1, width, 1, 1)
    for i, n_out in ((1, 2 * _UGATIT_CHANNELS), (2, _UGATIT_CHANNELS)):
        shapes[f"{at}.up{i}"] = (n_out, 2 * n_out, 3, 3)
        for name in ("rho", "gamma", "beta"):
            shapes[f"{at}.up{i}.norm.{name}"] = (1, n_out, 1, 1)
    shapes[f"{at}.up3"] = (3, _UGATIT_CHANNELS, 7, 7)


def _discriminator(shapes: Shapes, at: str, n_layers: int) -> None:
    n_in, n_out = 3, _UGATIT_CHANNELS
    for layer in range(n_layers - 1):
        shapes[f"{at}.conv{layer}.weight"], shapes[f"{at}.conv{layer}.bias"] = (n_out, n_in, 4, 4), (n_out,)
        n_in, n_out = n_out, 2 * n_out
    _attention(shapes, at, n_in)
    shapes[f"{at}.conv"] = (1, n_in, 4, 4)


def _attention(shapes: Shapes, at: str, width: int) -> None:
    """The class activation map: two logits from pooled channels, and the 1x1 convolution that joins both halves."""
    shapes[f"{at}.gap_fc"] = shapes[f"{at}.gmp_fc"] = (1, width)
    shapes[f"{at}.conv1x1.weight"], shapes[f"{at}.conv1x1.bias"] = (width, 2 * width, 1, 1), (width,)
