"""What compressing would give: a codec as people write it, and the tensors for which it pays (`codec_choice`)."""
from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from ...orchestration import codec as codecs
from ...orchestration.codec import CodecSpec
from ...orchestration.errors import ConfigError
from ...orchestration.placement.codec_choice import Choice, choose, loads_of
from ...orchestration.placement.shares import Machine
from .model import Model

_OPTIONS = tuple(name for name in CodecSpec.__struct_fields__ if name not in ("kind", "auto"))


class Compression(NamedTuple):
    """`choice` for the tensors of one model, all with `codec`; None where one machine has nobody to send to.

    `left`: names of the tensors that stay uncompressed, in forward order.
    """

    codec: CodecSpec
    choice: Choice | None
    left: tuple[str, ...]


def parse(text: str) -> CodecSpec:
    """Return the codec of ``KIND[:NAME=VALUE,...]``, such as ``topk:k=0.01,error_feedback``; a name alone means yes.

    Raises
    ------
    ConfigError
        If there is no such kind or option, or a value is impossible.
    """
    kind, _, options = text.partition(":")
    values: dict[str, str] = {"kind": kind.strip()}
    for word in filter(None, options.split(",")):
        name, equals, value = word.strip().partition("=")
        if name not in _OPTIONS:
            raise ConfigError(f"compression {text!r}: there is no option {name!r}; there are {', '.join(_OPTIONS)}")
        values[name] = value if equals else "true"
    if values["kind"] not in codecs.KINDS:
        raise ConfigError(f"compression {text!r}: there is no kind {kind!r}; there are {', '.join(codecs.KINDS)}")
    try:
        found = msgspec.convert(values, CodecSpec, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"compression {text!r}: {exc}") from None
    codecs.check(found)
    return found


def describe(codec: CodecSpec) -> str:
    """Return *codec* as `parse` reads it."""
    said = {field.name: getattr(codec, field.name) for field in msgspec.structs.fields(CodecSpec)
            if field.name in _OPTIONS and getattr(codec, field.name) != field.default}
    options = ",".join(name if value is True else f"{name}={'false' if value is False else value}"
                       for name, value in said.items())
    return f"{codec.kind}:{options}" if options else codec.kind


def predict(model: Model, machines: Sequence[Machine], codec: CodecSpec, copy_rate: float, *, partition_nbytes: int,
            fusion_nbytes: int) -> Compression:
    """Return for which tensors of *model* *codec* pays on *machines*, each of which copies *copy_rate* bytes/s.

    Raises
    ------
    UnsupportedError
        If tensors of the model's dtype are not compressed.
    """
    codecs.width_of(model.dtype)
    if sum(machine.has_ranks for machine in machines) == 1:
        return Compression(codec, None, tuple(model.shapes))
    optional = msgspec.structs.replace(codec, auto=True)
    specs = [msgspec.structs.replace(spec, codec=optional) for spec in model.specs()]
    loads, _ = loads_of(specs, partition_nbytes, fusion_nbytes)
    choice = choose(loads, machines, [copy_rate] * len(machines))
    return Compression(codec, choice, tuple(name for name in model.shapes if name not in choice.names))
