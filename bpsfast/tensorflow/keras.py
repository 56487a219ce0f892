"""BytePS's other name for `bpsfast.keras`: this module, and its callbacks, are that one. It is loaded by name, as
`bpsfast.keras` stands above this package.
"""
from __future__ import annotations

import sys
from importlib import import_module

keras = import_module("bpsfast.keras")
sys.modules[__name__ + ".callbacks"] = keras.callbacks
sys.modules[__name__] = keras
