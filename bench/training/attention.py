"""What the models of words are made of: attention and its block."""
from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

#: Of an embedding: with a standard deviation of 0.02.
_LARGEST_WEIGHT = 0.035


class Attention(nn.Module):
    """Attention of *n_heads* heads over tensors (batch, length, width)."""

    def __init__(self, width: int, n_heads: int, bias: bool = True) -> None:
        super().__init__()
        self._n_heads = n_heads
        self.query, self.key, self.value, self.output = (nn.Linear(width, width, bias=bias) for _ in range(4))

    def forward(self, x: torch.Tensor, of: torch.Tensor | None = None, causal: bool = False) -> torch.Tensor:
        """Return what *x* finds in *of* (in itself without); *causal*: each place sees only those before it."""
        source = x if of is None else of
        query, key, value = (part(where).unflatten(-1, (self._n_heads, -1)).transpose(1, 2)
                             for part, where in ((self.query, x), (self.key, source), (self.value, source)))
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
        return self.output(found.transpose(1, 2).flatten(-2))


def feed_forward(width: int, inner: int, activation: nn.Module) -> nn.Sequential:
    """Return the two dense layers of a block."""
    return nn.Sequential(nn.Linear(width, inner), activation, nn.Linear(inner, width))


def embedding(n: int, width: int) -> nn.Embedding:
    """Return an embedding whose weights are small enough to be those of the output, too."""
    return nn.Embedding.from_pretrained(torch.empty(n, width).uniform_(-_LARGEST_WEIGHT, _LARGEST_WEIGHT), freeze=False)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of (..., classes) against (...); labels of -100 do not count."""
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
