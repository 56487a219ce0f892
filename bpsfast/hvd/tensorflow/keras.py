"""Horovod's other name for `bpsfast.hvd.keras`: this module, and its callbacks, are that one."""
from __future__ import annotations

import sys

from .. import keras
from ..keras import callbacks

sys.modules[__name__ + ".callbacks"] = callbacks
sys.modules[__name__] = keras
