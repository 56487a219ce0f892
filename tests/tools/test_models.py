"""The gradient lists have the published networks' parameters, to the last one."""
from __future__ import annotations

from math import prod

import pytest

from bpsfast.orchestration.errors import ConfigError
from bpsfast.tools.planner import catalog
from bpsfast.tools.planner.model_shapes import ugatit


@pytest.mark.parametrize(("name", "n_tensors", "n_parameters"), [
    ("resnet18", 62, 11_689_512),        # torchvision
    ("resnet50", 161, 25_557_032),       # torchvision
    ("vgg16", 32, 138_357_544),          # torchvision
    ("vgg19", 38, 143_667_240),          # torchvision
    ("inception-bn", 278, 11_295_240),   # MXNet's example
    ("bert-base", 206, 110_106_428),     # the published checkpoint, with both heads of pre-training
    ("bert-large", 398, 336_226_108),    # the published checkpoint, with both heads of pre-training
    ("gpt2", 148, 124_439_808),          # the published checkpoint
    ("transformer", 185, 61_362_176),    # counted: see the module
    ("ugatit", 148, 670_761_088),        # counted: see the module
])
def test_totals_are_the_published_ones(name, n_tensors, n_parameters):
    model = catalog.load(name)
    assert (len(model.shapes), model.n_parameters) == (n_tensors, n_parameters)
    assert sum(catalog.n_elements(name)) == n_parameters


def test_light_ugatit_is_what_a_later_paper_prints():
    sizes = {name: prod(shape) for name, shape in ugatit(light=True).items()}
    generators = sum(n for name, n in sizes.items() if name.startswith("generator"))
    assert (round(generators / 1e6, 1), round((sum(sizes.values()) - generators) / 1e6, 1)) == (21.2, 112.8)


def test_bert_without_its_heads_is_the_published_encoder():
    heads = ("words.", "next_sentence.")
    for name, n_parameters in (("bert-base", 109_482_240), ("bert-large", 335_141_888)):
        shapes = catalog.load(name).shapes
        assert sum(prod(shape) for key, shape in shapes.items() if not key.startswith(heads)) == n_parameters


def test_vgg_is_one_tensor_mostly():
    shapes = catalog.load("vgg19").shapes
    assert shapes["fc1.weight"] == (4096, 25088)
    assert prod(shapes["fc1.weight"]) / sum(map(prod, shapes.values())) > 0.7


def test_inception_joins_what_its_blocks_put_out():
    shapes = catalog.load("inception-bn").shapes
    inputs = {block: shapes[f"{block}_3x3_reduce.weight"][1] for block in ("3a", "3b", "3c", "4a", "4e", "5a", "5b")}
    assert inputs == {"3a": 192, "3b": 256, "3c": 320, "4a": 576, "4e": 608, "5a": 1056, "5b": 1024}
    assert shapes["fc.weight"] == (1000, 1024)
    assert "3c_1x1.weight" not in shapes and "4e_proj.weight" not in shapes


def test_lists_begin_with_what_forward_needs_first():
    first = {name: next(iter(shapes())) for name, shapes in catalog.MODELS.items()}
    assert first["resnet50"] == "conv1.weight" and first["gpt2"] == "wte.weight"
    assert first["transformer"] == "embedding.weight" and first["bert-base"] == "embeddings.word.weight"


def test_bytes_follow_the_dtype_on_the_wire():
    assert catalog.load("vgg16").nbytes == 4 * 138_357_544
    assert catalog.load("bert-large").nbytes == 2 * 336_226_108


def test_compute_times_scale_with_the_batch():
    compute = catalog.load("bert-large").compute
    assert (compute.forward_s, compute.backward_s, compute.batch, compute.hardware) == (0.339, 0.508, 35, "V100")
    assert compute.of_batch(70).backward_s == pytest.approx(1.016)
    assert catalog.load("gpt2").compute is None


def test_specs_are_one_group_in_forward_order():
    specs = catalog.load("resnet50").specs()
    assert {spec.group for spec in specs} == {"resnet50"} and specs[0].name == "conv1.weight"


def test_an_unknown_model_is_an_error_that_lists_the_known():
    with pytest.raises(ConfigError, match=r"'vgg-16' is not built in; there are resnet50, resnet18, vgg16"):
        catalog.load("vgg-16")
