"""Where tests of a GPU put their tensors, and what they do with its streams, as far as the host device has any."""
from __future__ import annotations

import os
from typing import Any

REHEARSES = os.environ.get("BPSTEST_DEVICE", "cuda") == "host"
#: torch's name of the device.
WHERE = "cpu" if REHEARSES else "cuda"


def missing() -> str | None:
    """Return in one line why tests cannot run, None if they can."""
    if REHEARSES:
        return None
    from bpsfast.gpu.cuda import cupy
    from bpsfast.orchestration.errors import UnsupportedError

    try:
        cupy()
    except UnsupportedError as exc:
        return str(exc).partition("\n")[0]
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU (it is built for CUDA {torch.version.cuda})"
    return None


def tensor(values: Any, dtype: str = "float32") -> Any:
    """Return a tensor of *values* on the device."""
    import torch

    return torch.as_tensor(values).to(device=WHERE, dtype=getattr(torch, dtype))


def nap(seconds: float = 0.2) -> None:
    """Keep torch's current stream busy for about so long, on a GPU."""
    if not REHEARSES:
        import torch

        torch.cuda._sleep(int(seconds * 1.5e9))


def now() -> Any:
    """Return an event after what is enqueued on torch's current stream."""
    import torch

    event = torch.cuda.Event()
    event.record()
    return event
