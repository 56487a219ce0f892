"""GPT-2 (Radford et al., 2019): each word from those before it."""
from __future__ import annotations

import torch
from torch import nn

from bpsfast.bench.training.attention import Attention, cross_entropy, embedding, feed_forward


class Layer(nn.Module):
    """One layer, normalised before each part."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, n_heads)
        self.last_norm, self.feed = nn.LayerNorm(width), feed_forward(width, 4 * width, nn.GELU("tanh"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        x = x + self.attention(self.norm(x), causal=True)
        return x + self.feed(self.last_norm(x))


class Gpt2(nn.Module):
    """The smallest of the published is 50,257 words, 1,024 places, width 768, 12 heads, 12 layers."""

    def __init__(self, n_words: int, n_places: int, width: int, n_heads: int, n_layers: int) -> None:
        super().__init__()
        self.words, self.places = embedding(n_words, width), embedding(n_places, width)
        self.layers = nn.Sequential(*(Layer(width, n_heads) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of each next word of *y*, having read *x* (batch, length) up to there."""
        at = torch.arange(x.shape[1], device=x.device)
        found = self.norm(self.layers(self.words(x) + self.places(at)))
        return cross_entropy(found[:, :-1] @ self.words.weight.T, y[:, 1:])
