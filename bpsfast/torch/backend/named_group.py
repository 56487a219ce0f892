"""A torch process group as far as torch asks for its names, and what it is behind them."""
from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from . import torch_compat

#: Kinds of devices whose tensors a group takes, in the order in which torch lists those of gloo.
_KINDS = ("cuda", "cpu")


class NamedGroup(dist.ProcessGroup):
    """Member *rank* of *size*; torch's user may call the group otherwise than *name* later."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._names = {"name": name, "desc": "undefined"}
        self.store: Any = None  # that torch has made it with

    def getBackendName(self) -> str:
        """Return the name under which it is registered."""
        return torch_compat.NAME

    name = _get_backend_name = getBackendName

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, text: str) -> None:
        self._names["desc"] = text

    def getGroupName(self) -> str:
        """Return what torch calls the group."""
        return self._names["name"]

    def getGroupDesc(self) -> str:
        """Return what torch's user calls the group."""
        return self._names["desc"]

    def get_group_store(self) -> Any:
        """Return the store that torch has made the group with."""
        return self.store

    @property
    def _device_types(self) -> list[torch.device]:
        """The devices whose tensors it takes."""
        return [torch.device(kind) for kind in _KINDS]

    def _get_backend(self, device: Any) -> NamedGroup:
        """Return what carries out calls for tensors on *device*: the group itself.

        Raises
        ------
        RuntimeError
            If it takes no tensors from there.
        """
        kind = torch.device(device).type
        if kind not in _KINDS:  # not by the property: the compiler of torch 2.14 does not know it
            raise RuntimeError(f"No backend type associated with device type {kind}: {torch_compat.NAME} takes tensors of the "
                               "CPU and of CUDA devices")
        return self

    # what torch asks the backend that it gets there

    @property
    def supports_splitting(self) -> bool:
        """Sub-groups are made anew: nothing is gained by splitting."""
        return False

    @property
    def supports_coalescing(self) -> bool:
        """Whether calls may be collected and waited for together."""
        return True

    @property
    def supports_time_estimate(self) -> bool:
        """How long a call will take is not known before."""
        return False

    @property
    def supports_shrinking(self) -> bool:
        """A group keeps its members."""
        return False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Calls need no memory of a kind of its own."""
        return False

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
