"""A machine's accelerators: forward through the layers, backward through them, step after step."""
from __future__ import annotations

from collections.abc import Callable, Sequence

from .event_clock import Clock
from .workload import Layer

#: Called with (worker, layer) when the gradients of a layer are there.
Ready = Callable[[int, int], None]


class Worker:
    """Computes the chain; waits for sums where it needs them.

    Parameters
    ----------
    units_of_layer
        The units whose sums a layer's forward needs.
    cross_barrier
        Begin a layer's forward when its own sums are there; else (the barrier of a framework's step) when all are.
    optimizer_s
        Time between the last sum and the next forward, once a step.
    """

    def __init__(self, clock: Clock, index: int, layers: Sequence[Layer], units_of_layer: Sequence[Sequence[int]],
                 n_steps: int, cross_barrier: bool, ready: Ready, optimizer_s: float = 0.0) -> None:
        self._clock = clock
        self.index = index
        self._layers = layers
        self._units_of_layer = units_of_layer
        self._steps_left = n_steps
        self._cross_barrier = cross_barrier
        self._ready = ready
        self._optimizer_s = optimizer_s
        self._missing: set[int] = set()
        self._waits_for: int | None = None
        self._all_units = frozenset(unit for units in units_of_layer for unit in units)
        #: When each step began its forward, and at the end when the last sum was there.
        self.began_s: list[float] = []

    def begin(self) -> None:
        """Begin a step, or note the end of the last one."""
        self.began_s.append(self._clock.now)
        if self._steps_left == 0:
            return
        self._steps_left -= 1
        self._forward(0)

    def unit_done(self, unit: int) -> None:
        """Take note that the sum of *unit* is there."""
        self._missing.discard(unit)
        if self._waits_for is None:
            return
        layer = self._waits_for
        if layer < 0:
            if not self._missing:
                self._waits_for = None
                self._clock.at(self._clock.now + self._optimizer_s, self.begin)
        elif not self._lacks(layer):
            self._waits_for = None
            self._forward(layer)

    def _lacks(self, layer: int) -> bool:
        return any(unit in self._missing for unit in self._units_of_layer[layer])

    def _forward(self, layer: int) -> None:
        if layer == len(self._layers):
            self._backward(layer - 1)
        elif self._lacks(layer):
            self._waits_for = layer
        else:
            self._clock.at(self._clock.now + self._layers[layer].forward_s, self._forward, layer + 1)

    def _backward(self, layer: int) -> None:
        if layer < 0:
            self._end_backward()
        else:
            self._clock.at(self._clock.now + self._layers[layer].backward_s, self._made, layer)

    def _made(self, layer: int) -> None:
        """The gradients of *layer* are there. Noted before anything is sent: a lone worker's sums come at once."""
        if layer == len(self._layers) - 1:
            self._missing = set(self._all_units)
        self._ready(self.index, layer)
        self._backward(layer - 1)

    def _end_backward(self) -> None:
        if self._cross_barrier and self._steps_left:
            self._clock.at(self._clock.now + self._optimizer_s, self.begin)
        elif self._missing:
            self._waits_for = -1
        else:
            self._clock.at(self._clock.now + self._optimizer_s, self.begin)
