"""One network as communication sees it: its gradients, and how long it computes."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ...orchestration.messages import TensorSpec
from ...orchestration.placement.partition import ITEM_NBYTES


@dataclass(frozen=True)
class Compute:
    """Seconds of one forward and one backward pass with *batch* (of what, says `unit`) on one `hardware`."""

    forward_s: float
    backward_s: float
    batch: int
    unit: str
    hardware: str

    def of_batch(self, batch: int) -> Compute:
        """Return the times for another batch, in proportion: right where the hardware was busy with this one."""
        factor = batch / self.batch
        return Compute(self.forward_s * factor, self.backward_s * factor, batch, self.unit, self.hardware)


@dataclass(frozen=True)
class Model:
    """One network. `dtype` is that of its gradients on the wire, by the names of `messages.TensorSpec`."""

    name: str
    title: str
    shapes: Mapping[str, tuple[int, ...]]
    dtype: str = "float32"
    compute: Compute | None = None

    @property
    def n_parameters(self) -> int:
        """Count the parameters."""
        return sum(map(prod, self.shapes.values()))

    @property
    def nbytes(self) -> int:
        """Return the bytes of all gradients."""
        return self.n_parameters * ITEM_NBYTES[self.dtype]

    def specs(self) -> list[TensorSpec]:
        """Return the tensors as the PyTorch layer declares them: one group, used by the forward pass in this order."""
        return [TensorSpec(name=name, dtype=self.dtype, shape=shape, group=self.name)
                for name, shape in self.shapes.items()]
