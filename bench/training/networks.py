"""The networks that `bench model` trains, in torch.

    Transformer    translation (Vaswani et al., arXiv:1706.03762), pre-norm as in TensorFlow. One embedding serves both
                   languages and the output; attention has no biases; positions are sines
    Bert           pre-training with masked words and next sentences (Devlin et al., arXiv:1810.04805)
    Gpt2           prediction of each next word (Radford et al., 2019)
    Vgg            without normalisation (Simonyan and Zisserman, arXiv:1409.1556)
    ResNet         bottleneck blocks (He et al., arXiv:1512.03385), stride in the 3x3 convolution, as in torchvision
    GradientList   gradients of real sizes without a real computation
"""
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional

from bpsfast.tools.planner.model_shapes import Shapes

#: Initial weights of an embedding, with a standard deviation of 0.02.
_LARGEST_WEIGHT = 0.035


class Attention(nn.Module):
    """Attention of *n_heads* heads over tensors (batch, length, width)."""

    def __init__(self, width: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self._n_heads = n_heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor, of: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Return the attention of *x* to *of* (default: *x*); *causal*: each position sees only earlier ones."""
        source = x if of is None else of
        query, key, value = (part(where).unflatten(-1, (self._n_heads, -1)).transpose(1, 2)
                             for part, where in ((self.query, x), (self.key, source), (self.value, source)))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.output(found.transpose(1, 2).flatten(-2))


def feed_forward(width: int, inner: int, activation: nn.Module) -> nn.Sequential:
    """Return the two dense layers of a block."""
    return nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))


def embedding(n: int, width: int) -> nn.Embedding:
    """Return an embedding whose weights are small enough for use as the output layer, too."""
    return nn.Embedding.from_pretrained(torch.empty(n, width).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT), freeze=False)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of (..., classes) for labels (...); labels of -100 do not count."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())


class TransformerLayer(nn.Module):
    """One layer of the encoder, or of the decoder, which also attends to the encoder's result."""

    def __init__(self, width: int, n_heads: int, inner: int, is_decoder: bool) -> None:
        super().__init__()
        self._is_decoder = is_decoder
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3 if is_decoder else 2))
        self.attentions = nn.ModuleList(Attention(width, n_heads, bias=False) for _ in range(1 + is_decoder))
        self.feed = feed_forward(width, inner, nn.ReLU())

    def forward(self, x: torch.Tensor, encoded: torch.Tensor | None = None) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        x = x + self.attentions[0](self.norms[0](x), causal=self._is_decoder)
        if self._is_decoder:
            x = x + self.attentions[1](self.norms[1](x), encoded)
        return x + self.feed(self.norms[-1](x))


class Transformer(nn.Module):
    """The encoder and the decoder have *n_layers* each."""

    def __init__(self, n_words: int, width: int, n_heads: int, inner: int, n_layers: int) -> None:
        super().__init__()
        self._width = width
        self.words = embedding(n_words, width)
        self.encoder = nn.ModuleList(TransformerLayer(width, n_heads, inner, False) for _ in range(n_layers))
        self.decoder = nn.ModuleList(TransformerLayer(width, n_heads, inner, True) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of translating *x* into *y* (batch, length)."""
        encoded = self._placed(x)
        for layer in self.encoder:
            encoded = layer(encoded)
        encoded = self.norms[0](encoded)
        decoded = self._placed(shifted(y))
        for layer in self.decoder:
            decoded = layer(decoded, encoded)
        return cross_entropy(self.norms[1](decoded) @ self.words.weight.T, y)

    def _placed(self, words: torch.Tensor) -> torch.Tensor:
        places = torch.arange(words.shape[1], device=words.device, dtype=torch.float32)[:, None]
        waves = torch.arange(self._width // 2, device=words.device) * (-2 / self._width)
        angles = places * 10000.0**waves
        return self.words(words) * self._width**0.5 + torch.cat((angles.sin(), angles.cos()), -1)


def shifted(words: torch.Tensor) -> torch.Tensor:
    """Return the decoder's input: word 0, then all words except the last."""
    return torch.nn.functional.pad(words[:, :-1], (1, 0))


#: One word of this many is masked (15 %), at the same positions in every sentence.
_MASK_EVERY, _MASK_WORD = 7, 103


class BertLayer(nn.Module):
    """One post-norm layer."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, n_heads), nn.LayerNorm(width)
        self.feed, self.last_norm = feed_forward(width, 4 * width, nn.GELU()), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        x = self.norm(x + self.attention(x))
        return self.last_norm(x + self.feed(x))


class Bert(nn.Module):
    """BERT; the large one has 30,522 words, 512 positions, width 1024, 16 heads, 24 layers."""

    def __init__(self, n_words: int, n_places: int, width: int, n_heads: int, n_layers: int) -> None:
        super().__init__()
        self.words, self.places = embedding(n_words, width), embedding(n_places, width)
        self.segments = embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(BertLayer(width, n_heads) for _ in range(n_layers)))
        self.pooler, self.next_sentence = nn.Linear(width, width), nn.Linear(width, 2)
        self.transform, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(n_words))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss for the masked words of *x* (batch, length), given in *y*, and the order of its halves."""
        length = x.shape[1]
        at = torch.arange(length, device=x.device)
        masked = at % _MASK_EVERY == _MASK_EVERY // 2
        words = x.masked_fill(masked, _MASK_WORD)
        found = self.layers(self.norm(self.words(words) + self.places(at) + self.segments((at >= length // 2).long())))
        heads = self.last_norm(functional.gelu(self.transform(found[:, masked])))
        loss = cross_entropy(heads @ self.words.weight.T + self.bias, y[:, masked])
        follows = self.next_sentence(self.pooler(found[:, 0]).tanh())
        return loss + functional.cross_entropy(follows, torch.zeros_like(y[:, 0]))


class Gpt2Layer(nn.Module):
    """One pre-norm layer."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        self.last_norm, self.feed = nn.LayerNorm(width), feed_forward(width, 4 * width, nn.GELU("tanh"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        x = x + self.attention(self.norm(x), causal=True)
        return x + self.feed(self.last_norm(x))


class Gpt2(nn.Module):
    """GPT-2; the smallest published one has 50,257 words, 1,024 positions, width 768, 12 heads, 12 layers."""

    def __init__(self, n_words: int, n_places: int, width: int, n_heads: int, n_layers: int) -> None:
        super().__init__()
        self.words, self.places = embedding(n_words, width), embedding(n_places, width)
        self.layers = nn.Sequential(*(Gpt2Layer(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next word *y* from *x* (batch, length) up to there."""
        at = torch.arange(x.shape[1], device=x.device)
        found = self.norm(self.layers(self.words(x) + self.places(at)))
        return cross_entropy(found[:, :-1] @ self.words.weight.T, y[:, 1:])


class Vgg(nn.Module):
    """Convolutions in *stages*, then dense layers of width *inner*, for images of *pixels* x *pixels*."""

    def __init__(self, stages: Sequence[Sequence[int]], inner: int, pixels: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        n_in = 3
        for stage in stages:
            for n_out in stage:
                layers += [nn.Conv2d(n_in, n_out, 3, padding=1), nn.ReLU()]
                n_in = n_out
            layers.append(nn.MaxPool2d(2))
        side = pixels >> len(stages)
        self.layers = nn.Sequential(
            *layers, nn.Flatten(), nn.Linear(n_in * side * side, inner), nn.ReLU(), nn.Dropout(),
            nn.Linear(inner, inner), nn.ReLU(), nn.Dropout(), nn.Linear(inner, n_classes))
        for layer in self.layers:
            if isinstance(layer, nn.Conv2d):  # otherwise the output of thirteen layers vanishes
                nn.init.kaiming_uniform_(layer.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of images (batch, 3, pixels, pixels) for labels (batch,)."""
        return functional.cross_entropy(self.layers(x), y)


_EXPANSION = 4


class Bottleneck(nn.Module):
    """One block: 1x1, 3x3, 1x1."""

    def __init__(self, n_in: int, width: int, stride: int) -> None:
        super().__init__()
        n_out = width * _EXPANSION
        self.convolutions = nn.Sequential(
            *_convolution(n_in, width, 1), nn.ReLU(), *_convolution(width, width, 3, stride), nn.ReLU(),
            *_convolution(width, n_out, 1))
        self.shortcut = nn.Sequential() if n_in == n_out and stride == 1 else nn.Sequential(
            *_convolution(n_in, n_out, 1, stride))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, n_in, height, width) to (batch, width * 4, height, width)."""
        return functional.relu(self.convolutions(x) + self.shortcut(x))


class ResNet(nn.Module):
    """Four stages of *n_blocks* each, the first *width* wide; ResNet-50 is (3, 4, 6, 3), 64."""

    def __init__(self, n_blocks: Sequence[int], width: int, n_classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        n_in = width
        for stage, n in enumerate(n_blocks):
            for block in range(n):
                layers.append(Bottleneck(n_in, width << stage, 2 if stage and not block else 1))
                n_in = (width << stage) * _EXPANSION
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n_in, n_classes))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of images (batch, 3, height, width) for labels (batch,)."""
        return functional.cross_entropy(self.layers(x), y)


def _convolution(n_in: int, n_out: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(n_in, n_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(n_out)


class GradientList(nn.Module):
    """Parameters of the given *shapes*, each read once in forward and written once in backward.

    It stands for U-GAT-IT, whose generators and discriminators train in turns, and has the same gradients to
    communicate: 671 million parameters, four fifths of them in two layers.
    """

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.full(shape, 0.1)) for shape in shapes.values())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return a loss whose gradients depend on the images *x*; *y* is unused."""
        loss = x.mean().abs()
        for weight in self.weights:
            loss = loss * (1 + weight.mean() ** 2)
        return loss
