"""Horovod's functions that tell how it was built (`mpi_built` and the like), for the APIs of all frameworks."""
from __future__ import annotations

from ..orchestration.errors import ConfigError

__all__ = [
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
]


def mpi_threads_supported() -> bool:
    """Raise ConfigError, as Horovod does where there is no MPI."""
    raise ConfigError("Horovod MPI is not enabled; Please make sure it's installed and enabled.")


def mpi_built() -> bool:
    """Return False: bpsfast sums by its own collectives, on the CPU, without any library or device named here."""
    return False


#: For Gloo's process groups there is `bpsfast.torch.schedule`.
ccl_built = cuda_built = ddl_built = gloo_built = gloo_enabled = mpi_enabled = rocm_built = mpi_built


def nccl_built() -> int:
    """Return 0: bpsfast does not use NCCL."""
    return 0
