"""Horovod's name for the API of PyTorch: this module is `bpsfast.hvd` itself."""
from __future__ import annotations

import sys

sys.modules[__name__] = sys.modules[__name__.rpartition(".")[0]]
