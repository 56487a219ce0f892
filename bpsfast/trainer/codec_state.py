"""The state of compressed tensors on this rank's node (error feedback, momentum): saved with the model, and loaded."""
from __future__ import annotations

from typing import Any, Literal

import numpy as np

from ..orchestration.errors import BusyError, UnsupportedError, error_of
from ..orchestration.messages import StateAsk, StateDone
from .input_memory import InputMemory, Region
from .node_connection import NodeRequests
from .unit import Unit


class States:
    """Reads and writes the node's state of compressed tensors. Any thread, without a push of the same unit meanwhile.

    Every node has a state of its own: what its ranks' gradients left unsent, and what it owns of the job's. So each
    machine saves one, and a job with other machines cannot load it.
    """

    def __init__(self, requests: NodeRequests, memory: InputMemory) -> None:
        self._requests = requests
        self._memory = memory

    def save(self, unit: Unit) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return the state of *unit* as bytes, empty in a job of one machine; its last round must have been waited for.

        Raises `UnsupportedError` if the unit is not compressed. Raises `BusyError` if a round of it is under way.
        """
        nbytes = self._ask(unit, "size").nbytes
        if nbytes == 0:
            return np.empty(0, np.uint8)
        region = self._memory.allocate(nbytes)
        try:
            self._ask(unit, "save", region)
            return region.array.copy()
        finally:
            self._memory.release(region)

    def load(self, unit: Unit, state: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        """Continue from *state*, which `save` returned on this node of such a job.

        All ranks of the node may load the same, before any of them pushes again. Raises as `save`, and `MismatchError`
        if it is of another node, partitioning or codec; then nothing has changed.
        """
        region = self._memory.allocate(max(1, state.nbytes))
        try:
            region.array[:state.nbytes] = state
            self._ask(unit, "load", region.part(0, state.nbytes))
        finally:
            self._memory.release(region)

    def _ask(self, unit: Unit, action: Literal["size", "save", "load"], region: Region | None = None) -> StateDone:
        if unit.codec is None:
            raise UnsupportedError(f"{unit.name!r} is not compressed and has no state")
        if unit.in_flight:
            raise BusyError(f"the state of {unit.name!r} was requested while its round {unit.round} is under way: wait "
                            "for it first")
        done = self._requests.ask(
            StateDone, lambda request: StateAsk(
                request=request, unit=unit.number, action=action, segment=region.segment if region else 0,
                offset=region.offset if region else 0, nbytes=region.array.nbytes if region else 0),
            f"the node did not {action} the state of {unit.name!r}")
        if done.error:
            raise error_of(done.error, f"{unit.name!r}: {done.reason}")
        return done
