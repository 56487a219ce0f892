"""One rank's training step in `bench compressed`: sleeps instead of computing, pushes gradients with a given codec."""
from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

import bpsfast
from bpsfast.bench.harness.contestant import Operation
from bpsfast.tools.planner import catalog
from bpsfast.tools.planner.prediction import parse
from bpsfast.trainer.process import current

Array = np.ndarray[Any, Any]

#: Prefix of the names of this module's `operation`s, which are variants of `BpsfastRank`.
PREFIX = "step of "
_FORWARD_SHARE = 1 / 3


def variant(model: str, codec: str, compute_s: float) -> str:
    """Return the name of a step of built-in *model* with *codec* (as `parse` reads it; "": none)."""
    return PREFIX + json.dumps([model, codec, compute_s])


def operation(name: str, rank: int, size: int) -> Operation:
    """Return the operation *name*, a `variant`, whose first step is checked against the reference codec.

    All layers with weights take the same time to compute; backward takes twice as long as forward.
    """
    model, text, compute_s = json.loads(name.removeprefix(PREFIX))
    shapes = catalog.load(model).shapes
    gradients = bpsfast.Gradients({tensor: (shape, np.float32) for tensor, shape in shapes.items()},
                                  prefix=f"{text or 'uncompressed'} ", compression=parse(text) if text else None)
    layers = _layers(shapes)
    forward_s, backward_s = (share * compute_s / len(layers) for share in (_FORWARD_SHARE, 1 - _FORWARD_SHARE))
    results: dict[str, Array] = {}

    def run() -> None:
        for layer in reversed(layers):
            time.sleep(backward_s)
            for tensor in layer:
                gradients.ready(tensor)
        for layer in layers:
            for tensor in layer:
                results[tensor] = gradients.wait(tensor)
            time.sleep(forward_s)
        gradients.step()

    def fill(known: bool) -> None:
        if known:
            for tensor in gradients:
                gradients[tensor][...] = _gradient(tensor, shapes[tensor], rank)

    return Operation(run, fill, lambda: _n_wrong(name, gradients, results, size))


def _layers(shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Return the names of each layer, in forward order; a tensor with one dimension belongs to the layer before it."""
    layers: list[list[str]] = []
    for name, shape in shapes.items():
        if len(shape) > 1 or not layers:
            layers.append([])
        layers[-1].append(name)
    return layers


def _gradient(name: str, shape: tuple[int, ...], rank: int) -> Array:
    """Return *rank*'s gradient, which any rank can compute: mostly small normal numbers, like real gradients."""
    draw = np.random.default_rng((zlib.crc32(name.encode()), rank))
    values = draw.standard_normal(shape, np.float32)
    return values * values * values


def _n_wrong(label: str, gradients: bpsfast.Gradients, results: Mapping[str, Array], size: int) -> int:
    """Count elements of the first step that differ from the reference, and tensors that differ between ranks."""
    from bpsfast.kernels.codecs import codec_reference  # only the first step of compressing ranks needs it

    n_wrong = 0
    for name, found in results.items():
        partials = [_gradient(name, found.shape, rank).reshape(-1) for rank in range(size)]
        if partials[0].nbytes > current().settings.partition_bytes:
            continue  # several partitions: only compared between ranks
        codec = gradients.codecs.get(name)
        if codec is not None:
            expected = codec_reference.ReferenceJob(codec, partials[0].size, "float32", size).round(partials, size)
        else:
            expected = sum(partials[1:], partials[0]) / np.float32(size)
        n_wrong += int(np.count_nonzero(found.reshape(-1) != expected))
    digests = np.array([zlib.crc32(found.tobytes()) for found in results.values()], np.int64)
    summed = bpsfast.push_pull(digests, average=False, name=f"digests of {label}")
    return n_wrong + int(np.count_nonzero(summed != size * digests))
