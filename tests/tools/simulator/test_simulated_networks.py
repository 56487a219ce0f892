"""Known models: their published sizes, and computing that adds up."""
from __future__ import annotations

from math import prod

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.simulator.workload import MODELS, build, shapes_of


@pytest.mark.parametrize(("model", "millions", "within"), [
    ("vgg16", 138.358, 1e-5), ("resnet50", 25.557, 1e-4), ("gpt2", 124.44, 1e-4), ("transformer", 61, 0.01),
    ("bert-large", 387, 0.06), ("ugatit", 670.8, 0.03)])
def test_models_have_their_published_size(model: str, millions: float, within: float) -> None:
    assert sum(map(prod, shapes_of(model).values())) / 1e6 == pytest.approx(millions, rel=within)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_layers_hold_every_tensor_once_and_all_of_the_time(model: str) -> None:
    job = build(model, 0.5, 0.6)
    assert job.compute_s == pytest.approx(0.5)
    assert sum(layer.backward_s for layer in job.layers) == pytest.approx(0.3)
    assert [tensor for layer in job.layers for tensor in layer.tensors] == list(shapes_of(model))


def test_bad_input_is_named() -> None:
    with pytest.raises(ConfigError, match="known: bert-large"):
        build("vgg99", 1.0)
    with pytest.raises(ConfigError, match="is invalid"):
        build("vgg16", -1.0)
