"""The gradient lists have the published networks' parameters, to the last one."""
from __future__ import annotations

from math import prod

import pytest

from bpsfast.bench import gradient_lists


@pytest.mark.parametrize(("model", "n_tensors", "n_parameters"), [
    ("vgg19", 38, 143_667_240), ("resnet50", 161, 25_557_032), ("inception-bn", 278, 11_295_240)])
def test_totals_are_the_published_ones(model, n_tensors, n_parameters):
    elements = gradient_lists.n_elements(model)
    assert (len(elements), sum(elements)) == (n_tensors, n_parameters)


def test_vgg_is_one_tensor_mostly():
    shapes = gradient_lists.vgg19()
    assert shapes["fc1.weight"] == (4096, 25088)
    assert prod(shapes["fc1.weight"]) / sum(map(prod, shapes.values())) > 0.7


def test_inception_joins_what_its_blocks_put_out():
    shapes = gradient_lists.inception_bn()
    inputs = {block: shapes[f"{block}_3x3_reduce.weight"][1] for block in ("3a", "3b", "3c", "4a", "4e", "5a", "5b")}
    assert inputs == {"3a": 192, "3b": 256, "3c": 320, "4a": 576, "4e": 608, "5a": 1056, "5b": 1024}
    assert shapes["fc.weight"] == (1000, 1024)
    assert "3c_1x1.weight" not in shapes and "4e_proj.weight" not in shapes
