"""Memory that is known by its address, as Python sees it."""
from __future__ import annotations

import ctypes

_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_from_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_from_memory.restype = ctypes.py_object
_READ, _WRITE = 0x100, 0x200


def view(address: int, nbytes: int, writable: bool = False) -> memoryview:
    """Return the *nbytes* at *address*. Nothing keeps them alive: the caller does, for longer than the view is used."""
    if not nbytes:
        return memoryview(b"")
    found: memoryview = _from_memory(address, nbytes, _WRITE if writable else _READ)
    return found
