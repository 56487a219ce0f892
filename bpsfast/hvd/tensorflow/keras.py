"""`horovod.tensorflow.keras` is another name of `horovod.keras`: importing this module gives `bpsfast.hvd.keras`."""
from __future__ import annotations

import sys

from .. import keras
from ..keras import callbacks

sys.modules[__name__ + ".callbacks"] = callbacks
sys.modules[__name__] = keras
