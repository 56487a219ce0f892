"""RDMA verbs behind one interface, by our compiled wrapper or by pyverbs; names the errors of work completions.

Both have the names, signatures and errors of `bpsfast.pyx.verbs`: "native", which is that module and works without the
GIL, and "pyverbs", rdma-core's Python binding (`pyverbs_provider`). The setting ``verbs`` chooses one.

    verbs = provider(loaded.verbs)
    with verbs.Device("mlx5_0") as device: ...
"""
from __future__ import annotations

import importlib
from types import ModuleType

from ...orchestration.errors import ConfigError

_PROVIDERS = {"native": "bpsfast.pyx.verbs", "pyverbs": "bpsfast.hardware.verbs.pyverbs_provider"}
PROVIDERS = tuple(_PROVIDERS)


def provider(name: str) -> ModuleType:
    """Return the implementation *name* with its library loaded.

    Raises `ConfigError` if there is no such implementation; `VerbsMissing` if it cannot be used on this machine (an
    `OSError` that says what to install).
    """
    if name not in _PROVIDERS:
        raise ConfigError(f"verbs={name!r}: expected one of {', '.join(PROVIDERS)}")
    module = importlib.import_module(_PROVIDERS[name])
    module.load()
    return module
