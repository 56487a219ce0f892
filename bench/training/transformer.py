"""The Transformer for translation (Vaswani et al., arXiv:1706.03762), normalised before each part, as TensorFlow's is.

One embedding is both languages' and the output's; attention has no biases; places are sines.
"""
from __future__ import annotations

import torch
from torch import nn

from bpsfast.bench.training.attention import Attention, cross_entropy, embedding, feed_forward


class Layer(nn.Module):
    """One layer of the encoder, or of the decoder, which looks at the encoder's result besides."""

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
    """*n_layers* in either half."""

    def __init__(self, n_words: int, width: int, n_heads: int, inner: int, n_layers: int) -> None:
        super().__init__()
        self._width = width
        self.words = embedding(n_words, width)
        self.encoder = nn.ModuleList(Layer(width, n_heads, inner, False) for _ in range(n_layers))
        self.decoder = nn.ModuleList(Layer(width, n_heads, inner, True) for _ in range(n_layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of saying *y* again (batch, length) in another language, having read *x*."""
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
    """Return what the decoder has said before each word: word 0, then all but the last."""
    return torch.nn.functional.pad(words[:, :-1], (1, 0))
