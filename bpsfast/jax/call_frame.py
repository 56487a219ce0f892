"""XLA's FFI call frame as ctypes structures, so that a handler written in Python can read its arguments and answer.

The layouts are those of xla/ffi/api/c_api.h, API version 0.3 (jaxlib ships the header: `jax.ffi.include_dir()`). The
frame has its own size and version; `answer_metadata` and `check_frame` compare them before anything else is read, as
another layout would make the handler read wrong memory.
"""
from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p
from typing import Any

#: API versions whose layouts are these.
VERSIONS = ((0, 1), (0, 2), (0, 3))
_METADATA = 1  # XLA_FFI_Extension_Metadata
_STRING = 4  # XLA_FFI_AttrType_STRING
_TOKEN = 17  # XLA_FFI_DataType_TOKEN
INTERNAL = 13  # XLA_FFI_Error_Code_INTERNAL


class Buffer(ctypes.Structure):
    """XLA_FFI_Buffer. Only `data` is read, as shapes are known."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("dtype", c_int), ("data", c_void_p),
                ("rank", c_int64), ("dims", POINTER(c_int64))]


class Buffers(ctypes.Structure):
    """XLA_FFI_Args and XLA_FFI_Rets."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", POINTER(c_int)),
                ("buffers", c_void_p)]


class _ByteSpan(ctypes.Structure):
    _fields_ = [("address", c_void_p), ("size", c_size_t)]


class Attributes(ctypes.Structure):
    """XLA_FFI_Attrs: one attribute, a string."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("size", c_int64), ("types", POINTER(c_int)),
                ("names", c_void_p), ("values", POINTER(POINTER(_ByteSpan)))]


class _Version(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int)]


class _ErrorCreate(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("message", c_char_p), ("code", c_int)]


class Api(ctypes.Structure):
    """XLA_FFI_Api up to its first function, XLA_FFI_Error_Create."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("version", _Version), ("internal", c_void_p),
                ("create_error", ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorCreate)))]


class Frame(ctypes.Structure):
    """XLA_FFI_CallFrame."""

    _fields_ = [("struct_size", c_size_t), ("extension", c_void_p), ("api", POINTER(Api)), ("context", c_void_p),
                ("stage", c_int), ("arguments", Buffers), ("results", Buffers), ("attributes", Attributes),
                ("future", c_void_p)]


class _Extension(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("type", c_int), ("next", c_void_p)]


class _Metadata(ctypes.Structure):
    _fields_ = [("struct_size", c_size_t), ("version", _Version), ("traits", c_uint32)]


class _MetadataExtension(ctypes.Structure):
    _fields_ = [("base", _Extension), ("metadata", POINTER(_Metadata))]


#: The values of `struct_size`: XLA_FFI_STRUCT_SIZE of the last field.
_FRAME_NBYTES = Frame.future.offset
_METADATA_NBYTES = _Metadata.traits.offset + 4
_ERROR_CREATE_NBYTES = _ErrorCreate.code.offset + 4
_DATA_OFFSET = Buffer.data.offset

#: What XLA calls: returns the address of an XLA_FFI_Error, or None.
HANDLER = ctypes.CFUNCTYPE(c_void_p, POINTER(Frame))


def metadata_of(frame: Frame) -> Any:
    """Return the metadata structure that XLA asks the handler to fill in by this call; None for other calls."""
    if not frame.extension:
        return None
    extension = _Extension.from_address(frame.extension)
    return _MetadataExtension.from_address(frame.extension).metadata.contents if extension.type == _METADATA else None


def answer_metadata(frame: Frame, metadata: Any) -> str:
    """Tell XLA that the handler is of its version; return how the layouts differ, or ""."""
    found = frame.api.contents.version if frame.api else metadata.version
    version = found.major, found.minor
    metadata.version.major, metadata.version.minor = version
    metadata.traits = 0
    sizes = {"XLA_FFI_CallFrame": (frame.struct_size, _FRAME_NBYTES),
             "XLA_FFI_Metadata": (min(metadata.struct_size, _METADATA_NBYTES), _METADATA_NBYTES),
             "XLA_FFI_Api_Version": (metadata.version.struct_size, ctypes.sizeof(_Version))}
    wrong = [f"{name} has {there} bytes instead of {here}" for name, (there, here) in sizes.items() if there != here]
    if version not in VERSIONS:
        known = ", ".join(f"{major}.{minor}" for major, minor in VERSIONS)
        wrong.insert(0, f"its version is {version[0]}.{version[1]}; known are {known}")
    return "; ".join(wrong)


def check_frame(frame: Frame) -> str:
    """Return how those layouts of *frame* differ that `answer_metadata` does not check, or ""."""
    parts = {"XLA_FFI_Args": (frame.arguments.struct_size, ctypes.sizeof(Buffers)),
             "XLA_FFI_Rets": (frame.results.struct_size, ctypes.sizeof(Buffers)),
             "XLA_FFI_Attrs": (frame.attributes.struct_size, ctypes.sizeof(Attributes))}
    if frame.arguments.size:
        first = c_void_p.from_address(frame.arguments.buffers).value or 0
        parts["XLA_FFI_Buffer"] = c_size_t.from_address(first).value, ctypes.sizeof(Buffer)
    wrong = [f"{name} has {there} bytes instead of {here}" for name, (there, here) in parts.items() if there != here]
    if frame.attributes.size != 1 or frame.attributes.types[0] != _STRING:
        wrong.append(f"{frame.attributes.size} attributes came instead of one string")
    return "; ".join(wrong)


def text_of(frame: Frame) -> str:
    """Return the call's attribute."""
    span = frame.attributes.values[0].contents
    return ctypes.string_at(span.address, span.size).decode()


def addresses(buffers: Buffers) -> list[int]:
    """Return the addresses of all *buffers* but a token, which would be the first."""
    if not buffers.size:
        return []
    pointers = (c_size_t * buffers.size).from_address(buffers.buffers)
    first = 1 if c_int.from_address(pointers[0] + Buffer.dtype.offset).value == _TOKEN else 0
    at: Callable[[int], Any] = c_size_t.from_address
    return [at(pointer + _DATA_OFFSET).value for pointer in pointers[first:]]


def error(frame: Frame, text: str) -> int:
    """Return a new XLA_FFI_Error with *text*, which XLA frees."""
    arguments = _ErrorCreate(_ERROR_CREATE_NBYTES, None, text.encode(), INTERNAL)
    created: int = frame.api.contents.create_error(ctypes.byref(arguments))
    return created
