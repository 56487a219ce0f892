"""The parameter shapes of the planner's built-in networks: name -> shape of every parameter, in forward order.

Parameter counts are those of the implementation that each function names.
"""
from __future__ import annotations

#: Name -> shape of every parameter, in forward order.
Shapes = dict[str, tuple[int, ...]]

#: Channels of the convolutions.
_VGG16 = (64, 64, 128, 128, *[256] * 3, *[512] * 6)
_VGG19 = (64, 64, 128, 128, *[256] * 4, *[512] * 8)
_CLASSES = 1000
#: Blocks of the residual networks: width, number.
_BOTTLENECK_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))
_BASIC_BLOCKS = ((64, 2), (128, 2), (256, 2), (512, 2))
#: Block -> channels of 1x1 (0: none), of the 3x3 and its reduction, of both double 3x3 and theirs, of the projection.
_INCEPTION = {
    "3a": (64, 64, 64, 64, 96, 32), "3b": (64, 64, 96, 64, 96, 64), "3c": (0, 128, 160, 64, 96, 0),
    "4a": (224, 64, 96, 96, 128, 128), "4b": (192, 96, 128, 96, 128, 128), "4c": (160, 128, 160, 128, 160, 128),
    "4d": (96, 128, 192, 160, 192, 128), "4e": (0, 128, 192, 192, 256, 0),
    "5a": (352, 192, 320, 160, 224, 128), "5b": (352, 192, 320, 192, 224, 128),
}
_BERT_WORDS, _BERT_POSITIONS, _BERT_SEGMENTS = 30522, 512, 2
_UGATIT_CHANNELS, _UGATIT_BLOCKS, _UGATIT_PIXELS = 64, 4, 256


def _affine(shapes: Shapes, name: str, shape: tuple[int, ...], n_out: int) -> None:
    """Add a weight of *shape*, and the bias of its *n_out* outputs."""
    shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, (n_out,)


def _norm(shapes: Shapes, name: str, width: int) -> None:
    shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)


def vgg16() -> Shapes:
    """Return VGG-16 (arXiv:1409.1556): few tensors, most bytes in one of them.

    138,357,544 parameters, as torchvision's ``vgg16`` has (no normalization): 13 convolutions and 3 dense layers.
    """
    return _vgg(_VGG16)


def vgg19() -> Shapes:
    """Return VGG-19: 143,667,240 parameters, as torchvision's ``vgg19`` has."""
    return _vgg(_VGG19)


def _vgg(channels: tuple[int, ...]) -> Shapes:
    shapes: Shapes = {}
    for i, (n_in, n_out) in enumerate(zip((3, *channels), channels), start=1):
        _affine(shapes, f"conv{i}", (n_out, n_in, 3, 3), n_out)
    for i, (n_in, n_out) in enumerate(((512 * 7 * 7, 4096), (4096, 4096), (4096, _CLASSES)), start=1):
        _affine(shapes, f"fc{i}", (n_out, n_in), n_out)
    return shapes


def resnet18() -> Shapes:
    """Return ResNet-18 (arXiv:1512.03385): 11,689,512 parameters in 62 mostly tiny tensors, as torchvision's."""
    return _resnet(_BASIC_BLOCKS, (3, 3), 1)


def resnet50() -> Shapes:
    """Return ResNet-50: 25,557,032 parameters in 161 tensors, as torchvision's ``resnet50`` has."""
    return _resnet(_BOTTLENECK_BLOCKS, (1, 3, 1), 4)


def _resnet(layers: tuple[tuple[int, int], ...], kernels: tuple[int, ...], expansion: int) -> Shapes:
    """Return a residual network whose blocks have convolutions of *kernels*, the last one with more channels."""
    shapes: Shapes = {}

    def convolution(name: str, norm: str, n_in: int, n_out: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (n_out, n_in, kernel, kernel)
        _norm(shapes, norm, n_out)

    convolution("conv1", "bn1", 3, 64, 7)
    n_in = 64
    for layer, (width, n_blocks) in enumerate(layers, start=1):
        n_out = width * expansion
        for block in range(n_blocks):
            at = f"layer{layer}.{block}"
            inner = (n_in, *[width] * (len(kernels) - 1), n_out)
            for i, kernel in enumerate(kernels, start=1):
                convolution(f"{at}.conv{i}", f"{at}.bn{i}", inner[i - 1], inner[i], kernel)
            if n_in != n_out:
                convolution(f"{at}.downsample.0", f"{at}.downsample.1", n_in, n_out, 1)
            n_in = n_out
    _affine(shapes, "fc", (_CLASSES, n_in), _CLASSES)
    return shapes


def inception_bn() -> Shapes:
    """Return Inception-BN (arXiv:1502.03167): 278 tensors, hardly a large one.

    11,295,240 parameters, as MXNet's example ``image-classification/symbols/inception-bn.py`` builds it: convolutions
    have biases beside their normalization.
    """
    shapes: Shapes = {}

    def convolution(name: str, n_in: int, n_out: int, kernel: int) -> int:
        _affine(shapes, name, (n_out, n_in, kernel, kernel), n_out)
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
        # a block that halves the image passes its input through pooling instead of a projection
        n_in = n_out + (convolution(f"{block}_proj", n_in, projected, 1) if projected else n_in)
    _affine(shapes, "fc", (_CLASSES, n_in), _CLASSES)
    return shapes


def transformer() -> Shapes:
    """Return the translation transformer "base" (arXiv:1706.03762): 6 + 6 layers of width 512.

    61,362,176 parameters, counted from the configuration of TensorFlow's official model, which BytePS's artifact
    trains: 33,708 subwords in one embedding for both languages and the output, no biases in attention. The paper prints
    65M for 37,000 subwords; no exact number is published. "Base", because the authors' 19.5 ms at 100 Gbit/s are the
    float32 bytes of 60.9M parameters, a third of "big".
    """
    words, width, inner, n_layers = 33708, 512, 2048, 6
    shapes: Shapes = {"embedding.weight": (words, width)}

    def norm(name: str) -> None:
        shapes[f"{name}.scale"] = shapes[f"{name}.bias"] = (width,)

    for half, attentions in (("encoder", ("self",)), ("decoder", ("self", "encdec"))):
        for layer in range(n_layers):
            at = f"{half}{layer}"
            for each in attentions:
                norm(f"{at}.{each}.norm")
                for part in ("query", "key", "value", "output"):
                    shapes[f"{at}.{each}.{part}"] = (width, width)
            norm(f"{at}.ffn.norm")
            _affine(shapes, f"{at}.ffn.inner", (width, inner), inner)
            _affine(shapes, f"{at}.ffn.outer", (inner, width), width)
        norm(f"{half}.norm")
    return shapes


def bert_base() -> Shapes:
    """Return BERT-base for pre-training (arXiv:1810.04805): 12 layers of width 768.

    110,106,428 parameters with 30,522 lower-case word pieces, as ``transformers.BertForPreTraining`` has: the weight of
    the decoder is the word embedding. The paper rounds to 110M.
    """
    return _bert(12, 768)


def bert_large() -> Shapes:
    """Return BERT-large: 24 layers of width 1024, 336,226,108 parameters (340M in the paper)."""
    return _bert(24, 1024)


def _bert(n_layers: int, width: int) -> Shapes:
    shapes: Shapes = {"embeddings.word.weight": (_BERT_WORDS, width),
                      "embeddings.position.weight": (_BERT_POSITIONS, width),
                      "embeddings.segment.weight": (_BERT_SEGMENTS, width)}

    def dense(name: str, n_out: int, n_in: int) -> None:
        _affine(shapes, name, (n_out, n_in), n_out)

    _norm(shapes, "embeddings.norm", width)
    for layer in range(n_layers):
        at = f"layer{layer}"
        for part in ("query", "key", "value", "output"):
            dense(f"{at}.attention.{part}", width, width)
        _norm(shapes, f"{at}.attention.norm", width)
        dense(f"{at}.intermediate", 4 * width, width)
        dense(f"{at}.output", width, 4 * width)
        _norm(shapes, f"{at}.norm", width)
    dense("pooler", width, width)
    dense("words.transform", width, width)
    _norm(shapes, "words.norm", width)
    shapes["words.bias"] = (_BERT_WORDS,)
    dense("next_sentence", 2, width)
    return shapes


def gpt2() -> Shapes:
    """Return GPT-2 (Radford et al., 2019) in the smallest of its four sizes: 12 layers of width 768.

    124,439,808 parameters, as ``transformers.GPT2LMHeadModel("gpt2")`` has: the weight of the output is the word
    embedding. The OSDI paper does not print its size; its artifact names the checkpoint "gpt2". Dense weights are
    (inputs, outputs).
    """
    words, positions, width, n_layers = 50257, 1024, 768, 12
    shapes: Shapes = {"wte.weight": (words, width), "wpe.weight": (positions, width)}

    for layer in range(n_layers):
        _norm(shapes, f"h{layer}.ln_1", width)
        _affine(shapes, f"h{layer}.attn.c_attn", (width, 3 * width), 3 * width)
        _affine(shapes, f"h{layer}.attn.c_proj", (width, width), width)
        _norm(shapes, f"h{layer}.ln_2", width)
        _affine(shapes, f"h{layer}.mlp.c_fc", (width, 4 * width), 4 * width)
        _affine(shapes, f"h{layer}.mlp.c_proj", (4 * width, width), width)
    _norm(shapes, "ln_f", width)
    return shapes


def ugatit(light: bool = False) -> Shapes:
    """Return U-GAT-IT (arXiv:1907.10830): two generators, then four discriminators; a step trains one half at a time.

    670,761,088 parameters, counted from the authors' PyTorch code with its defaults (full version, 256 x 256 pixels, 64
    channels, 4 residual blocks), which BytePS's artifact trains. No exact number is published; the light version counts
    21.2M + 112.8M, as a later paper prints (arXiv:2003.00273). Four fifths are two dense layers of 1.07 GB each.
    """
    shapes: Shapes = {}
    for name in ("A2B", "B2A"):
        _generator(shapes, f"generator{name}", light)
    for name, n_layers in (("GA", 7), ("GB", 7), ("LA", 5), ("LB", 5)):  # global and local ones
        _discriminator(shapes, f"discriminator{name}", n_layers)
    return shapes


def _generator(shapes: Shapes, at: str, light: bool) -> None:
    width = 4 * _UGATIT_CHANNELS
    shapes[f"{at}.down0"] = (_UGATIT_CHANNELS, 3, 7, 7)
    shapes[f"{at}.down1"] = (2 * _UGATIT_CHANNELS, _UGATIT_CHANNELS, 3, 3)
    shapes[f"{at}.down2"] = (width, 2 * _UGATIT_CHANNELS, 3, 3)
    for block in range(_UGATIT_BLOCKS):
        for i in (1, 2):
            shapes[f"{at}.down_block{block}.conv{i}"] = (width, width, 3, 3)
    _attention(shapes, at, width)
    shapes[f"{at}.fc1"] = (width, width if light else (_UGATIT_PIXELS // 4) ** 2 * width)
    for name in ("fc2", "gamma", "beta"):
        shapes[f"{at}.{name}"] = (width, width)
    for block in range(_UGATIT_BLOCKS):
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
        _affine(shapes, f"{at}.conv{layer}", (n_out, n_in, 4, 4), n_out)
        n_in, n_out = n_out, 2 * n_out
    _attention(shapes, at, n_in)
    shapes[f"{at}.conv"] = (1, n_in, 4, 4)


def _attention(shapes: Shapes, at: str, width: int) -> None:
    """Add the class activation map: two logits from pooled channels, and the 1x1 convolution that joins both halves."""
    shapes[f"{at}.gap_fc"] = shapes[f"{at}.gmp_fc"] = (1, width)
    _affine(shapes, f"{at}.conv1x1", (width, 2 * width, 1, 1), width)
