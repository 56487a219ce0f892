"""The layouts of XLA's call frame are those of jaxlib's header; errors if they are not."""
from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from tests.support.jax_ranks import jax, raised  # first: it skips this file where there is no JAX

from bpsfast.jax import call_frame, primitive  # isort: skip
from bpsfast.orchestration.errors import UnsupportedError  # isort: skip

#: Structures of the header by ours.
STRUCTURES = {"XLA_FFI_CallFrame": call_frame.Frame, "XLA_FFI_Args": call_frame.Buffers,
              "XLA_FFI_Rets": call_frame.Buffers, "XLA_FFI_Attrs": call_frame.Attributes,
              "XLA_FFI_Buffer": call_frame.Buffer, "XLA_FFI_Metadata": call_frame._Metadata,
              "XLA_FFI_Api_Version": call_frame._Version, "XLA_FFI_Error_Create_Args": call_frame._ErrorCreate}


@pytest.fixture(scope="module")
def header():
    path = Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    return re.sub(r"//[^\n]*", "", path.read_text())


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_fields_of_the_header(header, name):
    (body,) = re.findall(rf"struct {name} {{(.*?)}};", header, re.S)
    theirs = [re.sub(r"\s+", " ", line).strip() for line in body.split(";") if line.strip()]
    ours = STRUCTURES[name]._fields_
    assert len(theirs) >= len(ours)
    for line, (_, kind) in zip(theirs, ours):
        if "*" in line:
            assert ctypes.sizeof(kind) == 8, line
        elif line.startswith(("size_t", "int64_t")):
            assert ctypes.sizeof(kind) == 8 and not issubclass(kind, ctypes.Structure), line
        elif line.startswith(("int ", "XLA_FFI_DataType", "XLA_FFI_ExecutionStage", "XLA_FFI_Error_Code",
                              "XLA_FFI_Handler_Traits")):
            assert ctypes.sizeof(kind) == 4, line
        else:
            assert kind is STRUCTURES[line.split()[0]], line


def test_numbers_of_the_header(header):
    assert f"XLA_FFI_Error_Code_INTERNAL = {call_frame.INTERNAL}," in header
    assert f"XLA_FFI_DataType_TOKEN = {call_frame._TOKEN}," in header
    assert f"XLA_FFI_AttrType_STRING = {call_frame._STRING}," in header
    assert f"XLA_FFI_Extension_Metadata = {call_frame._METADATA}," in header
    fields = header[header.index("struct XLA_FFI_Api {"):].split(";")[:5]
    assert "_XLA_FFI_API_STRUCT_FIELD(XLA_FFI_Error_Create)" in fields[4]


def metadata_call(**changes):
    """Return a frame as XLA makes one to ask for the version, and its metadata."""
    metadata = call_frame._Metadata(call_frame._METADATA_NBYTES, call_frame._Version(24, None, 0, 0), 0)
    api = call_frame.Api(192, None, call_frame._Version(24, None, 0, changes.get("minor", 3)))
    extension = call_frame._MetadataExtension(
        call_frame._Extension(32, changes.get("type", call_frame._METADATA), None), ctypes.pointer(metadata))
    frame = call_frame.Frame(changes.get("frame", call_frame._FRAME_NBYTES), ctypes.addressof(extension),
                             ctypes.pointer(api))
    frame.kept = extension, metadata, api
    return frame, metadata


def test_metadata_is_answered_with_the_version_of_xla():
    frame, metadata = metadata_call()
    assert call_frame.answer_metadata(frame, call_frame.metadata_of(frame)) == ""
    assert (metadata.version.major, metadata.version.minor) == (0, 3)
    assert call_frame.metadata_of(metadata_call(type=99)[0]) is None


def test_what_does_not_fit_is_named():
    frame, metadata = metadata_call(minor=99, frame=200)
    wrong = call_frame.answer_metadata(frame, metadata)
    assert "0.99" in wrong and "XLA_FFI_CallFrame has 200 bytes instead of 168" in wrong
    frame.arguments.struct_size, frame.attributes.size = 48, 2
    wrong = call_frame.check_frame(frame)
    assert "XLA_FFI_Args has 48 bytes instead of 40" in wrong and "2 attributes" in wrong


def test_a_misfit_is_raised_before_anything_is_compiled(monkeypatch):
    jax.devices("cpu")
    assert primitive._misfit == ""
    primitive.require_fit()
    monkeypatch.setattr(primitive, "_misfit", "XLA_FFI_Args has 48 bytes instead of 40")
    with pytest.raises(UnsupportedError, match="48 bytes instead of 40"):
        primitive.require_fit()


def test_a_gpu_is_refused():
    from bpsfast.jax import primitive
    from bpsfast.jax.primitive import Leaf, PushPullCall

    call = PushPullCall((Leaf("x", (3,), "float32"),), True, None)
    traced = jax.jit(lambda x: primitive.run(call, [x])[0]).trace(jax.ShapeDtypeStruct((3,), "float32"))
    kind, text = raised(lambda: traced.lower(lowering_platforms=("cuda",)))
    assert kind == "UnsupportedError" and "not for cuda" in text and "outside jit" in text
