"""Jobs whose ranks share the GPU. They are started as programs: what has used CUDA cannot be forked."""
from __future__ import annotations

from typing import Any

from tests.gpu.place import REHEARSES
from tests.support.jobs import Job


def start_ranks(*ranks: int, **values: Any) -> Job:
    """Start a job of so many *ranks* on each node, two on one by default; *values* are settings."""
    return Job(ranks=ranks or (2,), forked=False, host_device=REHEARSES, **{"start_timeout_s": 120} | values)
