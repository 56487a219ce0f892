"""BERT for pre-training: masked words and next sentences (Devlin et al., arXiv:1810.04805)."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from bpsfast.bench.training.attention import Attention, cross_entropy, embedding, feed_forward

#: One word of so many is masked: 15 %, at the same places in every sentence.
_MASK_EVERY, _MASK_WORD = 7, 103


class Layer(nn.Module):
    """One layer, normalised after each part."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.attention, self.norm = Attention(width, n_heads), nn.LayerNorm(width)
        self.feed, self.last_norm = feed_forward(width, 4 * width, nn.GELU()), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) of the same."""
        x = self.norm(x + self.attention(x))
        return self.last_norm(x + self.feed(x))


class Bert(nn.Module):
    """BERT-large is 30,522 words, 512 places, width 1024, 16 heads, 24 layers."""

    def __init__(self, n_words: int, n_places: int, width: int, n_heads: int, n_layers: int) -> None:
        super().__init__()
        self.words, self.places = embedding(n_words, width), embedding(n_places, width)
        self.segments = embedding(2, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Layer(width, n_heads) for _ in range(n_layers)))
        self.pooler, self.next_sentence = nn.Linear(width, width), nn.Linear(width, 2)
        self.transform, self.last_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(n_words))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of the masked words of *x* (batch, length), which *y* has, and of its halves' order."""
        length = x.shape[1]
        at = torch.arange(length, device=x.device)
        masked = at % _MASK_EVERY == _MASK_EVERY // 2
        words = x.masked_fill(masked, _MASK_WORD)
        found = self.layers(self.norm(self.words(words) + self.places(at) + self.segments((at >= length // 2).long())))
        heads = self.last_norm(functional.gelu(self.transform(found[:, masked])))
        loss = cross_entropy(heads @ self.words.weight.T + self.bias, y[:, masked])
        follows = self.next_sentence(self.pooler(found[:, 0]).tanh())
        return loss + functional.cross_entropy(follows, torch.zeros_like(y[:, 0]))
