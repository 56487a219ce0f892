"""`bpsfast.tensorflow.keras`, BytePS's other name for `bpsfast.keras`: importing it gives that module.

Its callbacks are those of `bpsfast.keras`, too. It is loaded by name, as `bpsfast.keras` stands above this package.
"""
from __future__ import annotations

import sys
from importlib import import_module

keras = import_module("bpsfast.keras")
sys.modules[__name__ + ".callbacks"] = keras.callbacks
sys.modules[__name__] = keras
