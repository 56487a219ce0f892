"""BERT for pre-training: masked words and next sentences (Devlin et al., arXiv:1810.04805).

110,106,428 (base) and 336,226,108 (large) parameters with the 30,522 lower-case word pieces, as the published
checkpoints and ``transformers.BertForPreTraining`` have them: the decoder's weight is the word embedding. The paper
rounds to 110M and 340M.
"""
from __future__ import annotations

from .model_shapes import Shapes

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
