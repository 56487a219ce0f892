"""Transformer "base" for translation (Vaswani et al., arXiv:1706.03762): 6 + 6 layers of width 512.

61,362,176 parameters, counted from the configuration of TensorFlow's official model, which BytePS's artifact trains:
33,708 subwords in one embedding for both languages and the output, no biases in attention. The paper prints 65M for
37,000 subwords; a published exact number was not found. "Base" because the authors' 19.5 ms at 100 Gbit/s are the
float32 bytes of 60.9M parameters, a third of "big".
"""
from __future__ import annotations

from .model_shapes import Shapes

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
