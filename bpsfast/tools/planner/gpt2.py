"""GPT-2, the smallest of its four sizes (Radford et al., 2019): what BytePS's evaluation trains.

124,439,808 parameters, as the published checkpoint and ``transformers.GPT2LMHeadModel("gpt2")`` have them: the output's
weight is the word embedding. Which size the OSDI paper used is not printed; its artifact names the checkpoint "gpt2".
"""
from __future__ import annotations

from .model_shapes import Shapes

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
