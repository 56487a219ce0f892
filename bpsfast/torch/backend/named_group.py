"""A torch process group as far as torch asks for its names."""
from __future__ import annotations

import torch.distributed as dist

from . import shim


class NamedGroup(dist.ProcessGroup):
    """Member *rank* of *size*; torch's user may call the group otherwise than *name* later."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._names = {"name": name, "desc": "undefined"}

    def getBackendName(self) -> str:
        """Return the name under which it is registered."""
        return shim.NAME

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

    setGroupName, setGroupDesc = _set_group_name, _set_group_desc
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
